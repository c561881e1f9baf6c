#include "tools/cli/synthetic/synthetic_forwards.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "scheduler/plan/task_graph.hpp"
#include "sluice/step/fetch_share.hpp"
#include "tools/cli/bench/device_copies.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/report.hpp"
#include "tools/llama/graph.hpp"

namespace sluice::tools {
namespace {

constexpr std::chrono::minutes kPatience{2};

}  // namespace

SyntheticForwards::SyntheticForwards(const SyntheticForwardsOptions& options, const SyntheticLayer& layer,
                                     const DeviceSteps& steps, std::shared_ptr<Device> device)
    : layer_(layer),
      steps_(steps),
      shape_(layer.options().shape),
      device_(std::move(device)),
      queue_(device_->create_stream("caller")),
      on_trace_(options.on_trace) {
  shape_.layers = options.layers;
  // The embedded device has no queue that could be handed to strangers.
  stream_ = queue_->native_handle() != nullptr ? queue_->native_handle() : queue_.get();
  engine_ = std::make_unique<sluice::Engine>(sizes(options), device_);
  bucket_ = engine_->options().largest;
  take_tensors();
  for (std::uint32_t row = 0; row < options.rows; ++row) {
    items_.push_back({.sequence = engine_->begin(options.policy)});
    import(items_.back().sequence, options.lengths.empty() ? layer.options().tokens : options.lengths[row]);
  }
}

EngineOptions SyntheticForwards::sizes(const SyntheticForwardsOptions& options) const {
  const SyntheticOptions& synthetic = layer_.options();
  EngineOptions sizes{
      .shape = shape_,
      .page_tokens = synthetic.layout.page_tokens,
      .kv_dtype = options.kv_dtype,
      .largest = {.decode_rows = options.rows, .audit = options.audit, .trace = static_cast<bool>(options.on_trace)},
      .sequences = options.rows};
  const std::uint32_t tokens = synthetic.tokens + synthetic.steps;
  const std::uint64_t blocks = div_up(tokens, sizes.page_tokens) + 1;
  PageLayout layout = synthetic.layout;
  layout.dtype = options.kv_dtype;
  const std::uint64_t planes = std::uint64_t{shape_.layers} * shape_.kv_heads * options.rows;
  sizes.host_bytes = blocks * layout.page_bytes() * planes;
  sizes.near_bytes = static_cast<std::uint64_t>(options.near_share * static_cast<double>(blocks)) *
                     layout.near().page_bytes() * planes;
  sizes.largest.max_tokens = static_cast<std::uint32_t>(blocks) * sizes.page_tokens;
  sizes.import_rows = std::min(4096u, synthetic.tokens);
  sizes.placement = options.placement;
  sizes.handover = options.handover;
  sizes.fetch_share = options.fetch_share;
  sizes.threads = options.threads;
  sizes.promotions = options.promotions;
  sizes.dense_tokens = options.dense_tokens;
  sizes.largest.top_k = false;
  refuse_scores(options.policy);
  sizes.policies = {options.policy};
  return resolved(sizes);
}

std::vector<double> SyntheticForwards::time(std::uint32_t count, bool graph, std::vector<double>* calling) {
  // What is captured reads and writes the same tensors every time; a step's are copied there.
  std::unique_ptr<CapturedWork> captured;
  if (graph) captured = capture(stream_, [this] { attend(); });
  graph_nodes_ = captured ? static_cast<double>(captured->nodes()) / shape_.layers : 0.0;
  std::vector<double> us;
  for (std::uint32_t i = 0; i < count; ++i) {
    stop_if_interrupted();
    put_step(next_step_++);
    const Clock::time_point begin = Clock::now();
    const Batch batch = engine_->plan(items_, bucket(), stream_);
    captured ? captured->replay() : attend();
    const Clock::time_point queued = Clock::now();
    engine_->finish(batch);
    const Clock::time_point end = Clock::now();
    verbs_ = verbs_of(batch.bucket);
    if (bucket().trace) on_trace_(engine_->trace(batch));
    us.push_back(std::chrono::duration<double, std::micro>(end - begin).count() / shape_.layers);
    if (calling != nullptr)
      calling->push_back(std::chrono::duration<double, std::micro>(queued - begin).count() / shape_.layers);
  }
  queue_->synchronize(deadline_after(kPatience));
  return us;
}

std::uint32_t SyntheticForwards::verbs_of(const Bucket& bucket) const {
  const EngineOptions& options = engine_->options();
  const bool promotes = options.promotions != 0 && engine_->memory().near_pages != 0;
  const bool fetches = bucket.decode_rows * options.shape.kv_heads >= options.fetch_lists;
  const std::uint32_t share = options.placement == PlacementMode::stream ? kWholeFetchShare
                              : fetches                                  ? fetch_share_of(options.fetch_share)
                                                                         : 0;
  const scheduler::TaskGraph graph(scheduler::kind_of(bucket, promotes, share));
  return static_cast<std::uint32_t>(std::ranges::count_if(
      graph.layer(), [](const scheduler::Task& task) { return task.stamped && task.verb != scheduler::Verb::model; }));
}

std::vector<float> SyntheticForwards::out() const {
  return downloaded<float>(*device_, *queue_, out_->data(), std::size_t{shape_.q_heads} * shape_.head_dim);
}

void SyntheticForwards::take_tensors() {
  const std::uint64_t rows = bucket().rows();
  q_ = device_->allocate(rows * shape_.q_heads * shape_.head_dim * sizeof(float));
  k_ = device_->allocate(rows * shape_.kv_heads * layer_.options().layout.row_bytes());
  v_ = device_->allocate(rows * shape_.kv_heads * layer_.options().layout.row_bytes());
  out_ = device_->allocate(rows * shape_.q_heads * shape_.head_dim * sizeof(float));
}

/// Those of the layer come per KV head; an engine wants them per token.
std::unique_ptr<Buffer> SyntheticForwards::prompt_queries(std::uint32_t count) const {
  const std::size_t group_size = std::size_t{shape_.group()} * shape_.head_dim;
  const std::uint32_t first = layer_.options().prompt_queries - count;
  auto queries =
      device_->allocate_pinned(std::max<std::uint64_t>(count, 1) * shape_.kv_heads * group_size * sizeof(float));
  for (std::uint32_t i = 0; i < count; ++i) {
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      std::memcpy(queries->data() + (std::size_t{i} * shape_.kv_heads + head) * group_size * sizeof(float),
                  layer_.prompt_queries(head).data() + (first + i) * group_size, group_size * sizeof(float));
    }
  }
  return queries;
}

void SyntheticForwards::import(SequenceId id, std::uint32_t tokens) {
  const SyntheticOptions& options = layer_.options();
  const std::uint32_t chunk = engine_->options().import_rows;
  const std::uint64_t row = options.layout.row_bytes() * shape_.kv_heads;
  const auto k = device_->allocate_pinned(row * chunk);
  const auto v = device_->allocate_pinned(row * chunk);
  for (std::uint32_t at = 0; at < tokens; at += chunk) {
    const std::uint32_t count = std::min(chunk, tokens - at);
    gather_rows(layer_, at, count, false, k->data());
    gather_rows(layer_, at, count, true, v->data());
    const bool last = at + count == tokens;
    const std::uint32_t queries = last ? std::min(options.prompt_queries, count) : 0;
    const auto q = prompt_queries(queries);
    const auto view = [&](const std::byte* data) {
      return dense_view(data, options.layout.dtype, count, shape_.kv_heads, shape_.head_dim);
    };
    for (std::uint32_t l = 0; l < shape_.layers; ++l) {
      engine_->import_prefix(
          id, LayerId{l}, view(k->data()), view(v->data()), stream_,
          dense_view<const std::byte>(q->data(), DType::f32, queries, shape_.q_heads, shape_.head_dim));
    }
  }
}

void SyntheticForwards::put_step(std::uint32_t step) {
  const std::uint64_t q = std::uint64_t{shape_.q_heads} * shape_.head_dim * sizeof(float);
  const std::uint64_t kv = shape_.kv_heads * layer_.options().layout.row_bytes();
  std::vector<Copy> copies;
  for (std::uint32_t row = 0; row < bucket().rows(); ++row) {
    copies.push_back({.to = q_->data() + row * q, .from = steps_.q(step).data, .bytes = q});
    copies.push_back({.to = k_->data() + row * kv, .from = steps_.k(step).data, .bytes = kv});
    copies.push_back({.to = v_->data() + row * kv, .from = steps_.v(step).data, .bytes = kv});
  }
  queue_->copy(copies);
  queue_->synchronize(deadline_after(kPatience));
}

void SyntheticForwards::attend() {
  const std::uint32_t rows = bucket().rows();
  const DType dtype = layer_.options().layout.dtype;
  const auto in = [&](const Buffer& buffer, DType type, std::uint32_t heads) {
    return dense_view<const std::byte>(buffer.data(), type, rows, heads, shape_.head_dim);
  };
  for (std::uint32_t l = 0; l < shape_.layers; ++l) {
    engine_->attend(bucket(), LayerId{l}, in(*q_, DType::f32, shape_.q_heads), in(*k_, dtype, shape_.kv_heads),
                    in(*v_, dtype, shape_.kv_heads),
                    dense_view(out_->data(), DType::f32, rows, shape_.q_heads, shape_.head_dim), stream_);
  }
}

}  // namespace sluice::tools
