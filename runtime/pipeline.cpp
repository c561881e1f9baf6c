#include "runtime/pipeline.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "cpu/lent.hpp"
#include "runtime/host_kv.hpp"
#include "runtime/marked_range.hpp"
#include "runtime/wait.hpp"
#include "scheduler/policy/policies.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {

using scheduler::StepShape;

Pipeline::Pipeline(const PipelineParts& parts)
    : parts_(parts),
      shape_(parts.options.shape),
      layout_(parts.options.layout()),
      executor_(parts.device, parts.link.stream(), parts.options.timeout, parts.options.trace),
      buffers_(parts.device, shape_, parts.pool.frames() / (shape_.layers * shape_.kv_heads),
               parts.options.audit_every != 0),
      index_(parts.device, parts.host, parts.pool, parts.link),
      clusters_(parts.device, parts.pool),
      progressive_(shape_, layout_,
                   {.device = parts.device,
                    .stream = executor_.device_stream(),
                    .link = parts.link,
                    .residency = parts.residency,
                    .buffers = buffers_,
                    .workers = parts.workers,
                    .staging = parts.staging,
                    .staging_pages = parts.staging_pages,
                    .timeout = parts.options.timeout}),
      copies_(parts.device, parts.host, parts.pool, parts.link),
      auditor_(shape_, layout_, parts.options.audit_every, parts.workers, parts.host, parts.pool),
      background_(parts.options.timeout) {
  parts.link.follow(executor_.device_stream());
}

void Pipeline::reserve(std::uint32_t batch, const PolicySpec& spec) {
  // Every page could be ranked at a share of 1; the ranking's memory is small beside the pages'.
  const bool ranks_pages = spec.uses(Source::pages);
  const bool selects = scheduler::step_shape(spec, parts_.options.placement).select;
  const bool prunes = selects && scheduler::prunes_on_device(spec);
  buffers_.reserve(batch, ranks_pages ? buffers_.max_pages() : 0);
  if (prunes) buffers_.reserve_pruning(most_pruned(spec));
  if (selects && spec.estimate == Estimate::int4) copies_.reserve(prunes);
  if (parts_.options.placement == PlacementMode::stream || parts_.options.placement == PlacementMode::automatic) {
    const std::uint64_t pages = std::uint64_t{batch} * shape_.kv_heads * buffers_.max_pages();
    buffers_.reserve_fetch(static_cast<std::uint32_t>(div_up(pages, parts_.staging_pages / 2)));
  }
  const bool clusters =
      selects && scheduler::prompt_clustering(spec, buffers_.max_pages() * layout_.page_tokens).count != 0;
  if (clusters && !index_stream_ && parts_.device.info().own_processor)
    index_stream_ = parts_.device.create_stream("index");
  if (ranks_pages || prunes) index_.reserve(ranks_pages);
  if (ranks_pages && spec.budget.kind == BudgetKind::progressive) scores_for_host_ = true;
  if (scores_for_host_) buffers_.reserve_host_scores();
  if (scheduler::step_shape(spec, parts_.options.placement).progress) {
    microbatch_ = std::max(microbatch_, std::min(spec.budget.microbatch, buffers_.max_pages()));
  }
  if (microbatch_ != 0) progressive_.reserve(batch, microbatch_);
  page_scores_.reserve(std::size_t{batch} * shape_.kv_heads);
  heads_.reserve(std::size_t{batch} * shape_.kv_heads);
  tail_.sequences.reserve(batch);
}

void Pipeline::step(const StepArgs& args, std::span<Sequence* const> sequences) {
  args_ = &args;
  layer_ = args.layer.value;
  ++calls_;
  const Deadline deadline = deadline_after(parts_.options.timeout);
  progressive_.settle(deadline);
  collect_layer(layer_, deadline);                            // Its policy and pages are about to change.
  if (tail_.layer == layer_) executor_.await_tail(deadline);  // It reads them.

  StepShape shape{.rank_pages = false, .select = false, .fetch = false, .observe = false};
  heads_.resize(sequences.size() * shape_.kv_heads);
  audited_ = false;
  // A deadline each: what a sequence's policy begins with, clusters for one, may take long, and is no wait.
  try {
    for (Sequence* sequence : sequences) prepare(*sequence, deadline_after(parts_.options.timeout));
  } catch (const std::exception& error) {
    recover(error);
    throw;
  }
  for (std::uint32_t row = 0; row < sequences.size(); ++row) {
    Sequence& sequence = *sequences[row];
    shape = scheduler::unite(shape, scheduler::step_shape(sequence.spec, parts_.options.placement));
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
      HeadWork& work = heads_[row * shape_.kv_heads + kv];
      work.sequence = &sequence;
      work.layer = &sequence.layers[layer_];
      work.row = row;
      work.kv_head = kv;
      work.audited = auditor_.due(sequence);
      audited_ |= work.audited;
      plan_head(work);
    }
  }
  selects_ = shape.select;
  const Clock::time_point begin = Clock::now();
  const bool queued = args.ordered && !audited_ && parts_.device.info().own_processor;
  run(shape, queued ? Executor::Finish::queued : Executor::Finish::done);
  struct Keeper {
    Pipeline& pipeline;
    std::span<Sequence* const> sequences;
    ~Keeper() {
      if (pipeline.executor_.has_tail()) pipeline.keep_tail(sequences);
    }
  } const keeper{*this, sequences};
  book(sequences, Clock::now() - begin);
  for (HeadWork& work : heads_) {
    if (work.progressive) work.pages().needed_visits = work.needed_visits;
  }
  if (audited_) audit();
  for (Sequence* sequence : sequences) {
    LayerState& layer = sequence->layers[layer_];
    const std::uint32_t pages = layer.tokens / layout_.page_tokens;
    if (ranks_pages(sequence->spec, layer_)) layer.digested_pages = pages;
    if (ranks_pages(sequence->spec, layer_) || prunes(sequence->spec, layer_)) layer.indexed_pages = pages;
    if (prunes(sequence->spec, layer_)) layer.mirrored_pages = pages;
    ++layer.tokens;
  }
  if (shape.observe) {
    note_far();
    post_observe(sequences);
  }
}

void Pipeline::run(const StepShape& shape, Executor::Finish finish) {
  try {
    executor_.run(graph(shape), layer_, *this, finish);
  } catch (const std::exception& error) {
    lose_tail();
    if (!is_timeout(error)) throw_news();  // It may be the very cause, and tells more.
    throw;
  }
}

/// What a stream has failed with shows in its next event. Whoever gives up before one is recorded takes it, or the step
/// would fail with it for ever.
void Pipeline::recover(const std::exception& error) {
  if (is_timeout(error)) return;
  if (!executor_.drain())
    throw Error(Errc::timeout, std::string(error.what()) + "; nor did the queued work finish in time");
  lose_tail();
  throw_news();
}

/// The vectors swap what they own: queued work finds its tasks where they were. What comes back is free, for the step
/// that has just been queued was handed over behind it.
void Pipeline::keep_tail(std::span<Sequence* const> sequences) noexcept {
  tail_.layer = layer_;
  tail_.sequences.assign(sequences.begin(), sequences.end());
  std::swap(tail_.heads, heads_);
  std::swap(tail_.tasks, buffers_.late);
}

void Pipeline::lose(Sequence& sequence, const std::string& reason) {
  if (!sequence.lost.empty()) return;
  sequence.lost = reason;
  news_.push_back(&sequence);
}

void Pipeline::lose_tail() {
  const std::string reason = executor_.take_late_failure();
  if (reason.empty()) return;
  for (Sequence* sequence : tail_.sequences) lose(*sequence, "a queued step of it failed: " + reason);
}

void Pipeline::look_back() {
  executor_.look_at_tail();
  lose_tail();
}

void Pipeline::settle_tail() {
  executor_.await_tail(deadline_after(parts_.options.timeout));
  lose_tail();
}

void Pipeline::throw_news() {
  if (news_.empty()) return;
  std::string text;
  for (const Sequence* sequence : news_) {
    text += "sequence " + std::to_string(sequence->id.value) + " is lost: " + sequence->lost + "; ";
  }
  news_.clear();
  throw Error(Errc::device, text + "end what is lost; a call about other sequences may be repeated");
}

const scheduler::StepGraph& Pipeline::graph(const StepShape& shape) {
  const auto known =
      std::find_if(graphs_.begin(), graphs_.end(), [&](const auto& entry) { return entry.first == shape; });
  if (known != graphs_.end()) return known->second;
  return graphs_.emplace_back(shape, scheduler::build_step_graph(shape)).second;
}

void Pipeline::collect_layer(std::uint32_t layer, Deadline deadline) {
  const auto pending = [&] {
    return std::any_of(pending_.begin(), pending_.end(), [&](const Pending& job) { return job.layer == layer; });
  };
  while (pending()) collect_front(deadline);
}

void Pipeline::collect_older(Deadline deadline) {
  // Background work may take until the call before its layer's next one. Counting calls, not looking at what has
  // finished, keeps the near set independent of timing.
  const std::uint64_t slack = std::max(shape_.layers, 2u) - 1;
  while (!pending_.empty() && pending_.front().call + slack <= calls_) collect_front(deadline);
}

void Pipeline::collect_front(Deadline deadline) {
  // Off the list only when it has ended: until then it may be awaited again.
  std::string failure;
  try {
    background_.await(pending_.front().ticket, deadline);
  } catch (const std::exception& error) {
    if (is_timeout(error)) throw;
    failure = std::string("its policy could not learn from a step: ") + error.what();
  }
  const Pending job = std::move(pending_.front());
  pending_.pop_front();
  for (Sequence* sequence : job.sequences) {
    if (!failure.empty()) {
      lose(*sequence, failure);
      continue;
    }
    parts_.residency.promote(*sequence, sequence->layers[job.layer], parts_.options.promote_pages);
  }
}

void Pipeline::settle(Sequence& sequence) {
  const Deadline deadline = deadline_after(parts_.options.timeout);
  settle_tail();
  while (!pending_.empty()) collect_front(deadline);
  // A deadline each: one begins after the other.
  for (LayerState& layer : sequence.layers) collect_begun(layer, deadline_after(parts_.options.timeout));
  progressive_.settle(deadline);
  for (LayerState& layer : sequence.layers) parts_.residency.settle(sequence, layer, deadline);
}

void Pipeline::forget(const Sequence& sequence) noexcept {
  std::erase(news_, &sequence);
  std::erase(tail_.sequences, &sequence);
}

void Pipeline::prepare(Sequence& sequence, Deadline deadline) {
  LayerState& layer = sequence.layers[layer_];
  collect_begun(layer, deadline);
  parts_.residency.settle(sequence, layer, deadline);
  const std::uint32_t tokens = layer.tokens + 1;
  const auto pages = static_cast<std::uint32_t>(div_up(tokens, layout_.page_tokens));
  if (layer.pages() < pages) {
    for (HeadPages& head : layer.heads) head.make_room(1);
    const std::vector<PageRef> refs = parts_.pool.allocate(shape_.kv_heads);
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) layer.heads[kv].push(refs[kv]);
  }
  // A page whose first row is the new token has nothing to copy.
  const auto fresh_page = static_cast<std::uint32_t>(div_up(layer.tokens, layout_.page_tokens));
  parts_.residency.force(sequence, layer, tokens, fresh_page, deadline);
  if (layer.decoding) {
    update_indices(sequence, layer, deadline);
  } else {
    begin_decoding(sequence, layer, deadline);
  }
}

void Pipeline::plan_head(HeadWork& work) {
  const PolicySpec& spec = work.sequence->spec;
  HeadPages& pages = work.pages();
  const std::uint32_t page_tokens = layout_.page_tokens;
  work.tokens = work.layer->tokens + 1;
  work.counters = {};
  work.bypass.heads = 0;
  work.parts.clear();
  work.selected.clear();
  work.placement.far.clear();
  work.placement.fetch.clear();
  work.visited_near = 0;
  work.progressive = ranks_pages(spec, layer_) && scheduler::step_shape(spec, parts_.options.placement).progress;

  const bool whole_pages = spec.near.share > 0.f || parts_.options.placement == PlacementMode::near;
  const std::uint32_t sink_end = std::min(spec.near.sink_tokens, work.tokens);
  work.near = {.sink_end = sink_end,
               .recent_begin = std::max(sink_end, work.tokens - std::min(work.tokens, spec.near.recent_tokens)),
               .page_tokens = page_tokens,
               .pages = whole_pages ? std::span<const std::uint8_t>(pages.near) : std::span<const std::uint8_t>{}};
  plan_ranking(work);
}

void Pipeline::list_near_runs(HeadWork& work) {
  if (!work.near.pages.empty()) return list_near_pages(work);
  const std::uint32_t page_tokens = layout_.page_tokens;
  work.window.clear();
  const auto add = [&](std::uint32_t begin, std::uint32_t end) {
    while (begin < end) {
      const std::uint32_t page = begin / page_tokens;
      const std::uint32_t stop = std::min(end, (page + 1) * page_tokens);
      work.window.push_back({.page = page,
                             .begin = static_cast<std::uint16_t>(begin - page * page_tokens),
                             .end = static_cast<std::uint16_t>(stop - page * page_tokens)});
      begin = stop;
    }
  };
  add(0, work.near.sink_end);
  add(work.near.recent_begin, work.tokens);
  work.near_runs = work.window;
  work.near_frames = work.pages().slots.data();
  work.near_tokens = work.near.sink_end + work.tokens - work.near.recent_begin;
}

void Pipeline::list_near_pages(HeadWork& work) {
  HeadPages& pages = work.pages();
  const std::uint32_t page_tokens = layout_.page_tokens;
  const std::uint32_t open = (work.tokens - 1) / page_tokens;  // Always near.
  if (!pages.listed) {
    pages.near_runs.clear();
    pages.near_slots.clear();
    for (const std::uint32_t page : pages.held) {
      if (pages.near[page] == 0) continue;
      const auto run = static_cast<std::uint32_t>(pages.near_runs.size());
      if (page == open) pages.open_run = run;
      pages.near_runs.push_back({.page = run, .begin = 0, .end = static_cast<std::uint16_t>(page_tokens)});
      pages.near_slots.push_back(pages.slots[page]);
    }
    pages.listed = true;
  }
  const std::uint32_t rows = work.tokens - open * page_tokens;
  pages.near_runs[pages.open_run].end = static_cast<std::uint16_t>(rows);
  work.near_runs = pages.near_runs;
  work.near_frames = pages.near_slots.data();
  work.near_tokens = static_cast<std::uint32_t>(pages.near_runs.size() - 1) * page_tokens + rows;
}

void Pipeline::note_far() {
  // Waking the workers costs as much as looking at some thousand scores.
  constexpr std::size_t kWorthSharing = 4 * 1024;
  std::size_t scores = 0;
  for (const HeadWork& work : heads_) scores += work.seen.size();
  if (scores == 0) return;
  const auto note = [this](std::uint32_t i) {
    const HeadWork& work = heads_[i];
    if (work.seen.empty()) return;
    const Partial far = buffers_.far(work.row, work.kv_head * shape_.group());
    work.layer->policy->note(work.kv_head, work.placement.far.tokens, work.seen, std::span(far.lse, shape_.group()));
  };
  const auto count = static_cast<std::uint32_t>(heads_.size());
  if (scores >= kWorthSharing) {
    parts_.workers.parallel_for(count, note);
  } else {
    for (std::uint32_t i = 0; i < count; ++i) note(i);
  }
}

void Pipeline::post_observe(std::span<Sequence* const> sequences) {
  Pending job{.ticket = 0, .call = calls_, .layer = layer_, .sequences = {}};
  std::copy_if(sequences.begin(), sequences.end(), std::back_inserter(job.sequences), [&](const Sequence* s) {
    if (!scheduler::step_shape(s->spec, parts_.options.placement).observe) return false;
    const scheduler::LayerPolicy& policy = *s->layers[layer_].policy;
    for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
      if (policy.wants_observation(kv)) return true;
    }
    return false;
  });
  if (job.sequences.empty()) return;
  job.ticket = background_.post([this, layer = layer_, batch = job.sequences] {
    const MarkedRange range(parts_.device, to_string(scheduler::NodeKind::observe));
    const std::uint32_t kv_heads = shape_.kv_heads;
    const Clock::time_point begin = Clock::now();
    const auto count = static_cast<std::uint32_t>(batch.size()) * kv_heads;
    parts_.workers.parallel_for(count, [this, layer, batch, kv_heads](std::uint32_t i) {
      Sequence& sequence = *batch[i / kv_heads];
      LayerState& state = sequence.layers[layer];
      const std::uint32_t kv = i % kv_heads;
      const cpu::Lent<HostKv> reader(parts_.workers, parts_.host, shape_, parts_.pool, state.heads[kv]);
      state.policy->observe(kv, *reader);
      state.hot[kv].clear();
      const std::uint32_t limit = parts_.residency.quota(sequence.spec, state.pages());
      state.policy->forecast(kv, state.tokens + 1, limit, state.hot[kv]);
    });
    executor_.trace({.kind = scheduler::NodeKind::observe, .lane = Lane::cpu, .background = true, .after = {}}, layer,
                    begin, Clock::now());
  });
  pending_.push_back(std::move(job));
}

}  // namespace sluice::runtime
