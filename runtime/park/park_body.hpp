#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sluice::runtime {

/// Where the bytes of a parked sequence's body lie in memory while it lives: parts, one behind the other, of rows.
/// Thread safety: `gather` and `scatter` of ranges that do not overlap, by any threads.
class ParkBody {
 public:
  /// Rows [first, first + rows), of which `turn` lie together: row r in frame frames[r / turn], at r % turn.
  struct Part {
    std::uint64_t row_bytes = 1;
    std::uint64_t rows = 0;
    std::byte* base = nullptr;  ///< null: nowhere; what is read of it is dropped
    std::uint64_t first = 0;
    std::uint64_t turn = ~std::uint64_t{0};
    const std::uint32_t* frames = nullptr;  ///< null: all turns lie in the same place
    std::uint64_t frame_bytes = 0;
  };

  void add(const Part& part);
  [[nodiscard]] std::uint64_t bytes() const noexcept { return ends_.empty() ? 0 : ends_.back(); }
  /// Bytes [begin, begin + out) of the body, all of whose parts lie somewhere.
  void gather(std::uint64_t begin, std::span<std::byte> out) const noexcept;
  void scatter(std::uint64_t begin, std::span<const std::byte> in) const noexcept;

 private:
  /// Calls visit(where they lie, how many) for bytes [begin, begin + count), in their order.
  template <class Visit>
  void for_each(std::uint64_t begin, std::uint64_t count, const Visit& visit) const noexcept;

  std::vector<Part> parts_;
  std::vector<std::uint64_t> ends_;  ///< [parts] in the body
};

}  // namespace sluice::runtime
