// What the device does to select: rank pages by their digests, estimate tokens by 4-bit copies, cut them by top-p. All
// of it only enqueues; what the CPU is to know lands in pinned memory before the hand-over.
#include <chrono>

#include "runtime/pipeline.hpp"
#include "runtime/trace.hpp"
#include "scheduler/step_graph.hpp"

namespace sluice::runtime {

bool Pipeline::ranks_pages(const PolicySpec& spec, std::uint32_t layer) const {
  return scheduler::step_shape(spec, parts_.options.placement).rank_pages && spec.uses(Source::pages) &&
         !spec.dense(layer);
}

bool Pipeline::prunes(const PolicySpec& spec, std::uint32_t layer) const {
  return scheduler::step_shape(spec, parts_.options.placement).rank_pages && scheduler::prunes_on_device(spec) &&
         !spec.dense(layer);
}

bool Pipeline::estimates(const PolicySpec& spec, std::uint32_t layer) const {
  return scheduler::step_shape(spec, parts_.options.placement).select && spec.estimate == Estimate::int4 &&
         !spec.dense(layer);
}

/// Digests, tables and copies of the pages that have become full since the last step.
void Pipeline::update_indices(Sequence& sequence, LayerState& layer, Deadline deadline) {
  const PolicySpec& spec = sequence.spec;
  const std::uint32_t pages = layer.tokens / layout_.page_tokens;
  Stream& reader = executor_.device_stream();
  Clock::time_point begin = Clock::now();
  const auto count = [&](std::uint64_t& ns, const char* name) {
    const Clock::time_point end = Clock::now();
    if (!layer.decoding) trace(parts_.options.trace, name, Lane::cpu, layer_, begin, end);
    if (!layer.decoding) ns += static_cast<std::uint64_t>(std::chrono::nanoseconds(end - begin).count());
    begin = end;
  };
  if (estimates(spec, layer_)) copies_.update(layer, pages);
  if (prunes(spec, layer_)) copies_.mirror(layer, pages, reader, deadline);
  if (estimates(spec, layer_)) count(sequence.stats.prompt.int4_ns, "prompt 4-bit copies");
  if (ranks_pages(spec, layer_)) {
    index_.update(layer, spec.pages.digest, pages, reader, deadline);
    count(sequence.stats.prompt.digests_ns, "prompt digests");
  } else if (prunes(spec, layer_)) {
    index_.update(layer, std::nullopt, pages, reader, deadline);
  }
}

void Pipeline::plan_ranking(HeadWork& work) const {
  const PolicySpec& spec = work.sequence->spec;
  const std::uint32_t pages = work.layer->tokens / layout_.page_tokens;
  work.ranked = 0;
  work.scored_pages = 0;
  work.pruned = 0;
  if (ranks_pages(spec, layer_)) {
    if (spec.budget.kind == BudgetKind::progressive) {
      work.scored_pages = pages;
    } else {
      work.ranked = scheduler::budget_pages(spec.pages, pages, layout_.page_tokens);
    }
  }
  if (!prunes(spec, layer_) || pages == 0) return;
  work.open_rows = work.tokens - pages * layout_.page_tokens;
  work.pruned = estimate_task(work).row(layout_.page_tokens);
}

std::uint32_t Pipeline::most_pruned(const PolicySpec& spec) const {
  const std::uint32_t tokens = buffers_.max_pages() * layout_.page_tokens;
  if (!spec.uses(Source::pages)) return tokens;
  // Every page may be listed, and those of sinks and recent tokens come once more.
  const auto whole = [&](std::uint32_t near) {
    return std::min<std::uint64_t>(tokens, (div_up(near, layout_.page_tokens) + 1) * layout_.page_tokens);
  };
  return static_cast<std::uint32_t>(tokens + whole(spec.near.sink_tokens) + whole(spec.near.recent_tokens));
}

/// What is attended anyway (see top_p.hpp) counts on the device as it does on the host: sinks, recent window, newest
/// page. All of it is forced to be near, so that none is evicted before it is attended.
ScoreInt4Task Pipeline::estimate_task(const HeadWork& work) const {
  const std::uint32_t newest = work.tokens - work.open_rows;
  const std::uint32_t recent = std::min(work.near.recent_begin, newest);
  const std::uint32_t head = work.kv_head * shape_.group();
  return {.q = buffers_.device_q(work.row, head),
          .copies = copies_.device(),
          .frames = PageIndex::frames(*work.layer, work.kv_head),
          .tokens = newest,
          .lists = work.ranked == 0 ? nullptr : buffers_.ranked(work.row, head, work.ranked),
          .listed = work.ranked,
          .sinks = std::min(work.near.sink_end, recent),
          .recent = recent,
          .tail = parts_.residency.memory() + work.pages().slots[newest / layout_.page_tokens] * layout_.page_bytes(),
          .tail_rows = work.open_rows,
          .out = buffers_.estimates(work.row, head)};
}

void Pipeline::rank_pages() {
  const std::uint32_t group = shape_.group();
  auto& scores = buffers_.score_tasks;
  auto& ranks = buffers_.top_k_tasks;
  scores.clear();
  ranks.clear();
  for (const HeadWork& work : heads_) {
    if (work.ranked == 0 && work.scored_pages == 0) continue;
    const std::uint32_t pages = work.layer->tokens / layout_.page_tokens;
    const std::uint32_t head = work.kv_head * group;
    // Rows of a group lie `pages` apart here, as score_pages writes them.
    float* out = work.scored_pages == 0 ? buffers_.page_scores(work.row, head) : buffers_.host_page_scores(work.row, head);
    scores.push_back({.q = buffers_.device_q(work.row, head),
                      .digests = index_.digests(),
                      .frames = PageIndex::frames(*work.layer, work.kv_head),
                      .pages = pages,
                      .out = out});
    for (std::uint32_t h = 0; h < group && work.ranked != 0; ++h) {
      ranks.push_back({.values = {out + std::uint64_t{h} * pages, pages},
                       .k = work.ranked,
                       .out = buffers_.ranked(work.row, head + h, work.ranked)});
    }
  }
  Backend& device = parts_.device.backend();
  device.score_pages(scores, shape_, layout_.dtype, &executor_.device_stream());
  device.top_k(ranks, &executor_.device_stream());
  prune();
}

/// Estimates the tokens of the ranked pages, or of all, and marks what each query head keeps.
void Pipeline::prune() {
  const std::uint32_t group = shape_.group();
  auto& estimates = buffers_.estimate_tasks;
  auto& cuts = buffers_.top_p_tasks;
  estimates.clear();
  cuts.clear();
  for (const HeadWork& work : heads_) {
    if (work.pruned == 0) continue;
    const std::uint32_t head = work.kv_head * group;
    const ScoreInt4Task& task = estimates.emplace_back(estimate_task(work));
    // Listed pages are to be chosen from, without what is attended anyway; of all tokens those between.
    const bool lists = task.lists != nullptr;
    for (std::uint32_t h = 0; h < group; ++h) {
      cuts.push_back({.values = {task.out + std::uint64_t{h} * work.pruned, work.pruned},
                      .p = work.sequence->spec.budget.mass,
                      .begin = lists ? 0 : task.sinks,
                      .end = lists ? task.listed * layout_.page_tokens : task.recent,
                      .mask = buffers_.kept(work.row, head + h, work.mask_words())});
    }
  }
  Backend& device = parts_.device.backend();
  device.score_int4(estimates, shape_, layout_, &executor_.device_stream());
  device.top_p(cuts, &executor_.device_stream());
}

}  // namespace sluice::runtime
