// What transfers and other work take from each other.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "tools/cli/link/machine.hpp"
#include "tools/link/memory_load.hpp"

namespace sluice::tools {
namespace {


constexpr std::uint32_t kLoad_us = 200'000;
constexpr std::uint64_t kPieceBytes = 256 * KiB;

/// Attention on the device, as far as memory notices.
class DeviceLoad {
 public:
  explicit DeviceLoad(LinkMachine& machine)
      : machine_(machine),
        memory_(machine.device.allocate(machine.options.quick ? 256 * MiB : 1 * GiB)),
        moved_(machine.device.allocate_pinned(64)),
        stream_(machine.device.create_queue("load")),
        begin_(machine.device.create_event()),
        end_(machine.device.create_event()) {
    load_memory_load_kernels();
  }
  void start() {
    std::memset(moved_->data(), 0, 64);
    stream_->record(*begin_);
    launch_memory_load(memory_->data(), memory_->bytes(), kLoad_us,
                            reinterpret_cast<std::uint64_t*>(moved_->data()), machine_.device.multiprocessors(),
                            stream_->handle());
    stream_->record(*end_);
  }
  [[nodiscard]] bool running() const { return end_->state() == Event::State::pending; }
  /// GB/s that it read and wrote.
  double finish() {
    stream_->synchronize(deadline_after(std::chrono::seconds(30)));
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, moved_->data(), sizeof bytes);
    return link_gbps(bytes, std::chrono::duration<double, std::micro>(end_->time() - begin_->time()).count());
  }

 private:
  LinkMachine& machine_;
  std::unique_ptr<Buffer> memory_;
  std::unique_ptr<Buffer> moved_;
  std::unique_ptr<gpu::QueueStream> stream_;
  std::unique_ptr<Event> begin_;
  std::unique_ptr<Event> end_;
};

/// Attention on the host, as far as memory notices: all threads but the one that enqueues read a slab larger than the
/// caches.
class HostLoad {
 public:
  explicit HostLoad(const LinkMachine& machine)
      : workers_(machine.topology, {.threads = std::max(machine.workers.threads(), 2u) - 1, .numa_node = machine.node}),
        slab_({.bytes = machine.options.quick ? 512 * MiB : 1 * GiB, .numa_node = machine.node}, machine.topology,
              workers_) {
    const auto memory = slab_.memory();
    workers_.parallel_for(static_cast<std::uint32_t>(memory.size() / kPieceBytes), [&](std::uint32_t i) {
      std::memset(memory.data() + i * kPieceBytes, static_cast<int>(i * 37 % 255 + 1), kPieceBytes);
    });
  }
  ~HostLoad() {
    if (thread_.joinable()) (void)finish();
  }
  [[nodiscard]] std::uint32_t threads() const { return workers_.threads(); }
  void start() {
    bytes_ = 0;
    stop_ = false;
    begin_ = Clock::now();
    end_ = begin_ + std::chrono::microseconds(kLoad_us);
    thread_ = std::thread([this] {
      workers_.parallel_for(workers_.threads(), [this](std::uint32_t worker) { read(worker); });
      stop_ = true;
    });
  }
  [[nodiscard]] bool running() const { return !stop_; }
  double finish() {
    thread_.join();
    return link_gbps(bytes_, std::chrono::duration<double, std::micro>(Clock::now() - begin_).count());
  }

 private:
  void read(std::uint32_t worker) {
    const auto memory = slab_.memory();
    const std::uint64_t pieces = memory.size() / kPieceBytes;
    std::uint64_t sum = 0;
    std::uint64_t bytes = 0;
    for (std::uint64_t i = worker; Clock::now() < end_; i += workers_.threads(), bytes += kPieceBytes) {
      const std::byte* const piece = memory.data() + i % pieces * kPieceBytes;
      for (std::uint64_t at = 0; at < kPieceBytes; at += sizeof(std::uint64_t)) {
        std::uint64_t word = 0;
        std::memcpy(&word, piece + at, sizeof word);
        sum += word;
      }
    }
    sum_ += sum;
    bytes_ += bytes;
  }

  cpu::Workers workers_;
  cpu::Slab slab_;
  std::thread thread_;
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> sum_{0};  ///< keeps the compiler from leaving the reads out
  std::atomic<bool> stop_{true};
  Clock::time_point begin_;
  Clock::time_point end_;
};

/// One kind of load and one way of transfer, each alone and both together.
template <class Load>
std::vector<Json> measure(LinkMachine& machine, Load& load, const char* name, const TransferCase& what) {
  const auto transfer_gbps = [&] { return link_gbps(what.bytes(), machine.bench.landed(what, 1).device_us); };
  load.start();
  while (load.running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const double load_alone = load.finish();
  std::vector<double> rates;
  for (int i = 0; i < machine.options.samples; ++i) rates.push_back(transfer_gbps());
  const double transfer_alone = median(rates);
  rates.clear();
  load.start();
  while (load.running()) {
    const double rate = transfer_gbps();
    if (load.running()) rates.push_back(rate);  // else part of it had the machine for itself
  }
  const double load_together = load.finish();
  const double transfer_together = median(rates);
  return {name,
          to_string(what.choice.path),
          what.to_device ? "h2d" : "d2h",
          what.block_bytes,
          what.blocks,
          transfer_alone,
          rates.empty() ? Json() : Json(transfer_together),
          rates.empty() ? Json() : Json(1.0 - transfer_together / transfer_alone),
          load_alone,
          load_together,
          1.0 - load_together / load_alone};
}

std::vector<TransferCase> cases(const LinkMachine& machine) {
  std::vector<TransferCase> all;
  for (const bool to_device : {true, false}) {
    const auto add = [&](TransferPath path, std::uint64_t block_bytes) {
      const std::uint64_t blocks =
          std::min<std::uint64_t>(16 * MiB / block_bytes, machine.bench.most_blocks(block_bytes));
      all.push_back({.choice = {.path = path},
                     .to_device = to_device,
                     .block_bytes = block_bytes,
                     .blocks = static_cast<std::uint32_t>(blocks)});
    };
    add(TransferPath::gather, 16 * KiB);
    add(TransferPath::batch, 128 * KiB);
    add(TransferPath::copy_engine, 2 * MiB);
  }
  return all;
}

std::string percent(double share) { return format("%.0f%%", 100.0 * share); }

/// Of the first case: pages to the device by the gather kernel.
std::string judge(const char* name, const std::vector<Json>& row) {
  return "beside " + std::string(name) + " the gather kernel loses " +
         (row[7].is_null() ? "everything" : percent(row[7].get<double>())) + " of its rate to the device, and takes " +
         percent(row[10].get<double>()) + " of theirs";
}

}  // namespace

void link_load(LinkMachine& machine, LinkFindings& findings) {
  Table table{.key = "load",
              .title = "Transfers beside other work, GB/s",
              .columns = {{"load", "other work"},
                          {"path", "path"},
                          {"direction", "way"},
                          {"block_bytes", "block"},
                          {"blocks", "blocks"},
                          {"transfer_alone_gbps", "transfer alone", 1},
                          {"transfer_gbps", "together", 1},
                          {"transfer_loss", "loss", 0, Column::Show::percent},
                          {"load_alone_gbps", "work alone", 0},
                          {"load_gbps", "together", 0},
                          {"load_loss", "loss", 0, Column::Show::percent}}};
  const auto run = [&](auto& load, const char* name) {
    const std::size_t first = table.rows.size();
    for (const TransferCase& what : cases(machine)) {
      machine.bar.update(table.rows.size(), 12, "load");
      table.rows.push_back(measure(machine, load, name, what));
    }
    findings.verdict.push_back(judge(name, table.rows[first]));
  };
  {
    DeviceLoad load(machine);
    run(load, "device memory traffic");
  }
  HostLoad load(machine);
  run(load, "host memory reads");
  findings.facts["host_load_threads"] = load.threads();
  findings.tables.push_back(std::move(table));
}

}  // namespace sluice::tools
