#include "runtime/park/park_body.hpp"

#include <algorithm>
#include <cstring>

#include "sluice/units.hpp"

namespace sluice::runtime {

void ParkBody::add(const Part& part) {
  if (part.rows == 0) return;
  parts_.push_back(part);
  ends_.push_back(bytes() + part.rows * part.row_bytes);
}

template <class Visit>
void ParkBody::for_each(std::uint64_t begin, std::uint64_t count, const Visit& visit) const noexcept {
  auto at = static_cast<std::size_t>(std::ranges::upper_bound(ends_, begin) - ends_.begin());
  for (; count != 0; ++at) {
    const Part& part = parts_[at];
    const std::uint64_t part_begin = ends_[at] - part.rows * part.row_bytes;
    for (const std::uint64_t end = std::min(begin + count, ends_[at]); begin < end;) {
      const std::uint64_t in_part = begin - part_begin;
      const std::uint64_t row = part.first + in_part / part.row_bytes;
      const std::uint64_t in_row = in_part % part.row_bytes;
      // No more than lies together, counted so that a turn without end does not overflow.
      const std::uint64_t rows = std::min(part.turn - row % part.turn, div_up(end - begin + in_row, part.row_bytes));
      const std::uint64_t some = std::min(rows * part.row_bytes - in_row, end - begin);
      std::byte* where = nullptr;
      if (part.base != nullptr) {
        const std::uint64_t frame = part.frames == nullptr ? 0 : part.frames[row / part.turn];
        where = part.base + frame * part.frame_bytes + row % part.turn * part.row_bytes + in_row;
      }
      visit(where, some);
      begin += some;
      count -= some;
    }
  }
}

void ParkBody::gather(std::uint64_t begin, std::span<std::byte> out) const noexcept {
  for_each(begin, out.size(), [&](const std::byte* where, std::uint64_t some) {
    std::memcpy(out.data(), where, some);
    out = out.subspan(some);
  });
}

void ParkBody::scatter(std::uint64_t begin, std::span<const std::byte> in) const noexcept {
  for_each(begin, in.size(), [&](std::byte* where, std::uint64_t some) {
    if (where != nullptr) std::memcpy(where, in.data(), some);
    in = in.subspan(some);
  });
}

}  // namespace sluice::runtime
