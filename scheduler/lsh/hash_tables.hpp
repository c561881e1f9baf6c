#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"

namespace sluice::scheduler {

/// Hash tables over items [0, count): for every table and code, the items that have it. A query looks at one list per
/// table, tables * count / 2^bits items, where comparing codes would look at all of them.
class HashTables {
 public:
  /// `codes` [tables, count], each below 2^bits.
  void build(std::span<const std::uint16_t> codes, std::uint32_t count, std::uint32_t bits);

  /// Calls visit(item), ascending, for the items whose code is the query's in `least` tables or more; least is 1 or 2.
  /// `codes` [tables] with `stride` between them.
  template <class Visit>
  void for_each_collision(const std::uint16_t* codes, std::uint64_t stride, std::uint32_t least, Visit&& visit) const {
    const std::vector<std::uint64_t>& found = collide(codes, stride, least);
    for (std::size_t word = 0; word < found.size(); ++word) {
      for (std::uint64_t bits = found[word]; bits != 0; bits &= bits - 1) {
        visit(static_cast<std::uint32_t>(word * 64) + static_cast<std::uint32_t>(std::countr_zero(bits)));
      }
    }
  }

  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(starts_, items_); }
  /// What `tables` tables over `count` items hold at most.
  [[nodiscard]] static std::uint64_t most_heap_bytes(std::uint32_t tables, std::uint32_t bits,
                                                     std::uint32_t count) noexcept {
    return tables * ((std::uint64_t{1} << bits) + 1 + count) * sizeof(std::uint32_t);
  }

 private:
  /// One bit per item, so that they stay in the L1 cache; in memory of the thread.
  [[nodiscard]] const std::vector<std::uint64_t>& collide(const std::uint16_t* codes, std::uint64_t stride,
                                                          std::uint32_t least) const;

  std::uint32_t count_ = 0;
  std::uint32_t tables_ = 0;
  std::uint32_t bits_ = 0;
  std::vector<std::uint32_t> starts_;  ///< [tables, 2^bits + 1] into the table's items
  std::vector<std::uint32_t> items_;   ///< [tables, count] by code, then by index
};

}  // namespace sluice::scheduler
