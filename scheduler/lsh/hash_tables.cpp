#include "scheduler/lsh/hash_tables.hpp"

#include <algorithm>

namespace sluice::scheduler {

void HashTables::build(std::span<const std::uint16_t> codes, std::uint32_t count, std::uint32_t bits) {
  const std::size_t starts = (std::size_t{1} << bits) + 1;
  count_ = count;
  bits_ = bits;
  tables_ = count == 0 ? 0 : static_cast<std::uint32_t>(codes.size() / count);
  starts_.assign(tables_ * starts, 0);
  items_.resize(std::size_t{tables_} * count);
  for (std::size_t table = 0; table < tables_; ++table) {
    const std::uint16_t* const code = codes.data() + table * count;
    std::uint32_t* const start = starts_.data() + table * starts;
    std::uint32_t* const items = items_.data() + table * count;
    // A counting sort. While items are placed, start[c] is where code c goes on; then it is where code c + 1 begins.
    for (std::uint32_t i = 0; i < count; ++i) ++start[code[i] + 1];
    for (std::size_t c = 1; c < starts; ++c) start[c] += start[c - 1];
    for (std::uint32_t i = 0; i < count; ++i) items[start[code[i]]++] = i;
    std::copy_backward(start, start + starts - 1, start + starts);
    start[0] = 0;
  }
}

const std::vector<std::uint64_t>& HashTables::collide(const std::uint16_t* codes, std::uint64_t stride,
                                                      std::uint32_t least) const {
  thread_local std::vector<std::uint64_t> once;   // in some table
  thread_local std::vector<std::uint64_t> twice;  // in two of them or more
  const std::size_t starts = (std::size_t{1} << bits_) + 1;
  once.assign((std::size_t{count_} + 63) / 64, 0);
  twice.assign(once.size(), 0);
  for (std::size_t table = 0; table < tables_; ++table) {
    const std::uint32_t* const start = starts_.data() + table * starts + codes[table * stride];
    const std::uint32_t* const items = items_.data() + table * count_;
    for (std::uint32_t i = start[0]; i < start[1]; ++i) {
      const std::uint64_t bit = std::uint64_t{1} << (items[i] % 64);
      std::uint64_t& met = once[items[i] / 64];
      twice[items[i] / 64] |= met & bit;
      met |= bit;
    }
  }
  return least == 1 ? once : twice;
}

}  // namespace sluice::scheduler
