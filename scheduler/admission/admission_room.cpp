// Memory of requests: who runs beside whom, and who gives way.
#include <algorithm>
#include <iterator>

#include "scheduler/admission/impl.hpp"

namespace sluice {

Admission::Impl::Room Admission::Impl::room(std::optional<std::uint64_t> held_pages) const noexcept {
  Room room{.options = options};
  std::uint64_t counted = 0;
  for (auto at = lives.begin(); at != lives.end() && at->running; ++at) {
    room.taken += need(at->wanted());
    counted += held_alone(at->done);
  }
  if (held_pages && *held_pages < counted) room.shared = counted - *held_pages;
  return room;
}

std::uint64_t Admission::Impl::held_alone(std::uint64_t tokens) const noexcept {
  const std::uint64_t pages = div_up(tokens, options.page_tokens);
  return options.page_blocks * pages + options.window_blocks * std::min(pages, options.window_resting_pages);
}

void Admission::Impl::preempt_youngest(std::vector<RequestId>& preempted) noexcept {
  Live& youngest = *std::prev(first_waiting());
  stop(youngest);
  youngest.prompt = youngest.tokens;
  youngest.done = youngest.cached = 0;
  preempted.push_back(youngest.request.id);
}

void Admission::Impl::make_room(Room& room, std::vector<RequestId>& preempted) noexcept {
  while (running > 1 && !room.has({})) {
    const Live& youngest = *std::prev(first_waiting());
    room.taken -= need(youngest.wanted());
    // Those before it began first: pages that it shares with them are among those that it began with.
    room.shared -= std::min(room.shared, need(youngest.cached).pages);
    preempt_youngest(preempted);
  }
}

bool Admission::Impl::can_admit(const Live& live, const Room& room) const noexcept {
  if (running >= most_running() || held_back) return false;
  if (live.request.on_cpu && on_cpu >= options.cpu_sequences) return false;
  const std::uint64_t last = scheduler::last_tokens(live.request);
  MemoryNeed wanted = need(std::min(std::uint64_t{live.prompt} + options.page_tokens, last));
  if (running != 0) wanted.pages += options.watermark_pages;
  return room.has(wanted);
}

}  // namespace sluice
