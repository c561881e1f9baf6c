// Which rows lie near: a cache that the device keeps by itself.
#include <algorithm>
#include <span>
#include <vector>

#include "cpu/forward/forward_layer.hpp"

namespace sluice::cpu {
namespace {

using Forward = std::uint32_t;  ///< a forward's number, modulo 2^32

/// How a plane's entry of a far row says that it was attended far in this forward.
std::uint32_t stamp_of(Forward forward) noexcept { return forward & (kComingBit - 1); }
std::uint32_t since(Forward forward, std::uint32_t stamp) noexcept { return stamp_of(forward - stamp); }

/// Who has to give way: free rows, and those that were not attended in so many forwards; if they are not enough, the
/// next.
using Patience = std::initializer_list<std::uint32_t>;

class Plane {
 public:
  Plane(const ForwardMemory& memory, std::uint32_t plane)
      : m_(memory),
        plane_(plane),
        near_of_(memory.near_of + memory.far_row(plane, 0)),
        rows_(memory.near_rows + memory.near_row(plane, 0), std::size_t{memory.near_pages} * memory.layout.page_tokens),
        hand_(memory.near_hands[plane]) {}

  [[nodiscard]] std::uint32_t& entry(std::uint32_t row) const noexcept { return near_of_[row]; }

  [[nodiscard]] std::uint32_t rows() const noexcept { return static_cast<std::uint32_t>(rows_.size()); }
  /// A row that lies near counts as attended.
  void refresh(std::uint32_t row, Forward forward) const noexcept { rows_[place_of(row)].used = forward; }

  void give_up(std::uint32_t row) const noexcept {
    if ((entry(row) & (kNearBit | kComingBit)) != 0) {
      rows_[place_of(row)] = {};
      --m_.state->near_rows;
      hold(row, ~0u);
    }
    entry(row) = 0;
  }
  /// A row whose near one is filled.
  void arrive(std::uint32_t row) const noexcept { entry(row) = place_of(row) | kNearBit; }

  /// Near rows for the first of `wanted`, as many as there are; returns how many that were.
  /// `bit`: kNearBit, or kComingBit where they have to be filled.
  std::uint32_t acquire(std::span<const std::uint32_t> wanted, Forward forward, Forward used, Patience patience,
                        std::uint32_t bit = kNearBit) const {
    std::uint32_t acquired = 0;
    for (const std::uint32_t least : patience) {
      const std::size_t most = std::min<std::size_t>(rows_.size(), kNearLooks);
      for (std::size_t looked = 0; looked < most && acquired < wanted.size(); ++looked) {
        const std::uint32_t place = hand_;
        hand_ = (hand_ + 1) % static_cast<std::uint32_t>(rows_.size());
        if (rows_[place].row == kNone || forward - rows_[place].used > least) put(place, wanted[acquired++], used, bit);
      }
    }
    return acquired;
  }

  void load(const Kernels& kernels, std::uint32_t row) const {
    const std::byte* const from = m_.far_key(plane_, row);
    const float* const scales = m_.far_layout.scaled() ? m_.far_scales(plane_, row) : nullptr;
    std::byte* const to = m_.near_key(plane_, place_of(row));
    copy_near(kernels, m_, from, scales, to);
    copy_near(kernels, m_, from + m_.far_layout.half_bytes(), scales == nullptr ? nullptr : scales + 1,
              to + m_.layout.half_bytes());
  }

 private:
  [[nodiscard]] std::uint32_t place_of(std::uint32_t row) const noexcept {
    return entry(row) & ~(kNearBit | kComingBit);
  }
  void put(std::uint32_t place, std::uint32_t row, Forward used, std::uint32_t bit) const noexcept {
    ForwardNearRow& mine = rows_[place];
    if (mine.row != kNone) {
      entry(mine.row) = stamp_of(mine.used);
      hold(mine.row, ~0u);
    } else {
      ++m_.state->near_rows;
    }
    mine = {.row = row, .used = used};
    entry(row) = place | bit;
    hold(row, 1);
  }
  /// So many more near rows of the row's block. No other thread changes it, but one may look at it.
  void hold(std::uint32_t row, std::uint32_t more) const noexcept {
    const auto held = shared(m_.near_held[row / m_.layout.page_tokens]);
    held.store(held.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  }

  const ForwardMemory& m_;
  std::uint32_t plane_;
  std::uint32_t* near_of_;
  std::span<ForwardNearRow> rows_;
  std::uint32_t& hand_;
};

/// Far rows of one plane that are to come near.
class Arriving {
 public:
  Arriving(const ForwardMemory& memory, std::uint32_t plane)
      : arrivals_(memory.arrivals[plane]), rows_(memory.arriving_of(plane)), most_(memory.promotions) {}

  [[nodiscard]] ForwardArrivals& state() const noexcept { return arrivals_; }
  [[nodiscard]] std::uint32_t most() const noexcept { return most_; }
  [[nodiscard]] bool under_way() const noexcept {
    return arrivals_.state == ForwardArrivals::State::placed || arrivals_.state == ForwardArrivals::State::filled;
  }
  void begin(Forward forward) const noexcept {
    arrivals_ = {.state = ForwardArrivals::State::listed, .forward = forward};
  }
  /// Adds a row to those of a kind, if there is room.
  void add(std::uint32_t ForwardArrivals::*kind, std::uint32_t row) const noexcept {
    std::uint32_t& count = arrivals_.*kind;
    if (count < most_) rows_of(kind)[count++] = row;
  }
  [[nodiscard]] std::span<std::uint32_t> of(std::uint32_t ForwardArrivals::*kind) const noexcept {
    return {rows_of(kind), arrivals_.*kind};
  }
  /// Leaves those of a kind that `stay`.
  template <class Stays>
  void keep(std::uint32_t ForwardArrivals::*kind, const Stays& stays) const noexcept {
    const auto rows = of(kind);
    const auto gone = std::ranges::remove_if(rows, [&](std::uint32_t row) { return !stays(row); });
    arrivals_.*kind -= static_cast<std::uint32_t>(gone.size());
  }
  template <class Body>
  void for_each(const Body& body) const {
    for (const auto kind : {&ForwardArrivals::always, &ForwardArrivals::again, &ForwardArrivals::first}) {
      for (const std::uint32_t row : of(kind)) body(row);
    }
  }

 private:
  [[nodiscard]] std::uint32_t* rows_of(std::uint32_t ForwardArrivals::*kind) const noexcept {
    const std::uint32_t at = kind == &ForwardArrivals::always ? 0 : kind == &ForwardArrivals::again ? 1 : 2;
    return rows_ + std::size_t{at} * most_;
  }

  ForwardArrivals& arrivals_;
  std::uint32_t* rows_;
  std::uint32_t most_;
};

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

/// Near rows for tokens that come, of prompts or decoded ones, but for the first `skip` of these. Those that have one
/// count as used in that forward.
void acquire_coming(const ForwardMemory& m, const Plane& plane, bool decoded, std::size_t skip, Forward used,
                    Patience patience) {
  constexpr std::uint32_t kAtOnce = 256;  // As many as a device has threads for.
  const std::uint32_t tokens = m.slip->bucket.rows();
  std::vector<std::uint32_t> wanted;
  for (std::uint32_t base = 0; base < tokens; base += kAtOnce) {
    wanted.clear();
    for (const ForwardToken& token : std::span(m.tokens + base, std::min(kAtOnce, tokens - base))) {
      if (token.list == kNone || (token.decoded != 0) != decoded) continue;
      if (skip != 0) {
        --skip;
        continue;
      }
      const std::uint32_t row = m.row_of(token.list, token.position);
      if ((plane.entry(row) & kNearBit) == 0) {
        wanted.push_back(row);
      } else {
        plane.refresh(row, used);
      }
    }
    if (plane.acquire(wanted, static_cast<Forward>(m.slip->forward), used, patience) < wanted.size()) return;
  }
}

/// Tokens that come and found no near row are not as they were listed, if they were: before the sequence was cut.
void forget_coming(const ForwardMemory& m, const Plane& plane) {
  for (const ForwardToken& token : std::span(m.tokens, m.slip->bucket.rows())) {
    if (token.list == kNone) continue;
    std::uint32_t& entry = plane.entry(m.row_of(token.list, token.position));
    if ((entry & kNearBit) == 0) entry = 0;
  }
}

/// All tokens of rows that are whole, but for the new one, see ForwardVerbs::apply.
void keep_whole(const Kernels& kernels, const ForwardMemory& m, const Plane& plane) {
  const auto forward = static_cast<Forward>(m.slip->forward);
  std::size_t left = m.promotions;
  for (const ForwardRow& row : std::span(m.rows, m.slip->bucket.decode_rows)) {
    if (row.list == kNone || !m.keeps_near(row)) continue;
    std::vector<std::uint32_t> wanted;
    for (std::uint32_t token = 0; token + 1 < row.tokens; ++token) {
      const std::uint32_t at = m.row_of(row.list, token);
      if ((plane.entry(at) & kNearBit) != 0) {
        plane.refresh(at, forward);
      } else if (wanted.size() < left) {
        wanted.push_back(at);
      }
    }
    const std::uint32_t acquired = plane.acquire(wanted, forward, forward, {kNearPatience, kNearAgain});
    for (std::uint32_t i = 0; i < acquired; ++i) plane.load(kernels, wanted[i]);
    m.state->promoted += acquired;
    left -= acquired;
  }
}

/// Rows that were filled beside the last forward are near; those that were not, as that failed, give theirs back.
void settle(const Plane& plane, const Arriving& arriving) {
  if (!arriving.under_way()) return;
  const bool filled = arriving.state().state == ForwardArrivals::State::filled;
  arriving.for_each([&](std::uint32_t row) { filled ? plane.arrive(row) : plane.give_up(row); });
  arriving.state() = {};
}

/// Near rows for what is listed and still as it was: sinks and recent tokens whoever has to give way, then rows that
/// were attended again; then, if none of these had to ask for near rows that were attended not long ago, those that
/// were attended once. Where near memory is scarce a single use is worth less than what it would drive out.
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

/// body(memory), for every stack that has a layer in this plane.
template <class Body>
void for_each_stack(const ForwardMemory& m, std::uint32_t plane, const Body& body) {
  for (std::uint32_t stack = 0; stack < m.stacks; ++stack) {
    if (m.has_layer(stack, plane)) body(m.of_stack(stack));
  }
}

}  // namespace

void acquire_rows(const Kernels& kernels, const ForwardMemory& m) {
  if (m.near_pages == 0) return;
  const auto forward = static_cast<Forward>(m.slip->forward);
  const std::uint32_t page_tokens = m.layout.page_tokens;
  const auto prompts = static_cast<std::size_t>(
      std::ranges::count_if(std::span(m.tokens, m.slip->bucket.rows()),
                            [](const ForwardToken& token) { return token.list != kNone && token.decoded == 0; }));
  // All of them first: they are reported once, and what follows may find no memory.
  for (std::uint32_t p = 0; p < m.planes(); ++p) {
    const Plane plane(m, p);
    for_each_stack(m, p, [&](const ForwardMemory& stack) { settle(plane, Arriving(stack, p)); });
    for (const std::uint32_t block : std::span(m.slip_freed, m.slip->freed_blocks)) {
      for (std::uint32_t i = 0; i < page_tokens; ++i) plane.give_up(block * page_tokens + i);
    }
  }
  for (std::uint32_t p = 0; p < m.planes(); ++p) {
    const Plane plane(m, p);
    for_each_stack(m, p, [&](const ForwardMemory& stack) {
      acquire_coming(stack, plane, true, 0, forward, {kNearPatience, kNearAgain, 0});
    });
    if (m.state->kept == m.slip->forward) keep_whole(kernels, m, plane);
    // The newest of prompts, and in their order, so that the oldest give way first later on.
    const std::size_t most = std::min<std::size_t>(prompts, plane.rows());
    for_each_stack(m, p, [&](const ForwardMemory& stack) {
      acquire_coming(stack, plane, false, prompts - most, forward - kNearPatience, {kNearPatience});
    });
    for_each_stack(m, p, [&](const ForwardMemory& stack) {
      const Arriving arriving(stack, p);
      if (arriving.state().state != ForwardArrivals::State::listed) return;
      forget_coming(stack, plane);
      place(plane, arriving, forward);
      arriving.for_each([&](std::uint32_t row) {
        plane.load(kernels, row);
        ++m.state->promoted;
      });
      arriving.state().state = ForwardArrivals::State::filled;
    });
  }
}

void promote(const ForwardMemory& m, std::uint32_t layer) {
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
