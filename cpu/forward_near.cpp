// Which rows lie near: a cache that the device keeps by itself.
#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "cpu/forward_layer.hpp"

namespace sluice::cpu {
namespace {

using Forward = std::uint32_t;  ///< a forward's number, modulo 2^32

/// How a plane's entry of a far row says that it was attended far in this forward.
std::uint32_t stamp_of(Forward forward) noexcept { return forward & ~kNearBit; }
std::uint32_t since(Forward forward, std::uint32_t stamp) noexcept { return (forward - stamp) & ~kNearBit; }

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

  void give_up(std::uint32_t row) const noexcept {
    if ((entry(row) & kNearBit) != 0) {
      rows_[entry(row) & ~kNearBit] = {};
      --m_.state->near_rows;
    }
    entry(row) = 0;
  }

  /// Near rows for the first of `wanted`, as many as there are; returns how many that were.
  std::uint32_t seat(std::span<const std::uint32_t> wanted, Forward forward, Forward used, Patience patience) const {
    std::uint32_t seated = 0;
    for (const std::uint32_t least : patience) {
      for (std::size_t looked = 0; looked < rows_.size() && seated < wanted.size(); ++looked) {
        const std::uint32_t place = hand_;
        hand_ = (hand_ + 1) % static_cast<std::uint32_t>(rows_.size());
        if (rows_[place].row == kNone || forward - rows_[place].used > least) put(place, wanted[seated++], used);
      }
    }
    return seated;
  }

  void bring(std::uint32_t row) const {
    const std::byte* const from = m_.far_key(plane_, row);
    std::byte* const to = m_.near_key(plane_, entry(row) & ~kNearBit);
    std::memcpy(to, from, m_.layout.row_bytes());
    std::memcpy(to + m_.layout.half_bytes(), from + m_.layout.half_bytes(), m_.layout.row_bytes());
  }

 private:
  void put(std::uint32_t place, std::uint32_t row, Forward used) const noexcept {
    ForwardNearRow& mine = rows_[place];
    if (mine.row != kNone) {
      entry(mine.row) = stamp_of(mine.used);
    } else {
      ++m_.state->near_rows;
    }
    mine = {.row = row, .used = used};
    entry(row) = place | kNearBit;
  }

  const ForwardMemory& m_;
  std::uint32_t plane_;
  std::uint32_t* near_of_;
  std::span<ForwardNearRow> rows_;
  std::uint32_t& hand_;
};

/// Far rows of one plane that are wanted near: of sinks and recent tokens, and others.
struct Wanted {
  std::vector<std::uint32_t> always;
  std::vector<std::uint32_t> again;
};

void want_windows(const ForwardMemory& m, const ForwardRow& row, const Plane& plane, Forward forward, Wanted& wanted) {
  const std::uint32_t* const list = m.lists + std::uint64_t{row.list} * m.max_pages;
  const std::uint32_t recent = std::max(row.sink_end, row.recent_begin);
  for (std::uint32_t i = 0; i < row.sink_end + row.tokens - recent; ++i) {
    if (wanted.always.size() == m.promotions) return;
    const std::uint32_t token = i < row.sink_end ? i : recent + i - row.sink_end;
    const std::uint32_t at = list[token / m.layout.page_tokens] * m.layout.page_tokens + token % m.layout.page_tokens;
    std::uint32_t& entry = plane.entry(at);
    if ((entry & kNearBit) != 0 || entry == stamp_of(forward)) continue;
    entry = stamp_of(forward);
    wanted.always.push_back(at);
  }
}

void want_again(const ForwardMemory& m, std::uint32_t index, const Plane& plane, Forward forward, Wanted& wanted) {
  const std::uint32_t* const rows = m.far_rows + std::uint64_t{index} * m.list_room();
  for (std::uint32_t i = 0; i < m.far_listed[index]; ++i) {
    std::uint32_t& entry = plane.entry(rows[i]);
    const bool again = entry != 0 && entry != stamp_of(forward) && since(forward, entry) <= kNearAgain;
    entry = stamp_of(forward);
    if (again && wanted.again.size() < m.promotions) wanted.again.push_back(rows[i]);
  }
}

}  // namespace

void change_blocks(const ForwardMemory& m) {
  if (m.near_pages == 0) return;
  const std::span changes(m.slip_changes, m.slip->block_changes);
  const auto forward = static_cast<Forward>(m.slip->forward);
  const std::uint32_t page_tokens = m.layout.page_tokens;
  std::vector<std::uint32_t> rows(page_tokens);
  for (std::uint32_t p = 0; p < m.planes(); ++p) {
    const Plane plane(m, p);
    for (const ForwardBlockChange& change : changes) {
      for (std::uint32_t i = 0; i < page_tokens; ++i) plane.give_up(change.block * page_tokens + i);
    }
    for (std::size_t c = changes.size(); c-- > 0;) {
      const std::uint32_t age = changes[c].age;
      if (age == kNone) continue;
      for (std::uint32_t i = 0; i < page_tokens; ++i) rows[i] = changes[c].block * page_tokens + i;
      // Of a prompt none that came in the same forward gives way.
      (void)(age == 0 ? plane.seat(rows, forward, forward, {kNearPatience, kNearAgain})
                      : plane.seat(rows, forward, forward - age, {kNearPatience}));
    }
  }
}

void promote(const ForwardMemory& m, std::uint32_t layer) {
  if (!runs(m)) return;
  const auto forward = static_cast<Forward>(m.state->forward);
  for (std::uint32_t head = 0; head < m.shape.kv_heads; ++head) {
    const Plane plane(m, m.plane(layer, head));
    Wanted wanted;
    for (std::uint32_t r = 0; r < m.bucket.decode_rows; ++r) {
      const std::uint32_t index = r * m.shape.kv_heads + head;
      const ForwardRow row = m.rows[r].in(layer);
      // Where everything is attended, nothing is wanted more than anything else.
      if (row.list == kNone || row.whole() || m.far_listed[index] == 0) continue;
      want_windows(m, row, plane, forward, wanted);
      want_again(m, index, plane, forward, wanted);
    }
    const std::uint32_t seated = plane.seat(wanted.always, forward, forward, {kNearPatience, kNearAgain, 0});
    const std::size_t left = std::min<std::size_t>(wanted.again.size(), m.promotions - seated);
    const std::uint32_t others =
        plane.seat(std::span(wanted.again).first(left), forward, forward, {kNearPatience, kNearAgain});
    for (std::uint32_t i = 0; i < seated; ++i) plane.bring(wanted.always[i]);
    for (std::uint32_t i = 0; i < others; ++i) plane.bring(wanted.again[i]);
    m.state->promoted += seated + others;
  }
}

}  // namespace sluice::cpu
