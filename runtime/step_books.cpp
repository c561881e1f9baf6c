// What a step reports.
#include "runtime/pipeline.hpp"

namespace sluice::runtime {
namespace {

std::uint64_t run_tokens(const std::vector<PageRun>& runs) {
  std::uint64_t sum = 0;
  for (const PageRun& run : runs) sum += run.tokens();
  return sum;
}

}  // namespace

void Pipeline::book(std::span<Sequence* const> sequences, Clock::duration spent) {
  const std::uint64_t spent_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(spent).count());
  const std::uint64_t wait_ns = executor_.take_wait_ns();
  for (Sequence* sequence : sequences) {
    Stats& stats = sequence->stats;
    if (layer_ + 1 == shape_.layers) ++stats.steps;
    stats.d2h_bytes += 2 * layout_.row_bytes() * shape_.kv_heads;
    stats.device_wait_ns += wait_ns / sequences.size();
    stats.cpu_busy_ns += (spent_ns - std::min(spent_ns, wait_ns)) / sequences.size();
  }
  for (const HeadWork& work : heads_) book_head(work);
}

void Pipeline::book_head(const HeadWork& work) {
  Stats& stats = work.sequence->stats;
  const std::uint64_t row = layout_.row_bytes();
  const std::uint64_t near = work.near_tokens + work.visited_near;
  const SelectionRow& far_row = work.placement.far;
  const std::uint64_t far = selects_ ? far_row.attended() : 0;
  const std::uint64_t fetched = selects_ ? work.placement.fetch.attended() - work.visited_near : 0;
  const bool ranks = work.ranked != 0 || work.scored_pages != 0;
  const std::uint64_t digests = ranks ? 2 * std::uint64_t{work.layer->tokens / layout_.page_tokens} : 0;

  stats.dense_tokens += work.tokens;
  stats.near_tokens += near;
  stats.far_tokens += far;
  stats.fetched_tokens += fetched;
  stats.attended_tokens += near + far + fetched;
  stats.candidate_tokens += work.counters.candidates;
  stats.expanded_per_head += work.counters.expanded_per_head;
  // Every query head of a group has its own pages; without a ranking all share one reading.
  const std::uint64_t open = work.pruned == 0 ? 0 : work.open_rows;
  const std::uint64_t estimated = (work.pruned - open) * (work.ranked == 0 ? 1 : shape_.group());
  stats.estimated_keys += work.counters.estimated + estimated;
  stats.scored_keys += work.counters.scored + digests + open;
  stats.near_hits += work.counters.near_hits;
  stats.progressive_iterations += work.counters.iterations;
  stats.bypassed_heads += static_cast<std::uint64_t>(__builtin_popcount(work.bypass.heads));

  stats.dense_bytes += 2 * row * work.tokens;
  const std::uint64_t copy = Int4Layout(layout_).row_bytes() + Int4Layout::kParamBytes;
  stats.near_bytes += 2 * row * (near + fetched) + row * (digests + open) + copy * estimated;
  stats.far_bytes += row * work.counters.scored + copy * work.counters.estimated + work.counters.index_bytes;
  if (selects_) {
    // With scores at hand only V is read again.
    const std::uint64_t rows_per_token = far_row.scores.empty() ? 2 : 1;
    stats.far_bytes += row * (rows_per_token * far_row.tokens.size() + 2 * run_tokens(far_row.runs));
  }
}

void Pipeline::audit() {
  std::vector<const HeadWork*> due;
  for (const HeadWork& work : heads_) {
    if (work.audited) due.push_back(&work);
  }
  auditor_.run(layer_, due, buffers_);
}

}  // namespace sluice::runtime
