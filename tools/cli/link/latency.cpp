// What a hand-over and pinning cost.
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#include "cpu/machine/host_pool.hpp"
#include "cpu/threads/spin.hpp"
#include "sluice/error.hpp"
#include "tools/cli/link/machine.hpp"
#include "tools/link/ping.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint32_t kRounds = 200;  ///< as many as a stream's queue certainly holds
constexpr std::uint32_t kPingRounds = 2000;
constexpr std::uint32_t kPatience_us = 5'000'000;
/// Pinning 8 GiB within 1.2 s.
constexpr double kTarget_s_per_gib = 1.2 / 8.0;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Two flags, one each way.
struct Flags {
  explicit Flags(Device& device)
      : memory(device.allocate_pinned(3 * sizeof(Flag))),
        to_host(new (memory->data()) Flag),
        to_device(new (memory->data() + sizeof(Flag)) Flag),
        done(reinterpret_cast<std::uint64_t*>(memory->data() + 2 * sizeof(Flag))) {}
  std::unique_ptr<Buffer> memory;
  Flag* to_host;
  Flag* to_device;
  std::uint64_t* done;  ///< rounds that the ping kernel completed
};

/// The stream raises one flag and waits for the other, which this thread raises as soon as it sees the first.
double stream_round_trip_us(LinkMachine& machine) {
  Flags flags(machine.device);
  const auto stream = machine.device.create_queue("device");
  const std::uint64_t start = kRounds + 1;
  stream->wait(*flags.to_device, 1);  // until all is enqueued
  for (std::uint64_t round = 2; round <= start; ++round) {
    stream->signal(*flags.to_host, round);
    stream->wait(*flags.to_device, round);
  }
  const Clock::time_point begin = Clock::now();
  flags.to_device->signal(1);
  const Clock::time_point deadline = begin + std::chrono::microseconds(kPatience_us);
  for (std::uint64_t round = 2; round <= start; ++round) {
    while (flags.to_host->state(round) == Flag::State::pending) {
      if (Clock::now() > deadline) throw Error(Errc::timeout, "link: a stream raised no flag for five seconds");
      cpu::relax();
    }
    flags.to_device->signal(round);
  }
  const double us = seconds_since(begin) * 1e6 / kRounds;
  stream->synchronize(deadline_after(std::chrono::seconds(10)));
  return us;
}

/// The same with a kernel at the other end.
double kernel_round_trip_us(LinkMachine& machine) {
  Flags flags(machine.device);
  const auto stream = machine.device.create_queue("device");
  launch_ping(flags.to_host->word(), flags.to_device->word(), kPingRounds, kPatience_us, flags.done,
                   stream->handle());
  const std::atomic_ref<std::uint64_t> ping(*flags.to_host->word());
  const std::atomic_ref<std::uint64_t> pong(*flags.to_device->word());
  const Clock::time_point deadline = Clock::now() + std::chrono::microseconds(kPatience_us);
  Clock::time_point begin;
  for (std::uint64_t round = 1; round <= kPingRounds && Clock::now() < deadline; ++round) {
    while (ping.load(std::memory_order_acquire) < round && Clock::now() < deadline) cpu::relax();
    if (round == 1) begin = Clock::now();  // the kernel has started
    pong.store(round, std::memory_order_release);
  }
  const double us = seconds_since(begin) * 1e6 / (kPingRounds - 1);
  stream->synchronize(deadline_after(std::chrono::seconds(20)));
  if (*flags.done != kPingRounds) throw Error(Errc::timeout, "link: the ping kernel got no answer for five seconds");
  return us;
}

/// An empty stream asked until an event is through: the least that a thread pays to know that the GPU is done.
double synchronize_us(LinkMachine& machine) {
  const auto stream = machine.device.create_queue("device");
  const auto event = machine.device.create_event();
  const Clock::time_point begin = Clock::now();
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    stream->record(*event);
    stream->synchronize(deadline_after(std::chrono::seconds(10)));
  }
  return seconds_since(begin) * 1e6 / kRounds;
}

}  // namespace

void link_latency(LinkMachine& machine, LinkFindings& findings) {
  const bool able = machine.device.memory_operations();
  (void)kernel_round_trip_us(machine);  // loads the kernel
  const double kernel_us = kernel_round_trip_us(machine);
  const Json stream_us = able ? Json(stream_round_trip_us(machine)) : Json();
  findings.tables.push_back({.key = "latency",
                             .title = "Hand-over device -> host -> device, this thread spinning",
                             .columns = {{"stream_flag_us", "stream memory operations, us", 1},
                                         {"kernel_flag_us", "spinning kernel, us", 1},
                                         {"record_synchronize_us", "event and synchronize, us", 1}},
                             .rows = {{stream_us, kernel_us, synchronize_us(machine)}},
                             .layout = Table::Layout::pairs});
  findings.verdict.push_back("a flag goes round device, host and back in " + format("%.1f us", kernel_us) +
                             " by a kernel" +
                             (able ? " and in " + format("%.1f us", stream_us.get<double>()) +
                                         " by stream memory operations, which keep no multiprocessor waiting"
                                   : std::string("; this driver has no stream memory operations")));
}

void link_pinning(LinkMachine& machine, LinkFindings& findings) {
  const std::uint64_t bytes = machine.options.pin_gib * GiB;
  double pool_s = 0.0;
  double release_s = 0.0;
  {
    const Clock::time_point begin = Clock::now();
    auto pool = std::make_unique<cpu::HostPool>(
        cpu::HostPoolOptions{.layout = {.page_tokens = 32, .head_dim = 128, .dtype = DType::bf16},
                             .bytes = bytes,
                             .numa_node = machine.node},
        machine.topology, machine.workers, machine.device);
    pool_s = seconds_since(begin);
    const Clock::time_point end = Clock::now();
    pool.reset();
    release_s = seconds_since(end);
  }
  const std::uint64_t driver_bytes = std::min(bytes, 1 * GiB);
  const Clock::time_point begin = Clock::now();
  (void)machine.device.allocate_pinned(driver_bytes);
  const double driver_s = seconds_since(begin);
  const double per_gib = pool_s / static_cast<double>(machine.options.pin_gib);
  findings.tables.push_back({.key = "pinning",
                             .title = "Pinning host memory",
                             .columns = {{"bytes", "bytes"},
                                         {"pool_s", "as an engine does: map, touch in parallel, register, s", 2},
                                         {"pool_gib_per_s", "GiB/s", 1},
                                         {"release_s", "release, s", 2},
                                         {"driver_gib_per_s", "cudaHostAlloc, zeroed and freed, GiB/s", 1}},
                             .rows = {{bytes, pool_s, 1.0 / per_gib, release_s,
                                       static_cast<double>(driver_bytes) / static_cast<double>(GiB) / driver_s}},
                             .layout = Table::Layout::pairs});
  findings.verdict.push_back("pinning takes " + format("%.2f s", per_gib) + " per GiB" +
                             (per_gib <= kTarget_s_per_gib ? ", within" : "; missed:") + " 1.2 s for 8 GiB");
}

}  // namespace sluice::tools
