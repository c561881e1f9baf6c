#include "tools/cli/bench/device.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "sluice/error.hpp"
#include "sluice/units.hpp"
#include "tools/cli/bench/device_copies.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {
namespace {

constexpr std::chrono::minutes kPatience{2};
/// Larger than any device's cache.
constexpr std::uint64_t kCold = 256 * MiB;

}  // namespace

void gather_rows(const SyntheticLayer& layer, std::uint32_t begin, std::uint32_t count, bool values, std::byte* out) {
  const SyntheticOptions& options = layer.options();
  const std::uint64_t row = options.layout.row_bytes();
  for (std::uint32_t t = 0; t < count; ++t) {
    for (std::uint32_t head = 0; head < options.shape.kv_heads; ++head) {
      const KvView view = layer.view(head);
      std::memcpy(out, values ? view.v_row(begin + t) : view.k_row(begin + t), row);
      out += row;
    }
  }
}

DeviceSteps::DeviceSteps(const SyntheticLayer& layer, Device& device) : options_(layer.options()) {
  const auto stream = device.create_stream("bench");
  const AttentionShape& shape = options_.shape;
  const std::size_t group_size = std::size_t{shape.group()} * shape.head_dim;
  std::vector<float> q;
  for (std::uint32_t step = 0; step < options_.steps; ++step) {
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
      const float* from = layer.query(head, step);
      q.insert(q.end(), from, from + group_size);
    }
  }
  q_ = uploaded(device, *stream, std::as_bytes(std::span(q)));
  std::vector<std::byte> rows(options_.layout.row_bytes() * shape.kv_heads * options_.steps);
  gather_rows(layer, options_.tokens, options_.steps, false, rows.data());
  k_ = uploaded(device, *stream, rows);
  gather_rows(layer, options_.tokens, options_.steps, true, rows.data());
  v_ = uploaded(device, *stream, rows);
}

TensorView DeviceSteps::q(std::uint32_t step) const noexcept {
  const AttentionShape& shape = options_.shape;
  const std::byte* data = q_->data() + std::uint64_t{step} * shape.q_heads * shape.head_dim * sizeof(float);
  return dense_view(data, DType::f32, 1, shape.q_heads, shape.head_dim);
}

TensorView DeviceSteps::k(std::uint32_t step) const noexcept {
  const AttentionShape& shape = options_.shape;
  return dense_view<const std::byte>(k_->data() + options_.layout.row_bytes() * shape.kv_heads * step,
                                     options_.layout.dtype, 1, shape.kv_heads, shape.head_dim);
}

TensorView DeviceSteps::v(std::uint32_t step) const noexcept {
  const AttentionShape& shape = options_.shape;
  return dense_view<const std::byte>(v_->data() + options_.layout.row_bytes() * shape.kv_heads * step,
                                     options_.layout.dtype, 1, shape.kv_heads, shape.head_dim);
}

struct DenseOnDevice::Impl {
  const SyntheticOptions& options;
  PageLayout layout;
  std::uint32_t head_pages;  ///< pages per KV head
  const DeviceSteps& steps;
  Device& device;
  std::shared_ptr<Stages> stages;
  std::unique_ptr<Stream> stream;
  std::vector<std::uint32_t> lengths;           ///< of the sequences
  std::vector<std::unique_ptr<Buffer>> copies;  ///< [copies] pages [kv_heads, pages]
  std::size_t next_copy = 0;                    ///< which the next sequence reads
  std::unique_ptr<Buffer> out;                  ///< of each sequence [q_heads, head_dim], then [q_heads]
  std::vector<std::uint32_t> frames;            ///< [kv_heads, pages]
  std::vector<std::vector<PageRun>> runs;       ///< of each sequence
  std::vector<AttendTask> tasks;                ///< [sequences, kv_heads]

  void list_runs(std::uint32_t step) {
    for (std::size_t row = 0; row < lengths.size(); ++row) {
      const std::uint32_t n = lengths[row] + step + 1;
      runs[row].resize(div_up(n, layout.page_tokens));
      for (std::uint32_t page = 0; page < runs[row].size(); ++page) {
        const std::uint32_t rows = std::min(layout.page_tokens, n - page * layout.page_tokens);
        runs[row][page] = {.page = page, .begin = 0, .end = static_cast<std::uint16_t>(rows)};
      }
    }
  }
  void queue(std::uint32_t step) {
    const AttentionShape& shape = options.shape;
    list_runs(step);
    tasks.resize(lengths.size() * shape.kv_heads);
    for (std::size_t row = 0; row < lengths.size(); ++row) {
      const Buffer& pages = *copies[next_copy++ % copies.size()];
      float* const floats = reinterpret_cast<float*>(out->data()) + row * shape.q_heads * (shape.head_dim + 1);
      for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
        const std::uint32_t q_head = head * shape.group();
        AttendTask& task = tasks[row * shape.kv_heads + head];
        task.q = reinterpret_cast<const float*>(steps.q(step).row(0, q_head));
        task.kv = {.base = pages.data(), .frames = frames.data() + std::size_t{head} * head_pages, .layout = layout};
        task.runs = runs[row];
        task.out = {.out = floats + std::size_t{q_head} * shape.head_dim,
                    .lse = floats + std::size_t{shape.q_heads} * shape.head_dim + q_head};
      }
    }
    stages->attend(tasks, shape, stream.get());
  }
};

DenseOnDevice::DenseOnDevice(const SyntheticLayer& layer, const DeviceSteps& steps, Device& device,
                             std::uint32_t page_tokens, std::vector<std::uint32_t> lengths)
    : impl_(new Impl{.options = layer.options(),
                     .layout = layer.options().layout,
                     .head_pages = 0,
                     .steps = steps,
                     .device = device,
                     .stages = stages_of(device),
                     .stream = device.create_stream("dense"),
                     .lengths = std::move(lengths),
                     .copies = {},
                     .out = nullptr,
                     .frames = {},
                     .runs = {},
                     .tasks = {}}) {
  Impl& self = *impl_;
  self.runs.resize(self.lengths.size());
  const SyntheticOptions& options = layer.options();
  const std::uint32_t tokens = options.tokens + options.steps;
  self.layout.page_tokens = page_tokens;
  self.head_pages = static_cast<std::uint32_t>(div_up(tokens, page_tokens));
  const std::uint64_t head_bytes = self.head_pages * self.layout.page_bytes();
  for (std::uint32_t i = 0; i < self.head_pages * options.shape.kv_heads; ++i) self.frames.push_back(i);
  const std::uint64_t bytes = head_bytes * options.shape.kv_heads;
  const std::uint64_t copies = std::max<std::uint64_t>(div_up(kCold, bytes), self.lengths.size());
  for (std::uint64_t i = 0; i < copies; ++i) self.copies.push_back(device.allocate(bytes));
  std::vector<std::byte> packed(head_bytes);
  for (std::uint32_t head = 0; head < options.shape.kv_heads; ++head) {
    const KvView from = layer.view(head);
    const KvView to{.base = packed.data(), .frames = self.frames.data(), .layout = self.layout};
    for (std::uint32_t token = 0; token < tokens; ++token) {
      std::memcpy(to.k_row(token), from.k_row(token), self.layout.row_bytes());
      std::memcpy(to.v_row(token), from.v_row(token), self.layout.row_bytes());
    }
    for (const auto& copy : self.copies) upload(device, *self.stream, packed, copy->data() + head * head_bytes);
  }
  self.out =
      device.allocate(self.lengths.size() * options.shape.q_heads * (options.shape.head_dim + 1) * sizeof(float));
}

DenseOnDevice::~DenseOnDevice() = default;

std::vector<float> DenseOnDevice::attend(std::uint32_t step) {
  impl_->queue(step);
  const AttentionShape& shape = impl_->options.shape;
  const std::size_t elements = std::size_t{shape.q_heads} * shape.head_dim;
  return downloaded<float>(impl_->device, *impl_->stream, impl_->out->data(), elements);
}

std::vector<double> DenseOnDevice::time(std::uint32_t samples) {
  // A gate holds the device back until the burst is queued, so that the time is the device's alone. The page lists of
  // a gated burst must fit the memory that verbs pass their arguments through.
  constexpr std::uint64_t kListBytes = 1 * MiB;
  constexpr std::uint64_t kTaskBytes = 256;  // More than its description takes beside the list.
  const std::uint64_t list_bytes = impl_->lengths.size() * (impl_->frames.size() * sizeof(std::uint32_t) +
                                                            impl_->options.shape.kv_heads * kTaskBytes);
  const auto burst = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(kListBytes / list_bytes, 2, 20));
  const auto begin = impl_->device.create_event();
  const auto end = impl_->device.create_event();
  const auto gate_memory = impl_->device.allocate_pinned(sizeof(Flag));
  Flag& gate = *new (gate_memory->data()) Flag;
  std::vector<double> times;
  for (std::uint32_t i = 0; i < samples + 1; ++i) {
    impl_->stream->wait(gate, i + 1);
    impl_->queue(0);  // Wakes the memory clocks.
    impl_->stream->record(*begin);
    for (std::uint32_t k = 1; k < burst; ++k) impl_->queue(0);
    impl_->stream->record(*end);
    gate.signal(i + 1);
    impl_->stream->synchronize(deadline_after(kPatience));
    if (i == 0) continue;  // Warm-up.
    times.push_back(std::chrono::duration<double, std::micro>(end->time() - begin->time()).count() / (burst - 1));
  }
  return times;
}

}  // namespace sluice::tools
