// What a step reports: counters, and the audit against exact attention.
#include <cmath>

#include "runtime/host_kv.hpp"
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
  const std::uint64_t near = work.near_tokens;
  const SelectionRow& far_row = work.placement.far;
  const std::uint64_t far = selects_ ? far_row.attended() : 0;
  const std::uint64_t fetched = selects_ ? work.placement.fetch.attended() : 0;
  const std::uint64_t digests = work.ranked == 0 ? 0 : 2 * std::uint64_t{work.layer->tokens / layout_.page_tokens};

  stats.dense_tokens += work.tokens;
  stats.near_tokens += near;
  stats.far_tokens += far;
  stats.fetched_tokens += fetched;
  stats.attended_tokens += near + far + fetched;
  stats.candidate_tokens += work.counters.candidates;
  stats.expanded_per_head += work.counters.expanded_per_head;
  stats.scored_keys += work.counters.scored + digests;
  stats.near_hits += work.counters.near_hits;
  stats.bypassed_heads += static_cast<std::uint64_t>(__builtin_popcount(work.bypass.heads));

  stats.dense_bytes += 2 * row * work.tokens;
  stats.near_bytes += 2 * row * (near + fetched) + row * digests;
  stats.far_bytes += row * work.counters.scored;
  if (selects_) {
    // With scores at hand only V is read again.
    const std::uint64_t rows_per_token = far_row.scores.empty() ? 2 : 1;
    stats.far_bytes += row * (rows_per_token * far_row.tokens.size() + 2 * run_tokens(far_row.runs));
  }
}

void Pipeline::audit() {
  const std::uint32_t every = parts_.options.audit_every;
  if (every == 0) return;
  const std::uint32_t group = shape_.group();
  const std::size_t out_size = std::size_t{group} * shape_.head_dim;
  std::vector<AttendTask> tasks;
  std::vector<const HeadWork*> audited;
  std::vector<std::vector<PageRun>> runs;
  for (const HeadWork& work : heads_) {
    // `steps` was raised by the last layer already; all layers of a step must agree on whether it is audited.
    const std::uint64_t step = work.sequence->stats.steps - (layer_ + 1 == shape_.layers ? 1 : 0);
    if (step % every == 0) audited.push_back(&work);
  }
  std::vector<float> out(audited.size() * out_size);
  std::vector<float> lse(audited.size() * group);
  runs.resize(audited.size());
  for (std::size_t i = 0; i < audited.size(); ++i) {
    const HeadWork& work = *audited[i];
    for (std::uint32_t page = 0; page < work.pages().pages(); ++page) {
      const std::uint32_t rows = std::min(layout_.page_tokens, work.tokens - page * layout_.page_tokens);
      runs[i].push_back({.page = page, .begin = 0, .end = static_cast<std::uint16_t>(rows)});
    }
    tasks.push_back({.q = buffers_.q(work.row, work.kv_head * group),
                     .kv = far_view(parts_.pool, work.pages()),
                     .runs = runs[i],
                     .tokens = {},
                     .members = {},
                     .scores = {},
                     .out = {.out = out.data() + i * out_size, .lse = lse.data() + i * group}});
  }
  parts_.host.attend(tasks, shape_, nullptr);
  for (std::size_t i = 0; i < audited.size(); ++i) {
    const HeadWork& work = *audited[i];
    for (std::uint32_t h = 0; h < group; ++h) {
      const std::uint32_t head = work.kv_head * group + h;
      // A bypassed head attended its near tokens only; the rest of its merged lse is an estimate.
      const bool bypassed = (work.bypass.heads >> h & 1u) != 0;
      const float kept = bypassed ? *buffers_.near(work.row, head).lse : *buffers_.merged_lse(work.row, head);
      work.sequence->stats.coverage.add(std::exp(static_cast<double>(kept) - lse[i * group + h]));
    }
  }
}

}  // namespace sluice::runtime
