// Far rows that are to come near, from when they were attended until they are there.
#include <algorithm>

#include "cpu/forward/near_plane.hpp"

namespace sluice::cpu {
namespace near {
namespace {

void want_windows(const ForwardMemory& m, const ForwardRow& row, const Plane& plane, Forward forward,
                  const Arriving& wanted) {
  const std::uint32_t recent = std::max(row.sink_end, row.recent_begin);
  for (std::uint32_t i = 0; i < row.sink_end + row.tokens - recent; ++i) {
    if (wanted.state().always == wanted.most()) return;
    const std::uint32_t at = m.row_of(row.list, i < row.sink_end ? i : recent + i - row.sink_end);
    std::uint32_t& entry = plane.entry(at);
    if ((entry & kNearBit) != 0 || entry == stamp_of(forward)) continue;
    entry = stamp_of(forward);
    wanted.add(&ForwardArrivals::always, at);
  }
}

void want(std::uint32_t row, const Plane& plane, Forward forward, const Arriving& wanted) {
  std::uint32_t& entry = plane.entry(row);
  if ((entry & kNearBit) != 0 || entry == stamp_of(forward)) return;
  const bool again = entry != 0 && since(forward, entry) <= kNearAgain;
  entry = stamp_of(forward);
  wanted.add(again ? &ForwardArrivals::again : &ForwardArrivals::first, row);
}

/// Of a list: what the device found far, and what the CPU has chosen for it to fetch.
void want_list(const ForwardMemory& m, const ForwardRow& row, std::uint32_t index, const Plane& plane, Forward forward,
               const Arriving& wanted) {
  const std::uint32_t* const listed = m.far_rows + std::uint64_t{index} * m.list_room();
  for (std::uint32_t i = 0; i < m.far_listed[index]; ++i) want(listed[i], plane, forward, wanted);
  if (row.asks == 0 || !m.keeps_chosen()) return;
  const std::uint32_t* const chosen = m.chosen_rows + index * m.chosen_room();
  for (std::uint32_t i = 0; i < m.chosen[index].count; ++i) want(m.row_of_entry(chosen[i]), plane, forward, wanted);
}

}  // namespace

void settle(const Plane& plane, const Arriving& arriving) {
  if (!arriving.under_way()) return;
  const bool filled = arriving.state().state == ForwardArrivals::State::filled;
  arriving.for_each([&](std::uint32_t row) { filled ? plane.arrive(row) : plane.give_up(row); });
  arriving.state() = {};
}

// Sinks and recent tokens whoever has to give way, then rows that were attended again; then, if none of these had to
// ask for near rows that were attended not long ago, those that were attended once. Where near memory is scarce a
// single use is worth less than what it would drive out.
void place(const Plane& plane, const Arriving& arriving, Forward forward) {
  constexpr std::uint32_t kLastTwo = 1;  // This forward, and the one that listed them.
  const auto kinds = {&ForwardArrivals::always, &ForwardArrivals::again, &ForwardArrivals::first};
  ForwardArrivals& arrivals = arriving.state();
  const std::uint32_t stamp = stamp_of(arrivals.forward);
  for (const auto kind : kinds) arriving.keep(kind, [&](std::uint32_t row) { return plane.entry(row) == stamp; });
  std::uint32_t left = arriving.most();
  const auto acquire = [&](std::uint32_t ForwardArrivals::*kind, std::uint32_t so_far, Patience patience) {
    const auto rows = arriving.of(kind);
    const auto most = rows.first(std::min<std::size_t>(rows.size(), so_far + left)).subspan(so_far);
    const std::uint32_t acquired = plane.acquire(most, forward, forward, patience, kComingBit);
    left -= acquired;
    return so_far + acquired;
  };
  const std::uint32_t always = acquire(&ForwardArrivals::always, 0, {kNearPatience, kNearAgain, kLastTwo});
  const std::uint32_t wanted = std::min(arrivals.again, left);
  std::uint32_t again = acquire(&ForwardArrivals::again, 0, {kNearPatience});
  std::uint32_t first = 0;
  if (again == wanted) {
    first = acquire(&ForwardArrivals::first, 0, {kNearPatience});
  } else {
    again = acquire(&ForwardArrivals::again, again, {kNearAgain});
  }
  arrivals.always = always;
  arrivals.again = again;
  arrivals.first = first;
  arrivals.state = ForwardArrivals::State::placed;
}

}  // namespace near

void promote(const ForwardMemory& m, std::uint32_t layer) {
  using namespace near;
  const auto forward = static_cast<Forward>(m.state->forward);
  if (!runs(m) || !near_turn(forward, layer)) return;
  for (std::uint32_t head = 0; head < m.shape.kv_heads; ++head) {
    const Plane plane(m, m.plane(layer, head));
    const Arriving wanted(m, m.plane(layer, head));
    if (wanted.under_way()) continue;  // Plans between could not be enqueued.
    wanted.begin(forward);
    for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
      const std::uint32_t index = r * m.shape.kv_heads + head;
      const ForwardRow row = m.rows[r].in(layer, m.window);
      if (row.list == kNone || !m.keeps_near(row)) continue;
      if (m.far_windows[index] != 0) want_windows(m, row, plane, forward, wanted);
      want_list(m, row, index, plane, forward, wanted);
    }
  }
}

}  // namespace sluice::cpu
