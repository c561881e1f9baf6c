#include <algorithm>
#include <cmath>
#include <functional>
#include <new>
#include <random>
#include <span>
#include <utility>

#include "cpu/device/host_device.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/device_copies.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {
namespace {

constexpr std::chrono::minutes kPatience{2};
constexpr std::uint32_t kSamples = 9;
/// Calls in a row, each on memory of its own, together more than a device's cache holds.
constexpr std::uint32_t kCalls = 8;
constexpr std::uint32_t kPages = 8'192;
constexpr std::uint32_t kPageBudgets[] = {16, 246};
constexpr std::uint64_t kCopyBytes = 256 * MiB;
constexpr std::uint64_t kLinkBytes = 48 * MiB;
constexpr std::uint64_t kBlockBytes = 8 * KiB;

/// Per call: what the stream took, and what enqueuing took.
struct CallTime {
  double device_us = 0.0;
  double host_us = 0.0;
};

/// What cannot be beaten: bytes through the device's memory, or over the link.
enum class Floor : std::uint8_t { device, link };

/// Stages of one decode step outside attention, on data of its size, against what their bytes cost alone.
class KernelBench {
 public:
  KernelBench(std::shared_ptr<Device> device, const AttentionShape& shape, std::uint32_t page_tokens);
  [[nodiscard]] Table run();

 private:
  using Enqueue = std::function<void(std::uint32_t call)>;

  [[nodiscard]] std::span<std::byte> on_device(std::uint64_t bytes);
  [[nodiscard]] std::span<std::byte> pinned(std::uint64_t bytes);
  [[nodiscard]] std::span<float> random_floats(std::size_t count);
  [[nodiscard]] std::span<std::byte> random_bf16(std::uint64_t bytes);
  [[nodiscard]] std::span<std::byte> upload(std::span<const std::byte> from);
  [[nodiscard]] CallTime time(std::uint32_t calls, const Enqueue& enqueue);
  void add(const std::string& kernel, const std::string& work, Floor floor, std::uint64_t bytes, const CallTime& took);

  void measure_floors();
  void score_pages();
  void top_k();
  void gather(bool to_device);

  std::shared_ptr<Device> device_;
  std::shared_ptr<Stages> stages_;
  AttentionShape shape_;
  PageLayout layout_;
  std::vector<std::unique_ptr<Buffer>> memory_;  ///< of the case that is measured
  std::unique_ptr<Stream> stream_;               ///< goes before the memory that its queue refers to
  std::unique_ptr<Event> begin_;
  std::unique_ptr<Event> end_;
  std::unique_ptr<Buffer> gate_memory_;
  Flag* gate_ = nullptr;
  std::uint64_t gate_value_ = 0;
  std::mt19937 random_{1};
  double device_gbps_ = 0.0;
  double link_gbps_ = 0.0;
  Table table_;
};

KernelBench::KernelBench(std::shared_ptr<Device> device, const AttentionShape& shape, std::uint32_t page_tokens)
    : device_(std::move(device)),
      stages_(stages_of(*device_)),
      shape_(shape),
      layout_{.page_tokens = page_tokens, .head_dim = shape.head_dim, .dtype = DType::bf16},
      stream_(device_->create_stream("kernels")),
      begin_(device_->create_event()),
      end_(device_->create_event()),
      gate_memory_(device_->allocate_pinned(sizeof(Flag))),
      gate_(new (gate_memory_->data()) Flag) {
  table_ = {.key = "kernels",
            .title = "Kernels of a decode step against the time of their bytes alone (median per call)",
            .columns = {{"kernel", "kernel"},
                        {"work", "work"},
                        {"time_us", "time us", 2},
                        {"host_us", "to enqueue us", 2},
                        {"floor", "floor"},
                        {"bytes", "bytes"},
                        {"floor_us", "floor us", 2},
                        {"share_of_floor", "of floor's rate", 0, Column::Show::percent}}};
}

std::span<std::byte> KernelBench::on_device(std::uint64_t bytes) {
  memory_.push_back(device_->allocate(bytes));
  return {memory_.back()->data(), static_cast<std::size_t>(bytes)};
}

std::span<std::byte> KernelBench::pinned(std::uint64_t bytes) {
  memory_.push_back(device_->allocate_pinned(bytes));
  return {memory_.back()->data(), static_cast<std::size_t>(bytes)};
}

std::span<std::byte> KernelBench::upload(std::span<const std::byte> from) {
  const std::span<std::byte> to = on_device(from.size());
  tools::upload(*device_, *stream_, from, to.data());
  return to;
}

std::span<float> KernelBench::random_floats(std::size_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random_);
  return {reinterpret_cast<float*>(upload(std::as_bytes(std::span(values))).data()), count};
}

std::span<std::byte> KernelBench::random_bf16(std::uint64_t bytes) {
  std::vector<std::uint16_t> bits(bytes / sizeof(std::uint16_t));
  for (std::uint16_t& x : bits) x = static_cast<std::uint16_t>(random_() & 0x3fff);  // In [0, 2): no NaN.
  return upload(std::as_bytes(std::span(bits)));
}

/// A gate holds the stream back until all calls are queued, so that its time is free of the host's.
CallTime KernelBench::time(std::uint32_t calls, const Enqueue& enqueue) {
  using Micros = std::chrono::duration<double, std::micro>;
  std::vector<double> device_us;
  std::vector<double> host_us;
  for (std::uint32_t i = 0; i < kSamples + 1; ++i) {
    stream_->wait(*gate_, ++gate_value_);
    enqueue(calls - 1);  // Wakes the clocks, on the memory that is wanted last.
    stream_->record(*begin_);
    const auto start = Clock::now();
    for (std::uint32_t call = 0; call < calls; ++call) enqueue(call);
    const auto queued = Clock::now();
    stream_->record(*end_);
    gate_->signal(gate_value_);
    stream_->synchronize(deadline_after(kPatience));
    if (i == 0) continue;  // Warm-up.
    device_us.push_back(Micros(end_->time() - begin_->time()).count() / calls);
    host_us.push_back(Micros(queued - start).count() / calls);
  }
  return {.device_us = percentile(std::move(device_us), 0.5), .host_us = percentile(std::move(host_us), 0.5)};
}

void KernelBench::add(const std::string& kernel, const std::string& work, Floor floor, std::uint64_t bytes,
                      const CallTime& took) {
  const double floor_us = static_cast<double>(bytes) / (floor == Floor::link ? link_gbps_ : device_gbps_) * 1e-3;
  table_.rows.push_back({kernel, work, took.device_us, took.host_us, floor == Floor::link ? "link" : "device memory",
                         bytes, floor_us, floor_us / took.device_us});
  memory_.clear();
}

void KernelBench::measure_floors() {
  const auto copy_us = [&](std::span<std::byte> to, std::span<std::byte> from) {
    const Copy copy{.to = to.data(), .from = from.data(), .bytes = to.size()};
    return time(1, [&](std::uint32_t) { stream_->copy({&copy, 1}); });
  };
  const std::span<std::byte> to = on_device(kCopyBytes);
  const CallTime device = copy_us(to, on_device(kCopyBytes));
  const CallTime link = copy_us(to.first(kLinkBytes), pinned(kLinkBytes));
  device_gbps_ = 2.0 * static_cast<double>(kCopyBytes) / device.device_us * 1e-3;  // Read and written.
  link_gbps_ = static_cast<double>(kLinkBytes) / link.device_us * 1e-3;
  add("copy", "device to device", Floor::device, 2 * kCopyBytes, device);
  add("copy", "host to device", Floor::link, kLinkBytes, link);
}

void KernelBench::score_pages() {
  const std::uint64_t digest_bytes = 2 * layout_.row_bytes();
  const std::uint64_t head_bytes = kPages * digest_bytes;
  std::vector<std::uint32_t> order(kPages);
  for (std::uint32_t i = 0; i < kPages; ++i) order[i] = i * 5'003 % kPages;
  const std::span<std::byte> frames = upload(std::as_bytes(std::span(order)));
  const std::span<float> q = random_floats(std::size_t{shape_.q_heads} * shape_.head_dim);
  const std::size_t scores = std::size_t{shape_.q_heads} * kPages;
  auto* const out = reinterpret_cast<float*>(on_device(scores * sizeof(float)).data());
  std::vector<std::vector<ScorePagesTask>> layers(kCalls);
  for (auto& tasks : layers) {
    const std::span<std::byte> digests = random_bf16(head_bytes * shape_.kv_heads);
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      const std::size_t first = std::size_t{head} * shape_.group();
      tasks.push_back({.q = q.data() + first * shape_.head_dim,
                       .digests = digests.data() + head * head_bytes,
                       .frames = reinterpret_cast<const std::uint32_t*>(frames.data()),
                       .pages = kPages,
                       .out = out + first * kPages});
    }
  }
  const CallTime took = time(kCalls, [&](std::uint32_t call) {
    stages_->score_pages(layers[call % kCalls], shape_, DType::bf16, stream_.get());
  });
  add("score_pages", std::to_string(shape_.kv_heads) + " heads x " + std::to_string(kPages) + " pages", Floor::device,
      head_bytes * shape_.kv_heads + scores * sizeof(float), took);
}

void KernelBench::top_k() {
  for (const std::uint32_t k : kPageBudgets) {
    const std::span<float> values = random_floats(std::size_t{shape_.q_heads} * kPages);
    auto* const out = reinterpret_cast<std::uint32_t*>(pinned(std::uint64_t{shape_.q_heads} * k * 4).data());
    std::vector<TopKTask> tasks;
    for (std::uint32_t row = 0; row < shape_.q_heads; ++row) {
      tasks.push_back({.values = values.subspan(std::size_t{row} * kPages, kPages), .k = k, .out = out + row * k});
    }
    const CallTime took = time(kCalls, [&](std::uint32_t) { stages_->top_k(tasks, stream_.get()); });
    add("top_k", std::to_string(shape_.q_heads) + " rows of " + std::to_string(kPages) + ", k " + std::to_string(k),
        Floor::device, values.size_bytes(), took);
  }
}

void KernelBench::gather(bool to_device) {
  constexpr std::uint64_t kBlocks = kLinkBytes / kBlockBytes;
  const std::span<std::byte> host = pinned(kLinkBytes);
  const std::span<std::byte> device = on_device(kLinkBytes);
  std::vector<Copy> copies;
  for (std::uint64_t i = 0; i < kBlocks; ++i) {
    std::byte* const far = host.data() + i * 5'003 % kBlocks * kBlockBytes;
    std::byte* const near = device.data() + i * kBlockBytes;
    copies.push_back({.to = to_device ? near : far, .from = to_device ? far : near, .bytes = kBlockBytes});
  }
  const CallTime took = time(1, [&](std::uint32_t) { stream_->copy(copies); });
  add("gather", std::to_string(kBlocks) + " blocks of 8 KiB " + (to_device ? "to" : "from") + " the device",
      Floor::link, kLinkBytes, took);
}

Table KernelBench::run() {
  measure_floors();
  score_pages();
  top_k();
  gather(true);
  gather(false);
  table_.title += "; device memory " + std::to_string(std::lround(device_gbps_)) + " GB/s, link " +
                  std::to_string(std::lround(link_gbps_)) + " GB/s";
  return std::move(table_);
}

}  // namespace

Table bench_gpu_kernels(const DeviceFlags& flags, const AttentionShape& shape, std::uint32_t page_tokens) {
  DeviceFlags gathering = flags;
  gathering.transfer = to_string(TransferPath::gather);
  std::shared_ptr<Device> device = make_device(gathering);
  if (!device) {
    const cpu::Topology topology;
    device = std::make_shared<cpu::HostDevice>(std::make_shared<const cpu::Workers>(topology, cpu::WorkersOptions{}));
  }
  return KernelBench(std::move(device), shape, page_tokens).run();
}

}  // namespace sluice::tools
