// A process with a GPU that is stopped in the middle of forwards. The GPU does not stop: it gives an answer up that is
// late by its own clock, and the forward with it.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <random>
#include <string>
#include <thread>

#include "tests/support/catch.hpp"
#include "tests/support/decoder_process.hpp"

namespace sluice::test {
namespace {

constexpr std::chrono::milliseconds kAnswerTimeout{250};
/// For the first forward CUDA must begin, too.
constexpr std::chrono::seconds kPatience{120};

/// Becomes the program beside this one.
std::function<void(int, int)> gpu_decoder(std::uint32_t seed) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "gpu_decoder";
  return
      [program, number = std::to_string(seed), timeout = std::to_string(kAnswerTimeout.count())](int stop, int report) {
        ::dup2(stop, STDIN_FILENO);
        ::dup2(report, STDOUT_FILENO);
        for (const int end : {STDIN_FILENO, STDOUT_FILENO}) ::fcntl(end, F_SETFD, 0);
        ::execl(program.c_str(), program.c_str(), number.c_str(), timeout.c_str(), nullptr);
        report_failure(program + " cannot be run; it belongs beside this test", STDOUT_FILENO);
      };
}

/// Some moment of a forward that it enqueues, or shortly after that.
void await_some_moment(DecoderProcess& decoder, std::mt19937& rng) {
  decoder.await_forwards(1 + rng() % 5, kPatience);
  std::this_thread::sleep_for(std::chrono::microseconds(rng() % 4000));
}

}  // namespace

TEST_CASE("a process that is suspended in forwards repeats those that the GPU gave up", "[engine][gpu][suspended]") {
  const auto seed = GENERATE(1u, 2u, 3u);
  CAPTURE(seed);
  constexpr std::uint64_t kTimes = 8;
  std::mt19937 rng(seed);
  DecoderProcess decoder(gpu_decoder(seed));
  for (std::uint64_t i = 0; i < kTimes; ++i) {
    await_some_moment(decoder, rng);
    decoder.suspend(3 * kAnswerTimeout);
  }
  decoder.await_forwards(50, kPatience);
  const DecodingReport report = decoder.finish(kPatience);
  CAPTURE(report.forwards, report.failed);
  REQUIRE(report.forwards > 50);
  REQUIRE(report.failed > 0);  // Most of a forward is waiting for an answer.
  REQUIRE(report.failed <= kTimes);
}

TEST_CASE("a process that is killed in a forward leaves the GPU to the next one", "[engine][gpu][suspended]") {
  std::mt19937 rng(7);
  for (std::uint32_t seed = 11; seed < 14; ++seed) {
    CAPTURE(seed);
    DecoderProcess victim(gpu_decoder(seed));
    await_some_moment(victim, rng);
    victim.kill(kPatience);
    DecoderProcess next(gpu_decoder(seed));
    next.await_forwards(50, kPatience);
    const DecodingReport report = next.finish(kPatience);
    REQUIRE(report.forwards >= 50);
    REQUIRE(report.failed == 0);
  }
}

}  // namespace sluice::test
