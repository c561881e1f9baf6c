// One turn of progressive attention: which pages each head takes, where they come to lie, and what is queued for them.
#include <algorithm>

#include "runtime/progressive.hpp"

namespace sluice::runtime {

/// False if no head wants more.
bool Progressive::issue(std::uint64_t number) {
  const auto slot = static_cast<std::uint32_t>(number % kInFlight);
  Turn& turn = turns_[slot];
  turn.heads.clear();
  turn.attends.clear();
  turn.verdicts.clear();
  turn.folds.clear();
  turn.staged_moves.clear();
  turn.moved.clear();
  std::vector<PageMove> moves;
  for (std::size_t i = 0; i < heads_.size(); ++i) {
    Head& head = heads_[i];
    gather(head, slot, turn, moves);
    const bool last_of_sequence = i + 1 == heads_.size() || heads_[i + 1].work->sequence != head.work->sequence;
    if (last_of_sequence) bring(head, turn, moves);
  }
  if (turn.heads.empty()) return false;
  turn.tag = ++tag_;
  for (Head* head : turn.heads) {
    if (head->turns % kFold == 0) queue_fold(*head, slot, turn);
    queue_pages(*head, slot, turn);
    ++head->turns;
  }
  queue(turn);
  return true;
}

std::uint32_t Progressive::turn_pages(const Head& head) const noexcept {
  const BudgetOptions& budget = head.work->sequence->spec.budget;
  if (budget.rule == ProgressRule::mean || budget.rule == ProgressRule::median) return budget.microbatch;
  std::uint32_t pages = head.visits / kGrowth;
  if (head.turns < 2) pages = std::max(pages, head.work->pages().needed_visits >> (head.turns + 1));
  return std::max(budget.microbatch, std::min(pages, kMostPages));
}

/// Chooses what a head attends in this turn, and where.
void Progressive::gather(Head& head, std::uint32_t slot, Turn& turn, std::vector<PageMove>& moves) {
  Batch& batch = head.batches[slot];
  batch.staged.clear();
  batch.near.clear();
  batch.hits.clear();
  batch.pages = 0;
  if (head.enough || (head.turns != 0 && head.order.left() == 0)) return;
  HeadWork& work = *head.work;
  if (head.turns == 0) {
    // The open page comes first. It is always near, and says nothing of the pages to come, even if it is full by now.
    const PageRun open = scheduler::far_part(work.near, work.scored_pages, work.tokens);
    if (open.tokens() != 0) {
      batch.near.add_part(open, work.pages().slots[open.page]);
      head.visited.push_back(open);
      head.hit_tokens += open.tokens();
    }
  }
  const std::uint32_t pages = turn_pages(head);
  while (batch.pages < pages && head.order.left() != 0 && place_next(head, batch, slot, turn, moves)) ++batch.pages;
  head.visits += batch.pages;
  batch.visits = head.visits;
  if (!batch.near.runs.empty() || !batch.staged.runs.empty()) turn.heads.push_back(&head);
  work.counters.iterations += div_up(batch.pages, work.sequence->spec.budget.microbatch);
}

/// Finds a place for the next page of the order; false if there is none before an earlier turn is through.
bool Progressive::place_next(Head& head, Batch& batch, std::uint32_t slot, Turn& turn, std::vector<PageMove>& moves) {
  HeadWork& work = *head.work;
  const std::uint32_t page = head.order.next();
  const std::optional<Residency::Seat> seat = parts_.residency.seat(*work.sequence, *work.layer, work.kv_head, page);
  const std::uint32_t half = parts_.staging_pages / kInFlight;
  const auto staged = static_cast<std::uint32_t>(turn.staged_moves.size());
  if (!seat && staged == half) return false;
  Stats& stats = work.sequence->stats;
  const bool whole = head.order.take(1, head.visited) == 1;
  const PageRun& run = head.visited.back();
  Pages& pages = seat ? batch.near : batch.staged;
  const std::uint32_t frame = seat ? seat->slot : slot * half + staged;
  whole ? pages.add_whole(run, frame) : pages.add_part(run, frame);
  if (!seat) {
    turn.staged_moves.push_back({.page = work.pages().refs[page], .slot = frame});
    stats.h2d_bytes += layout_.page_bytes();
  } else {
    if (seat->empty) {
      moves.push_back({.page = work.pages().refs[page], .slot = seat->slot});
    } else {
      batch.hits.push_back(seat->slot);
      head.hit_tokens += run.tokens();
    }
  }
  ++(seat && !seat->empty ? stats.pool_hits : stats.pool_misses);
  return true;
}

/// Sends one sequence's pages to their slots.
void Progressive::bring(Head& last, Turn& turn, std::vector<PageMove>& moves) {
  if (moves.empty()) return;
  parts_.residency.bring(*last.work->sequence, *last.work->layer, moves);
  turn.moved.emplace_back(last.work->sequence, last.work->layer);
  moves.clear();
}

/// Makes one partial of all that the head has, as there is room for a few turns only.
void Progressive::queue_fold(Head& head, std::uint32_t slot, Turn& turn) {
  if (head.parts.empty()) return;
  head.running ^= 1;
  const Partial whole = partial(2 * kFold + head.running, head);
  head.folding[slot].swap(head.parts);
  head.parts.assign(1, whole);
  turn.folds.push_back({.parts = head.folding[slot], .out = reinterpret_cast<std::byte*>(whole.out), .lse = whole.lse});
}

void Progressive::queue_pages(Head& head, std::uint32_t slot, Turn& turn) {
  const HeadWork& work = *head.work;
  const Batch& batch = head.batches[slot];
  const std::uint32_t group = shape_.group();
  const std::uint32_t first_q = work.kv_head * group;
  float* const first_mass = masses(slot, head);
  float* mass = first_mass;
  const auto attend = [&](const Pages& pages, std::byte* base, std::uint32_t place) {
    if (pages.runs.empty()) return;
    AttendTask task;
    task.q = parts_.buffers.device_q(work.row, first_q);
    task.kv = {.base = base, .frames = pages.frames.data(), .layout = layout_};
    task.runs = pages.runs;
    task.masses = mass;
    task.out = partial(2 * (head.turns % kFold) + place, head);
    mass += pages.runs.size() * group;
    head.parts.push_back(task.out);
    turn.attends.push_back(task);
  };
  attend(batch.staged, parts_.staging, 0);
  attend(batch.near, parts_.residency.memory(), 1);

  const BudgetOptions& budget = work.sequence->spec.budget;
  const bool first = head.turns == 0;
  const bool in_order = batch.staged.whole == batch.staged.runs.size();  // Whole pages come first.
  ProgressTask task{.states = reinterpret_cast<ProgressState*>(states_->data()) + std::size_t{head.index} * group,
                    .masses = first_mass,
                    .extra = first ? parts_.buffers.near(work.row, first_q).lse : nullptr,
                    .pages = static_cast<std::uint32_t>(batch.staged.runs.size() + batch.near.runs.size()),
                    .full = batch.staged.whole + (in_order ? batch.near.whole : 0),
                    .left = head.order.left(),
                    .mass = budget.mass,
                    .rule = budget.rule,
                    .first = first,
                    .verdict = verdict(slot, head),
                    .tag = turn.tag};
  if (budget.rule == ProgressRule::certified) {
    const std::span<const float> known = head.order.bounds(shape_.head_dim);
    std::copy(known.begin(), known.end(), bounds(slot, head));
    task.bounds = bounds(slot, head);
  }
  turn.verdicts.push_back(task);
}

void Progressive::queue(Turn& turn) {
  if (!turn.staged_moves.empty()) {
    parts_.link.fetch(turn.staged_moves, parts_.staging);
    parts_.link.stream().record(*turn.staged);
    parts_.stream.wait(*turn.staged);
  }
  for (const auto& [sequence, layer] : turn.moved) parts_.stream.wait(*layer->arriving.back().landed);
  Backend& backend = parts_.device.backend();
  backend.merge(turn.folds, shape_, DType::f32, &parts_.stream);
  backend.attend(turn.attends, shape_, &parts_.stream);
  backend.verify(turn.verdicts, shape_, &parts_.stream);
  // The event takes what failed in this turn; waiting for it gives that back, for the end of the step to find.
  parts_.stream.record(*turn.verified);
  parts_.stream.wait(*turn.verified);
}

}  // namespace sluice::runtime
