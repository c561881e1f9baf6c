#include "tools/cli/bench/layer.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "runtime/far/host_kv.hpp"
#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

void resize(StepOutput& output, const AttentionShape& shape) {
  output.out.resize(std::size_t{shape.q_heads} * shape.head_dim);
  output.lse.resize(shape.q_heads);
}

Partial partial_of(StepOutput& output, const AttentionShape& shape, std::uint32_t kv_head) {
  const std::size_t row = std::size_t{kv_head} * shape.group();
  return {.out = output.out.data() + row * shape.head_dim, .lse = output.lse.data() + row};
}

/// Reads one KV head through the backend and counts the time that scoring takes.
class PageReader final : public runtime::HostKv {
 public:
  using HostKv::HostKv;

  void score(const float* q, std::span<const std::uint32_t> tokens, float* out) override {
    const auto start = Clock::now();
    HostKv::score(q, tokens, out);
    score_us += microseconds_since(start);
  }

  double score_us = 0.0;
};

}  // namespace

void DenseLayer::attend(std::uint32_t step, StepOutput& output) {
  const SyntheticOptions& options = layer_.options();
  resize(output, options.shape);
  runs_.clear();
  append_runs(0, options.tokens + step + 1, options.layout.page_tokens, runs_);
  std::vector<AttendTask> tasks(options.shape.kv_heads);
  for (std::uint32_t head = 0; head < tasks.size(); ++head) {
    tasks[head].q = layer_.query(head, step);
    tasks[head].kv = layer_.view(head);
    tasks[head].runs = runs_;
    tasks[head].out = partial_of(output, options.shape, head);
  }
  backend_.attend(tasks, options.shape, nullptr);
}

struct PolicyLayer::Head {
  Head(const KvView& view, const AttentionShape& shape, cpu::Backend& backend) : reader(backend, shape, view) {}
  PageReader reader;
  Bypass bypass;
  scheduler::SelectCounters counters;
};

PolicyLayer::PolicyLayer(const PolicySpec& spec, const SyntheticLayer& layer, cpu::Backend& backend,
                         const cpu::Workers& workers)
    : spec_(spec), layer_(layer), backend_(backend), workers_(workers), rows_(layer.options().shape.kv_heads) {
  if (spec.uses(Source::pages) || spec.near.share > 0.f) {
    throw Error(Errc::unsupported, "bench cpu cannot measure policy '" + spec.name +
                                       "': page ranking and the near share are the device's part; use topk, lfps, "
                                       "streaming, or set near=0");
  }
  const SyntheticOptions& options = layer.options();
  policy_ = scheduler::make_layer_policy(spec, options.shape, options.layout.page_tokens, LayerId{0});
  for (std::uint32_t head = 0; head < options.shape.kv_heads; ++head) {
    heads_.push_back(std::make_unique<Head>(layer.view(head), options.shape, backend));
  }
}

PolicyLayer::~PolicyLayer() = default;

void PolicyLayer::begin() {
  const SyntheticOptions& options = layer_.options();
  workers_.parallel_for(options.shape.kv_heads, [&](std::uint32_t head) {
    policy_->begin({.kv_head = head,
                    .tokens = options.tokens,
                    .queries = options.prompt_queries,
                    .last_q = layer_.prompt_queries(head),
                    .kv = &heads_[head]->reader});
  });
}

PhaseTimes PolicyLayer::step(std::uint32_t step, StepOutput& output) {
  const SyntheticOptions& options = layer_.options();
  const std::uint32_t n = options.tokens + step + 1;
  const std::vector<std::uint8_t> no_pages(div_up(n, options.layout.page_tokens), 0);
  const scheduler::NearSet near{.sink_end = std::min(spec_.near.sink_tokens, n),
                                .recent_begin = n - std::min(spec_.near.recent_tokens, n),
                                .page_tokens = options.layout.page_tokens,
                                .pages = no_pages};
  PhaseTimes times;
  const auto timed = [&](double& slot, const auto& body) {
    const auto start = Clock::now();
    workers_.parallel_for(options.shape.kv_heads, body);
    slot = microseconds_since(start);
  };
  timed(times.forecast, [&](std::uint32_t h) { policy_->forecast(h, n); });
  timed(times.select, [&](std::uint32_t h) {
    Head& head = *heads_[h];
    head.reader.score_us = 0.0;
    head.counters = {};
    head.bypass.heads = 0;
    rows_[h].clear();
    policy_->select(
        {.kv_head = h, .tokens = n, .q = layer_.query(h, step), .ranked_pages = {}, .near = &near, .kv = &head.reader},
        rows_[h], head.bypass, head.counters);
  });
  for (const auto& head : heads_) times.score += head->reader.score_us / workers_.threads();
  const auto start = Clock::now();
  attend(step, output);
  times.attend = microseconds_since(start);
  timed(times.observe, [&](std::uint32_t h) { policy_->observe(h, heads_[h]->reader); });
  return times;
}

void PolicyLayer::attend(std::uint32_t step, StepOutput& output) {
  const SyntheticOptions& options = layer_.options();
  const AttentionShape& shape = options.shape;
  const std::uint32_t n = options.tokens + step + 1;
  for (StepOutput* each : {&near_, &far_, &output}) resize(*each, shape);
  std::vector<PageRun> near_runs;
  const std::uint32_t sinks = std::min(spec_.near.sink_tokens, n);
  append_runs(0, sinks, options.layout.page_tokens, near_runs);
  append_runs(std::max(sinks, n - std::min(spec_.near.recent_tokens, n)), n, options.layout.page_tokens, near_runs);
  std::vector<AttendTask> tasks(2 * std::size_t{shape.kv_heads});
  for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
    AttendTask& near = tasks[head];
    AttendTask& far = tasks[shape.kv_heads + head];
    near.q = far.q = layer_.query(head, step);
    near.kv = far.kv = layer_.view(head);
    near.runs = near_runs;
    far.runs = rows_[head].runs;
    far.tokens = rows_[head].tokens;
    far.members = rows_[head].members;
    far.scores = rows_[head].scores;
    near.out = partial_of(near_, shape, head);
    far.out = partial_of(far_, shape, head);
  }
  backend_.attend(tasks, shape, nullptr);
  std::vector<std::array<Partial, 2>> parts(shape.kv_heads);
  std::vector<MergeTask> merges(shape.kv_heads);
  for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
    apply_bypass(head);
    parts[head] = {partial_of(near_, shape, head), partial_of(far_, shape, head)};
    const Partial merged = partial_of(output, shape, head);
    merges[head] = {.parts = parts[head], .out = reinterpret_cast<std::byte*>(merged.out), .lse = merged.lse};
  }
  backend_.merge(merges, shape, DType::f32, nullptr);
  for (std::uint32_t q_head = 0; q_head < shape.q_heads; ++q_head) {
    const std::uint32_t bypassed = heads_[q_head / shape.group()]->bypass.heads;
    if ((bypassed >> q_head % shape.group() & 1u) != 0) output.lse[q_head] = near_.lse[q_head];
  }
}

/// A bypassed head's stand-in takes the place of its empty far partial.
void PolicyLayer::apply_bypass(std::uint32_t kv_head) {
  const AttentionShape& shape = layer_.options().shape;
  const Bypass& bypass = heads_[kv_head]->bypass;
  const Partial far = partial_of(far_, shape, kv_head);
  for (std::uint32_t h = 0; h < shape.group(); ++h) {
    if ((bypass.heads >> h & 1u) == 0) continue;
    std::copy_n(&bypass.out[std::size_t{h} * shape.head_dim], shape.head_dim,
                far.out + std::size_t{h} * shape.head_dim);
    far.lse[h] = bypass.lse[h];
  }
}

std::uint32_t PolicyLayer::bypassed_heads() const noexcept {
  std::uint32_t sum = 0;
  for (const auto& head : heads_) sum += static_cast<std::uint32_t>(std::popcount(head->bypass.heads));
  return sum;
}

scheduler::SelectCounters PolicyLayer::counters() const noexcept {
  scheduler::SelectCounters sum;
  for (const auto& head : heads_) {
    sum.candidates += head->counters.candidates;
    sum.expanded_per_head += head->counters.expanded_per_head;
    sum.scored += head->counters.scored;
    sum.near_hits += head->counters.near_hits;
  }
  return sum;
}

}  // namespace sluice::tools
