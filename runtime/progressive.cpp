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
  const std::uint32_t most_pages = std::max({most_pages_, microbatch, kMostPages});
  if (room == room_ && most_pages == most_pages_) return;
  const std::uint64_t rows = std::uint64_t{room} * shape_.group();
  auto states = parts_.device.allocate(rows * sizeof(ProgressState));
  auto masses = parts_.device.allocate(kInFlight * rows * (most_pages + 1) * sizeof(float));
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
  most_pages_ = most_pages;
}

void Progressive::run(std::span<HeadWork> heads, std::span<const std::span<const float>> scores) {
  waited_ = {};
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
    head.visits = 0;
    head.enough = false;
    head.parts.clear();
    head.visited.clear();
    head.hit_tokens = 0;
    for (Batch& batch : head.batches) batch.hits.clear();
  }
  heads_ = std::span(all_heads_).first(count);
  const auto* const first = heads.data();
  parts_.workers.parallel_for(count, [this, scores, first](std::uint32_t i) {
    const HeadWork& work = *heads_[i].work;
    scheduler::PageOrder& order = heads_[i].order;
    const bool certified = work.sequence->spec.budget.rule == ProgressRule::certified;
    // Sorted here, where the workers do it side by side, rather than when the link waits for pages.
    const std::uint32_t likely = certified ? 0 : work.pages().needed_visits / 4 * 5;
    order.rank(scores[static_cast<std::size_t>(&work - first)], shape_.group(), work.near, work.tokens, likely);
    if (certified) (void)order.bounds(shape_.head_dim);  // The first bound sorts all pages.
  });
}

void Progressive::loop(Deadline deadline) {
  for (std::uint64_t number = 0;; ++number) {
    if (number >= kInFlight) retire(number - kInFlight, deadline);
    if (!issue(number)) return;
  }
}

/// Returns when all verdicts of a turn have come.
void Progressive::await(const Turn& turn, std::uint32_t slot, Deadline deadline) {
  const auto came = [&](const Head* head) {
    return std::atomic_ref(*verdict(slot, *head)).load(std::memory_order_acquire) >> 1 == turn.tag;
  };
  // A turn that failed tells no verdict, but its event comes all the same.
  const auto ready = [&] {
    return std::all_of(turn.heads.begin(), turn.heads.end(), came) || turn.verified->state() != Event::State::pending;
  };
  const auto spin = parts_.device.info().own_processor ? 100 * kSpin : kSpin;
  const Clock::time_point begin = Clock::now();
  const bool in_time = wait_until(ready, deadline, spin);
  waited_ += Clock::now() - begin;
  if (!in_time) {
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
      head->needed = head->batches[slot].visits;
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
    work.needed_visits = head.enough ? head.needed : head.visits;
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
  return floats(masses_) + (std::size_t{slot} * room_ + head.index) * (most_pages_ + 1) * shape_.group();
}

float* Progressive::bounds(std::uint32_t slot, const Head& head) const noexcept {
  return floats(bounds_) + (std::size_t{slot} * room_ + head.index) * shape_.group();
}

Partial Progressive::partial(std::uint32_t set, const Head& head) const noexcept {
  const std::size_t rows = std::size_t{room_} * shape_.group();
  float* const first = floats(partials_) + set * rows * (shape_.head_dim + 1);
  const std::size_t row = std::size_t{head.index} * shape_.group();
  return {.out = first + row * shape_.head_dim, .lse = first + rows * shape_.head_dim + row};
}

}  // namespace sluice::runtime
