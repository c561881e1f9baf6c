// A process that is suspended for longer than its time-outs, at any moment, goes on as if nothing had happened.

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "cpu/device/host_device.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kTimeout{150};
constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 32};
constexpr std::uint32_t kPrompt = 200;
constexpr std::uint32_t kTokens = 216;

/// Decodes the same sequence again and again until the other end of `stop` is closed. Empty, or what went wrong.
std::string decode_until_closed(int stop, std::uint32_t seed) try {
  const Story story(kShape, kTokens, seed);
  EngineOptions options{.shape = kShape,
                        .kv_dtype = DType::f32,
                        .largest = {.decode_rows = 1, .prefill_rows = 64, .prefills = 1, .unbounded = true},
                        .threads = 2,
                        .pin_threads = false,
                        .answer_timeout = kTimeout,
                        .timeout = kTimeout};
  options.host_bytes = 20 * block_bytes(options);
  options.cpu_sequences = 1;
  const auto workers = std::make_shared<cpu::Workers>(cpu::Topology(), cpu::WorkersOptions{.threads = 2, .pin = false});
  // Slow enough that most of the time a thread waits.
  const auto device = std::make_shared<cpu::HostDevice>(
      workers, cpu::HostDeviceOptions{.flag_timeout = kTimeout, .faults = {.seed = seed, .max_delay = 1000us}});
  EngineRig rig;
  rig.device = device;
  rig.queue = device->create_stream("caller");
  rig.stream = rig.queue.get();
  Engine engine(options, device);
  pollfd closed{.fd = stop, .events = POLLIN, .revents = 0};
  do {
    Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | top_k=all | near=0,sinks=4,recent=8"))};
    import_story(engine, rig, teller, kPrompt, 100);
    ForwardTensors tensors(*device, kShape, options.largest.rows());
    while (teller.at < kTokens) {
      const std::vector<float> out = run_forward(engine, rig, tensors, {&teller})[0];
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        const double error = plain::worst(out, story.attended(layer, teller.at - 1, teller.at, 1, 0),
                                          layer * std::size_t{kShape.q_heads} * kShape.head_dim);
        if (!(error < 1e-4)) return "decoded outputs are off by " + std::to_string(error);
      }
    }
    engine.end(teller.id);
  } while (::poll(&closed, 1, 0) == 0);
  return {};
} catch (const std::exception& error) {
  return error.what();
}

/// A process that decodes, to be suspended.
class Decoder {
 public:
  explicit Decoder(std::uint32_t seed) {
    REQUIRE(::pipe2(stop_, O_CLOEXEC) == 0);
    REQUIRE(::pipe2(report_, O_CLOEXEC) == 0);
    process_ = ::fork();
    REQUIRE(process_ >= 0);
    if (process_ != 0) return;
    ::close(stop_[1]);
    const std::string wrong = decode_until_closed(stop_[0], seed);
    (void)!::write(report_[1], wrong.data(), wrong.size());
    ::_exit(0);
  }
  ~Decoder() {
    for (const int end : {stop_[0], report_[0]}) ::close(end);
    if (waited_) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  void suspend(std::chrono::milliseconds span) const {
    ::kill(process_, SIGSTOP);
    std::this_thread::sleep_for(span);
    ::kill(process_, SIGCONT);
  }
  /// Lets it finish; what went wrong.
  std::string finish() {
    ::close(stop_[1]);
    ::close(report_[1]);
    std::string wrong(4096, '\0');
    const ssize_t size = ::read(report_[0], wrong.data(), wrong.size());
    wrong.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    int status = 0;
    ::waitpid(process_, &status, 0);
    waited_ = true;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? wrong : wrong + " (died)";
  }

 private:
  int stop_[2] = {-1, -1};
  int report_[2] = {-1, -1};
  pid_t process_ = -1;
  bool waited_ = false;
};

}  // namespace

TEST_CASE("a suspended process loses nothing", "[engine][suspended]") {
  const auto seed = GENERATE(1u, 2u);
  CAPTURE(seed);
  std::mt19937 rng(seed);
  Decoder decoder(seed);
  for (int i = 0; i < 6; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100 + rng() % 100));
    decoder.suspend(3 * kTimeout);
  }
  const std::string wrong = decoder.finish();
  REQUIRE(wrong == "");
}

}  // namespace sluice::test
