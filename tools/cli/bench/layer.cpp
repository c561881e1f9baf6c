#include "tools/cli/bench/layer.hpp"

#include <algorithm>
#include <bit>

#include "cpu/stages/rows.hpp"
#include "runtime/far/host_kv.hpp"
#include "sluice/error.hpp"

namespace sluice::tools {
namespace {

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

void resize(StepOutput& output, const AttentionShape& shape, std::size_t rows) {
  output.out.resize(rows * shape.q_heads * shape.head_dim);
  output.lse.resize(rows * shape.q_heads);
}

/// `head`: KV head, counted through all sequences.
Partial partial_of(StepOutput& output, const AttentionShape& shape, std::size_t head) {
  const std::size_t row = head * shape.group();
  return {.out = output.out.data() + row * shape.head_dim, .lse = output.lse.data() + row};
}

/// Reads one KV head and counts the time that scoring takes.
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
  const AttentionShape& shape = batch_.front()->options().shape;
  resize(output, shape, batch_.size());
  runs_.assign(batch_.size(), {});
  std::vector<AttendTask> tasks;
  for (std::size_t row = 0; row < batch_.size(); ++row) {
    const SyntheticLayer& layer = *batch_[row];
    append_runs(0, layer.options().tokens + step + 1, layer.options().layout.page_tokens, runs_[row]);
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
      AttendTask& task = tasks.emplace_back();
      task.q = layer.query(head, step);
      task.kv = layer.view(head);
      task.runs = runs_[row];
      task.out = partial_of(output, shape, row * shape.kv_heads + head);
    }
  }
  cpu::attend(host_, tasks, shape);
}

struct PolicyLayer::Head {
  Head(const KvView& view, const AttentionShape& shape) : reader(shape, view) {}
  PageReader reader;
  Bypass bypass;
  scheduler::SelectCounters counters;
};

PolicyLayer::PolicyLayer(const PolicySpec& spec, LayerBatch batch, const cpu::Host& host)
    : spec_(spec),
      batch_(std::move(batch)),
      shape_(batch_.front()->options().shape),
      host_(host),
      rows_(batch_.size() * shape_.kv_heads) {
  if (spec.uses(Source::pages) || spec.near.share > 0.f) {
    throw Error(Errc::unsupported, "bench cpu cannot measure policy '" + spec.name +
                                       "': page ranking and the near share are the device's part; use topk, lfps, "
                                       "streaming, or set near=0");
  }
  if (spec.budget.kind == BudgetKind::drawn)
    throw Error(Errc::unsupported, "bench cpu cannot measure policy '" + spec.name +
                                       "': sampling is the device's part; write top_k=128, or use bench gpu");
  for (const SyntheticLayer* each : batch_) {
    policies_.push_back(scheduler::make_layer_policy(spec, shape_, each->options().layout.page_tokens, LayerId{0}));
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      heads_.push_back(std::make_unique<Head>(each->view(head), shape_));
    }
  }
}

PolicyLayer::~PolicyLayer() = default;

void PolicyLayer::begin() {
  host_.workers.parallel_for(heads(), [&](std::uint32_t h) {
    const SyntheticOptions& options = layer(h).options();
    policy(h).begin({.kv_head = kv_head(h),
                     .tokens = options.tokens,
                     .queries = options.prompt_queries,
                     .last_q = layer(h).prompt_queries(kv_head(h)),
                     .kv = &heads_[h]->reader});
  });
}

PhaseTimes PolicyLayer::step(std::uint32_t step, StepOutput& output) {
  const std::uint32_t page_tokens = batch_.front()->options().layout.page_tokens;
  const auto seen = [&](std::uint32_t h) { return layer(h).options().tokens + step + 1; };
  PhaseTimes times;
  const auto timed = [&](double& slot, const auto& body) {
    const auto start = Clock::now();
    host_.workers.parallel_for(heads(), body);
    slot = microseconds_since(start);
  };
  timed(times.forecast, [&](std::uint32_t h) { policy(h).forecast(kv_head(h), seen(h)); });
  timed(times.select, [&](std::uint32_t h) {
    const std::uint32_t n = seen(h);
    const scheduler::NearSet near{.sink_end = std::min(spec_.near.sink_tokens, n),
                                  .recent_begin = n - std::min(spec_.near.recent_tokens, n),
                                  .page_tokens = page_tokens};
    Head& head = *heads_[h];
    head.reader.score_us = 0.0;
    head.counters = {};
    head.bypass.heads = 0;
    rows_[h].clear();
    policy(h).select({.kv_head = kv_head(h),
                      .tokens = n,
                      .q = layer(h).query(kv_head(h), step),
                      .ranked_pages = {},
                      .near = &near,
                      .kv = &head.reader},
                     rows_[h], head.bypass, head.counters);
  });
  for (const auto& head : heads_) times.score += head->reader.score_us / host_.workers.threads();
  const auto start = Clock::now();
  attend(step, output);
  times.attend = microseconds_since(start);
  timed(times.observe, [&](std::uint32_t h) { policy(h).observe(kv_head(h), heads_[h]->reader); });
  return times;
}

void PolicyLayer::attend(std::uint32_t step, StepOutput& output) {
  for (StepOutput* each : {&near_, &far_, &output}) resize(*each, shape_, batch_.size());
  std::vector<std::vector<PageRun>> near_runs(batch_.size());
  for (std::size_t row = 0; row < batch_.size(); ++row) {
    const SyntheticOptions& options = batch_[row]->options();
    const std::uint32_t n = options.tokens + step + 1;
    const std::uint32_t sinks = std::min(spec_.near.sink_tokens, n);
    append_runs(0, sinks, options.layout.page_tokens, near_runs[row]);
    append_runs(std::max(sinks, n - std::min(spec_.near.recent_tokens, n)), n, options.layout.page_tokens,
                near_runs[row]);
  }
  std::vector<AttendTask> tasks(2 * std::size_t{heads()});
  for (std::uint32_t head = 0; head < heads(); ++head) {
    AttendTask& near = tasks[head];
    AttendTask& far = tasks[heads() + head];
    near.q = far.q = layer(head).query(kv_head(head), step);
    near.kv = far.kv = layer(head).view(kv_head(head));
    near.runs = near_runs[head / shape_.kv_heads];
    far.runs = rows_[head].runs;
    far.tokens = rows_[head].tokens;
    far.members = rows_[head].members;
    far.scores = rows_[head].scores;
    near.out = partial_of(near_, shape_, head);
    far.out = partial_of(far_, shape_, head);
  }
  cpu::attend(host_, tasks, shape_);
  host_.workers.parallel_for(heads(), [&](std::uint32_t head) {
    apply_bypass(head);
    const Partial near = partial_of(near_, shape_, head);
    const Partial merged = partial_of(output, shape_, head);
    std::copy_n(near.out, std::size_t{shape_.group()} * shape_.head_dim, merged.out);
    std::copy_n(near.lse, shape_.group(), merged.lse);
    cpu::merge_into(merged, partial_of(far_, shape_, head), shape_.group(), shape_.head_dim);
  });
  for (std::size_t row = 0; row < output.lse.size(); ++row) {
    const std::uint32_t bypassed = heads_[row / shape_.group()]->bypass.heads;
    if ((bypassed >> row % shape_.group() & 1u) != 0) output.lse[row] = near_.lse[row];
  }
}

/// A bypassed head's stand-in takes the place of its empty far partial.
void PolicyLayer::apply_bypass(std::uint32_t head) {
  const Bypass& bypass = heads_[head]->bypass;
  const Partial far = partial_of(far_, shape_, head);
  for (std::uint32_t h = 0; h < shape_.group(); ++h) {
    if ((bypass.heads >> h & 1u) == 0) continue;
    std::copy_n(&bypass.out[std::size_t{h} * shape_.head_dim], shape_.head_dim,
                far.out + std::size_t{h} * shape_.head_dim);
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
