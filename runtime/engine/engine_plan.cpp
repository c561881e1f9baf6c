// How a forward is planned: what is asked for is checked, finds its blocks, and is written down for the device.
#include <algorithm>
#include <string>

#include "runtime/engine/engine_options.hpp"
#include "runtime/engine/impl.hpp"
#include "scheduler/plan/forward_rows.hpp"

namespace sluice {
namespace {

/// Rows of a kind, and how many items they are.
struct Tally {
  std::uint64_t decode_rows = 0;  ///< or teams of drafts
  std::uint64_t prefill_rows = 0;
  std::uint32_t prefills = 0;
};

Tally rows_of(std::span<const PlanItem> items, std::uint32_t drafts) {
  Tally tally;
  for (const PlanItem& item : items) {
    (item.prefill ? tally.prefill_rows : tally.decode_rows) +=
        item.prefill ? item.tokens : div_up(item.tokens, drafts);
    tally.prefills += item.prefill ? 1 : 0;
  }
  return tally;
}

void require_fits(const char* what, std::uint64_t have, std::uint32_t most) {
  if (have <= most) return;
  throw Error(Errc::invalid_argument, std::string("plan: there are ") + text(have) + " " + what +
                                          ", and the bucket has " + text(most) + "; plan fewer or use a larger bucket");
}

}  // namespace

Bucket Engine::Impl::resolved(const Bucket& bucket, const char* what) const {
  const Bucket& largest = memory.largest().largest;
  Bucket resolved = bucket;
  if (resolved.max_tokens == 0) resolved.max_tokens = largest.max_tokens;
  if (resolved.decode_rows == 0) {  // Nothing to choose.
    resolved.top_k = resolved.unbounded = resolved.pages = resolved.rehearsed = resolved.scores = false;
    resolved.audit = false;
    resolved.drafts = 1;
  }
  const auto in = [&](const char* field, std::uint32_t value, std::uint32_t most) {
    if (value <= most) return;
    throw Error(Errc::invalid_argument, std::string(what) + ": the bucket's " + field + " is " + text(value) +
                                            ", and EngineOptions::largest has " + text(most) +
                                            "; ask for no more, or build the engine with a larger one");
  };
  in("decode_rows", resolved.decode_rows, largest.decode_rows);
  in("drafts", resolved.drafts, largest.drafts);
  in("prefill_rows", resolved.prefill_rows, largest.prefill_rows);
  in("prefills", resolved.prefills, largest.prefills);
  in("max_tokens", resolved.max_tokens, largest.max_tokens);
  in("top_k", resolved.top_k, largest.top_k);
  in("unbounded", resolved.unbounded, largest.unbounded);
  in("pages", resolved.pages, largest.pages);
  in("rehearsed", resolved.rehearsed, largest.rehearsed);
  in("scores", resolved.scores, largest.scores);
  in("audit", resolved.audit, largest.audit);
  in("trace", resolved.trace, largest.trace);
  // All of its rows attend everything, unless some may not.
  const bool dense = resolved.decode_rows != 0 && resolved.max_tokens <= options.dense_tokens &&
                     sizes.cpu_sequences == 0 && sizes.cluster_sequences == 0;
  if (dense) resolved.top_k = resolved.unbounded = resolved.pages = resolved.rehearsed = resolved.scores = false;
  // Where not all of them may be near the CPU attends in place, unless it is the device that does; and far rows are
  // counted in 31 bits, values among them.
  const std::uint64_t page = options.page_tokens;
  const std::uint64_t near = memory.largest().near_pages * page;
  const bool fits =
      (std::uint64_t{resolved.decode_rows} * resolved.max_tokens <= near || !device->info().own_processor) &&
      memory.largest().blocks * page <= std::uint64_t{1} << 30;
  resolved.whole = dense && fits && options.windows.empty() && !resolved.audit && resolved.drafts == 1 &&
                   !memory.largest().far_layout.scaled();
  if (resolved.max_tokens % memory.largest().layout.page_tokens != 0)
    throw Error(Errc::invalid_argument, std::string(what) + ": the bucket's max_tokens is " +
                                            text(resolved.max_tokens) + "; it must be a multiple of page_tokens, " +
                                            text(memory.largest().layout.page_tokens));
  if (resolved.drafts == 0 || resolved.decode_rows % resolved.drafts != 0)
    throw Error(Errc::invalid_argument, std::string(what) + ": the bucket's decode_rows, " +
                                            text(resolved.decode_rows) + ", must be a multiple of its drafts, " +
                                            text(resolved.drafts) + ", at least 1");
  if (resolved.rows() == 0)
    throw Error(Errc::invalid_argument,
                std::string(what) + ": the bucket has no rows; give it decode_rows or prefill_rows");
  if ((resolved.prefills == 0) != (resolved.prefill_rows == 0))
    throw Error(Errc::invalid_argument,
                std::string(what) + ": a bucket has both prefills and prefill_rows, or neither");
  return resolved;
}

void Engine::Impl::require_choosable(const Sequence& sequence, const PlanItem& item, const Bucket& bucket) const {
  const std::string name = "plan: sequence " + text(item.sequence.value);
  const ForwardMemory& most = memory.largest();
  const std::uint32_t list_room = most.teams(bucket.drafts).list_room();
  const auto refuse = [&](const std::string& wants, std::uint32_t room) {
    throw Error(Errc::out_of_capacity, name + ": " + wants + ", and there is room for " + text(room) +
                                           "; name its policy in EngineOptions::policies");
  };
  const auto require = [&](const ForwardRow& row, std::uint32_t) {
    if (row.picks > most.max_picks) refuse("a query head may choose " + text(row.picks) + " tokens", most.max_picks);
    if (row.whole() && row.tokens > list_room)
      refuse("its policy attends all of " + text(row.tokens) + " tokens", list_room);
    if (row.page_picks > most.max_ranked)
      refuse("a query head may choose " + text(row.page_picks) + " pages", most.max_ranked);
    if (row.microbatch != 0 && !most.takes_pages(bucket))
      refuse("a query head may choose every page of the " + text(most.max_pages) + " that a sequence may have",
             most.max_ranked);
  };
  scheduler::for_each_choice(sequence.spec, sequence.planned, item.tokens, bucket.drafts,
                             limits().shape, require);
}

std::vector<Engine::Impl::Wanted> Engine::Impl::checked(std::span<const PlanItem> items, const Bucket& bucket) {
  const Tally rows = rows_of(items, bucket.drafts);
  require_fits(bucket.drafts == 1 ? "rows that choose" : "teams of drafts", rows.decode_rows,
               bucket.decode_rows / bucket.drafts);
  require_fits("rows of prompts", rows.prefill_rows, bucket.prefill_rows);
  require_fits("chunks of prompts", rows.prefills, bucket.prefills);
  std::vector<Wanted> wanted;
  for (const PlanItem& item : items) {
    const std::string name = "plan: sequence " + text(item.sequence.value);
    Sequence& sequence = at(item.sequence);
    if (item.tokens == 0) throw Error(Errc::invalid_argument, name + " gets no tokens; leave it out");
    if (std::ranges::find(wanted, &sequence, &Wanted::sequence) != wanted.end())
      throw Error(Errc::invalid_argument, name + " is there twice; make one item of both");
    // Lengths first: a row's choice is not asked about where there is none.
    const std::uint64_t tokens = std::uint64_t{sequence.planned} + item.tokens;
    if (tokens > bucket.max_tokens)
      throw Error(Errc::out_of_capacity, name + " would have " + text(tokens) + " tokens, and the bucket is for " +
                                             text(bucket.max_tokens) +
                                             "; use a larger one, or raise largest.max_tokens and host_bytes");
    if (sequence.tail.slot != kNone && !item.prefill && item.tokens > bucket.drafts)
      throw Error(Errc::unsupported, name + " is to decode " + text(item.tokens) +
                                         " tokens at once; its policy chooses on the CPU, once in a forward, for at "
                                         "most as many as a team of the bucket has, " +
                                         text(bucket.drafts) +
                                         "; plan fewer at a time, or use a bucket with more drafts");
    if (scheduler::samples_for_one(sequence.spec) && !item.prefill && bucket.drafts > 1)
      throw Error(Errc::unsupported, name +
                                         "'s policy attends a sample that stands for what one query would attend, "
                                         "which no bucket with drafts serves; plan one token at a time");
    const std::string reason =
        item.prefill ? "" : scheduler::forward_unserved(sequence.spec, bucket, limits());
    if (!reason.empty()) throw Error(Errc::invalid_argument, name + "'s policy does not go with the bucket: " + reason);
    if (!item.prefill) require_choosable(sequence, item, bucket);
    if (!item.prefill) require_clusters(item.sequence, sequence, sequence.planned);
    wanted.push_back({.sequence = &sequence, .item = item});
  }
  return wanted;
}

void Engine::Impl::write_rows(const ForwardMemory& m, std::span<const Wanted> wanted) {
  std::fill_n(m.slip_tokens, m.bucket.rows(), ForwardToken{});
  std::fill_n(m.slip_rows, m.bucket.decode_rows, ForwardRow{});
  std::fill_n(m.slip_chunks, m.bucket.prefills, ForwardChunk{});
  std::uint32_t at = 0;
  std::uint32_t decoded = 0;  // Tokens before an item's.
  ForwardRow* row = m.slip_rows;
  ForwardChunk* chunk = m.slip_chunks;
  for (const auto& [sequence, item] : wanted) {
    const std::uint32_t list = sequence->pages().slot();
    if (item.prefill && m.bucket.prefills != 0) {
      *chunk = {.list = list, .at = at, .first = sequence->planned, .count = item.tokens};
      bet(*sequence, *chunk++);
    }
    const auto put = [&](const ForwardRow& chooses, std::uint32_t before) {
      *row = chooses;
      if (scheduler::brings_scores(sequence->spec)) row->scores = decoded + before;
      if (sequence->clusters.slot != kNone)
        scheduler::choose_clusters(sequence->spec, sequence->clusters.slot, sequence->clusters.schedule.clusters(),
                                   sequence->clusters.schedule.clustered(), *row);
      if (m.proposes() && sequence->tail.slot != kNone) {
        ForwardRow ahead = *row;
        scheduler::choose_proposed(sequence->spec, sequence->tail.slot, limits().shape, ahead);
        // Else the CPU chooses, as it always can.
        if (ahead.picks <= m.max_picks && (ahead.mass == 0.f || m.bucket.unbounded)) *row = ahead;
      }
      count_reads(*sequence, *row);
      row->list = list;
      row++->at = at + before;
    };
    if (!item.prefill)
      scheduler::for_each_choice(sequence->spec, sequence->planned, item.tokens, m.bucket.drafts,
                                 limits().shape, put);
    if (!item.prefill) decoded += item.tokens;
    for (std::uint32_t i = 0; i < item.tokens; ++i, ++at) {
      m.slip_tokens[at] = {.list = list,
                           .position = sequence->planned + i,
                           .tail = sequence->tail_row(item, sequence->planned + i, sizes.prompt_queries),
                           .decoded = item.prefill ? 0u : 1u};
    }
  }
}

void Engine::Impl::count_reads(const Sequence& sequence, const ForwardRow& row) noexcept {
  const std::uint64_t planes = std::uint64_t{sequence.sparse_layers} * options.shape.kv_heads;
  const std::uint64_t window = row.sink_end + (row.tokens - row.recent_begin);
  const std::uint64_t heads = std::uint64_t{options.shape.group()} * programs.newest().bucket.drafts;
  const std::uint64_t in_pages = heads * row.page_picks * options.page_tokens;
  runtime::Program& program = programs.newest();
  if (row.ranks() && !row.scored()) program.estimated += planes * (row.in_pages() ? in_pages + window : row.tokens);
  if (row.clusters.count != 0) program.estimated += planes * heads * (row.clusters.samples.size() + window);
  program.ranked_pages += planes * row.pages;
}

void Engine::Impl::write_lists(const ForwardMemory& m, std::span<const Wanted> wanted) const noexcept {
  std::uint32_t changes = 0;
  std::uint32_t listed = 0;
  for (const auto& [sequence, item] : wanted) {
    for (const runtime::PageList& pages : sequence->lists) {
      const std::uint32_t count = pages.pages() - pages.synced();
      if (count == 0) continue;
      std::copy_n(pages.blocks().data() + pages.synced(), count, m.slip_blocks + listed);
      m.slip_lists[changes++] = {.list = pages.slot(), .page = pages.synced(), .count = count, .from = listed};
      listed += count;
    }
  }
  // The mean key of a sequence with no more than its first page may be one of tokens that were taken back.
  std::uint32_t renewed = 0;
  for (const auto& [sequence, item] : wanted) {
    if (memory.stacks().windowed(0)) break;
    if (sequence->pages().synced() == 0 || sequence->planned <= options.page_tokens)
      m.slip_key_means[renewed++] = {.list = sequence->pages().slot(), .tokens = sequence->planned};
  }
  std::ranges::copy(table.freed(), m.slip_freed);
  std::ranges::copy(copies, m.slip_copies);
  m.slip->list_changes = changes;
  m.slip->freed_blocks = static_cast<std::uint32_t>(table.freed().size());
  m.slip->block_copies = static_cast<std::uint32_t>(copies.size());
  m.slip->key_means = renewed;
}

std::uint64_t Engine::Impl::builds_on() const noexcept {
  return programs.empty() ? good : std::max(good, programs.newest().forward);
}

std::uint64_t Engine::Impl::send(std::vector<Wanted> wanted, const Bucket& bucket, void* stream,
                                 std::uint32_t queries) {
  if (copies.size() + wanted.size() * memory.stacks().count() > copies.capacity())
    throw Error(Errc::device, "plan: too many plans could not be enqueued; is the stream one of the engine's device?");
  if (!programs.has_free_slip())
    throw Error(Errc::device,
                "plan: the device has not got to plans that failed, or has failed itself; build another engine");
  for (const auto& [sequence, item] : wanted)
    if (item.prefill) drop_look(*sequence);  // What it reads is about to change.
  const std::uint64_t forward = planned + 1;
  const ForwardMemory m = memory.of(programs.free_slip(), bucket);
  *m.slip = {.forward = forward, .after = builds_on(), .bucket = bucket};
  runtime::Program program{
      .forward = forward, .slip = programs.free_slip(), .bucket = bucket, .stream = stream, .items = {}, .ends = {}};
  for (const auto& [sequence, item] : wanted) {
    program.items.push_back(item);
    program.ends.push_back(sequence->planned + item.tokens);
    if (options.prefill.mode == PrefillMode::automatic) program.books.push_back(sequence->bets);
  }
  programs.push(std::move(program));
  ++planned;  // Whether it is enqueued or not: what failed may yet run.
  bool applied = false;
  try {
    grow(wanted);
    const std::vector<ForwardClustering> clusterings = due_clusterings(wanted);
    const scheduler::TaskGraph& graph = graph_of(m.teams());
    write_rows(m, wanted);
    programs.newest().chunks.assign(m.slip_chunks, m.slip_chunks + bucket.prefills);
    if (m.sparse_prefill) programs.newest().tallies.resize(std::size_t{bucket.prefills} * options.shape.layers);
    if (bucket.audit) programs.newest().audit = audit_of(wanted, bucket);
    choice.expect(forward, m.slip->after, choosing_rows(m, wanted, programs.newest()));
    write_lists(m, wanted);
    if (bucket.trace) begin_trace(m);
    applied = true;
    for (const scheduler::Task& task : graph.plan()) {
      if (task.verb == scheduler::Verb::apply) verbs.apply(m, *side, stream);
      if (task.verb == scheduler::Verb::fill) verbs.fill(m, *side, stream);
      if (task.verb == scheduler::Verb::cluster && !clusterings.empty()) verbs.cluster(m, clusterings, stream);
    }
    note_clustered(wanted);
  } catch (...) {
    choice.forget(forward);
    runtime::Program failed = programs.take(forward);
    for (std::size_t i = 0; i < wanted.size(); ++i) give_back(*wanted[i].sequence, failed, i);
    if (applied) await_read(m, failed);
    throw;
  }
  for (const auto& [sequence, item] : wanted) {
    if (item.prefill && sequence->tail.slot != kNone)
      sequence->extend_tail(item.tokens, bucket.prefills != 0 ? item.tokens : queries, sizes.prompt_queries);
    if (item.prefill) sequence->clusters.forget();
    if (!item.prefill && sequence->leaves_out())
      sequence->names.sparse = std::min(sequence->names.sparse, sequence->planned);
    sequence->planned += item.tokens;
    for (runtime::PageList& list : sequence->lists) list.set_synced();
  }
  table.forget_freed();
  copies.clear();
  next_layer = 0;
  return forward;
}

}  // namespace sluice
