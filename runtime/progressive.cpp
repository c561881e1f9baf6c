#include "runtime/progressive.hpp"

#include <algorithm>
#include <atomic>
#include <string>

#include "runtime/wait.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
namespace {

float* floats(const std::unique_ptr<Buffer>& memory) { return reinterpret_cast<float*>(memory->data()); }

}  // namespace

void Progressive::Pages::clear() {
  runs.clear();
  frames.clear();
  whole = 0;
}

void Progressive::Pages::add_whole(const PageRun& run, std::uint32_t frame) {
  runs.insert(runs.begin() + whole++, {.page = static_cast<std::uint32_t>(frames.size()), .begin = 0, .end = run.end});
  frames.push_back(frame);
}

void Progressive::Pages::add_part(const PageRun& run, std::uint32_t frame) {
  runs.push_back({.page = static_cast<std::uint32_t>(frames.size()), .begin = run.begin, .end = run.end});
  frames.push_back(frame);
}

void Progressive::reserve(std::uint32_t batch, std::uint32_t microbatch) {
  const std::uint32_t room = std::max(room_, batch * shape_.kv_heads);
  microbatch = std::max(microbatch_, microbatch);
  if (room == room_ && microbatch == microbatch_) return;
  const std::uint64_t rows = std::uint64_t{room} * shape_.group();
  auto states = parts_.device.allocate(rows * sizeof(ProgressState));
  auto masses = parts_.device.allocate(kInFlight * rows * (microbatch + 1) * sizeof(float));
  auto partials = parts_.device.allocate((2 * kFold + 2) * rows * (shape_.head_dim + 1) * sizeof(float));
  auto verdicts = parts_.device.allocate_pinned(kInFlight * std::uint64_t{room} * sizeof(std::uint64_t));
  auto bounds = parts_.device.allocate_pinned(kInFlight * rows * sizeof(float));
  for (Turn& turn : turns_) {
    if (turn.staged == nullptr) turn.staged = parts_.device.create_event();
    if (turn.verified == nullptr) turn.verified = parts_.device.create_event();
  }
  all_heads_.resize(room);
  states_ = std::move(states);
  masses_ = std::move(masses);
  partials_ = std::move(partials);
  verdicts_ = std::move(verdicts);
  bounds_ = std::move(bounds);
  room_ = room;
  microbatch_ = microbatch;
}

void Progressive::run(std::span<HeadWork> heads, std::span<const std::span<const float>> scores) {
  begin(heads, scores);
  if (heads_.empty()) return;
  // Slots that are given to other pages may still be read by what the device was told before, near attention included.
  // From here on nothing is evicted that a queued turn reads, so that copies need not wait for the device again.
  parts_.link.wait_for_device();
  try {
    loop(deadline_after(parts_.timeout));
  } catch (...) {
    unpin_hits();
    throw;
  }
  unpin_hits();
  for (Turn& turn : turns_) {
    unsettled_.insert(unsettled_.end(), turn.moved.begin(), turn.moved.end());
    turn.moved.clear();
  }
  finish();
}

void Progressive::settle(Deadline deadline) {
  for (const auto& [sequence, layer] : unsettled_) parts_.residency.settle(*sequence, *layer, deadline);
  unsettled_.clear();
}

void Progressive::begin(std::span<HeadWork> heads, std::span<const std::span<const float>> scores) {
  for (Turn& turn : turns_) turn.moved.clear();  // What a run that failed left; it may name sequences that are gone.
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < heads.size(); ++i) {
    if (!heads[i].progressive) continue;
    Head& head = all_heads_[count];
    head.work = &heads[i];
    head.index = count++;
    head.turns = 0;
    head.enough = false;
    head.parts.clear();
    head.visited.clear();
    head.hit_tokens = 0;
    for (Batch& batch : head.batches) batch.hits.clear();
  }
  heads_ = std::span(all_heads_).first(count);
  const auto* const first = heads.data();
  parts_.workers.parallel_for(count, [&](std::uint32_t i) {
    const HeadWork& work = *heads_[i].work;
    heads_[i].order.rank(scores[static_cast<std::size_t>(&work - first)], shape_.group(), work.near, work.tokens);
  });
}

void Progressive::loop(Deadline deadline) {
  for (std::uint64_t number = 0;; ++number) {
    if (number >= kInFlight) retire(number - kInFlight, deadline);
    if (!issue(number)) return;
  }
}

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
  const std::uint32_t microbatch = work.sequence->spec.budget.microbatch;
  while (batch.pages < microbatch && head.order.left() != 0 && place_next(head, batch, slot, turn, moves)) ++batch.pages;
  if (!batch.near.runs.empty() || !batch.staged.runs.empty()) turn.heads.push_back(&head);
  if (batch.pages != 0) ++work.counters.iterations;
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
  turn.folds.push_back(
      {.parts = head.folding[slot], .out = reinterpret_cast<std::byte*>(whole.out), .lse = whole.lse});
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
    float* const bounds = floats(bounds_) + (std::size_t{slot} * room_ + head.index) * group;
    const std::span<const float> known = head.order.bounds(shape_.head_dim);
    std::copy(known.begin(), known.end(), bounds);
    task.bounds = bounds;
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

/// Returns when all verdicts of a turn have come.
void Progressive::await(const Turn& turn, std::uint32_t slot, Deadline deadline) const {
  const auto came = [&](const Head* head) {
    return std::atomic_ref(*verdict(slot, *head)).load(std::memory_order_acquire) >> 1 == turn.tag;
  };
  // A turn that failed tells no verdict, but its event comes all the same.
  const auto ready = [&] {
    return std::all_of(turn.heads.begin(), turn.heads.end(), came) || turn.verified->state() != Event::State::pending;
  };
  const auto spin = parts_.device.info().host_memory ? kSpin : 100 * kSpin;
  if (!wait_until(ready, deadline, spin)) {
    throw Error(Errc::timeout, "a turn of progressive attention did not finish within " +
                                   std::to_string(parts_.timeout.count()) +
                                   " ms; raise the timeout if the machine is merely busy");
  }
  if (turn.verified->state() == Event::State::failed) {
    throw Error(Errc::device, "a turn of progressive attention failed: " + turn.verified->reason());
  }
}

/// Looks at the verdicts of a turn and frees what it held.
void Progressive::retire(std::uint64_t number, Deadline deadline) {
  const auto slot = static_cast<std::uint32_t>(number % kInFlight);
  Turn& turn = turns_[slot];
  await(turn, slot, deadline);
  for (Head* head : turn.heads) {
    const bool enough = (std::atomic_ref(*verdict(slot, *head)).load(std::memory_order_acquire) & 1) != 0;
    if (enough && !head->enough) {
      head->enough = true;
      for (std::uint32_t later = 0; later < kInFlight; ++later) {
        if (later != slot) head->work->sequence->stats.overshoot_pages += head->batches[later].pages;
      }
    }
    for (const std::uint32_t hit : head->batches[slot].hits) parts_.residency.release_seat(hit);
    head->batches[slot].hits.clear();
  }
  for (const auto& [sequence, layer] : turn.moved) parts_.residency.settle_oldest(*sequence, *layer, deadline);
  turn.moved.clear();
}

/// Of turns whose verdicts nobody waits for: later copies wait for the device before they are sent.
void Progressive::unpin_hits() noexcept {
  for (Head& head : heads_) {
    for (Batch& batch : head.batches) {
      for (const std::uint32_t hit : batch.hits) parts_.residency.release_seat(hit);
      batch.hits.clear();
    }
  }
}

/// Tells the step what was attended.
void Progressive::finish() {
  for (Head& head : heads_) {
    HeadWork& work = *head.work;
    work.parts.insert(work.parts.end(), head.parts.begin(), head.parts.end());
    std::sort(head.visited.begin(), head.visited.end(),
              [](const PageRun& a, const PageRun& b) { return a.page < b.page; });
    work.placement.fetch.clear();
    work.placement.fetch.runs = head.visited;
    work.visited_near = head.hit_tokens;
    const std::uint64_t tokens = work.placement.fetch.attended();
    work.counters.candidates += tokens;
    work.counters.expanded_per_head += tokens * shape_.group();
    work.counters.near_hits += head.hit_tokens;
  }
}

std::uint64_t* Progressive::verdict(std::uint32_t slot, const Head& head) const noexcept {
  return reinterpret_cast<std::uint64_t*>(verdicts_->data()) + std::size_t{slot} * room_ + head.index;
}

float* Progressive::masses(std::uint32_t slot, const Head& head) const noexcept {
  return floats(masses_) + (std::size_t{slot} * room_ + head.index) * (microbatch_ + 1) * shape_.group();
}

Partial Progressive::partial(std::uint32_t set, const Head& head) const noexcept {
  const std::size_t rows = std::size_t{room_} * shape_.group();
  float* const first = floats(partials_) + set * rows * (shape_.head_dim + 1);
  const std::size_t row = std::size_t{head.index} * shape_.group();
  return {.out = first + row * shape_.head_dim, .lse = first + rows * shape_.head_dim + row};
}

}  // namespace sluice::runtime
