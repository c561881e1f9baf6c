// A process that is suspended for longer than its time-outs, at any moment, goes on as if nothing had happened.
#include <memory>
#include <random>
#include <thread>

#include "cpu/device/host_device.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/decoder_process.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kTimeout{150};
constexpr std::chrono::seconds kPatience{600};

/// What the process does.
void decode(std::uint64_t seed, int stop, int report) {
  const auto workers = std::make_shared<cpu::Workers>(cpu::Topology(), cpu::WorkersOptions{.threads = 2, .pin = false});
  // Slow enough that most of the time a thread waits.
  const auto device = std::make_shared<cpu::HostDevice>(
      workers, cpu::HostDeviceOptions{.flag_timeout = kTimeout, .faults = {.seed = seed, .max_delay = 1000us}});
  EngineRig rig;
  rig.device = device;
  rig.queue = device->create_stream("caller");
  rig.stream = rig.queue.get();
  const std::vector<DecodedLine> lines = decoded_lines(rig, seed);
  EngineOptions options = decoding_options(rig, lines);
  options.answer_timeout = kTimeout;
  options.timeout = kTimeout;
  const auto prepare = [&rig](Engine& engine, ForwardTensors& tensors) -> DecodingHooks::Enqueue {
    return [&] { tensors.attend(engine, rig.stream); };
  };
  decode_for_parent(rig, options, lines, {.prepare = prepare, .again = {}}, stop, report);
}

}  // namespace

TEST_CASE("a suspended process loses nothing", "[engine][suspended]") {
  const auto seed = GENERATE(1u, 2u);
  CAPTURE(seed);
  std::mt19937 rng(seed);
  DecoderProcess decoder([&](int stop, int report) { decode(seed, stop, report); });
  decoder.await_forwards(3, kPatience);
  for (int i = 0; i < 6; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100 + rng() % 100));
    decoder.suspend(3 * kTimeout);
  }
  decoder.await_forwards(3, kPatience);
  const DecodingReport report = decoder.finish(kPatience);
  REQUIRE(report.forwards > 6);
  REQUIRE(report.failed == 0);
}

}  // namespace sluice::test
