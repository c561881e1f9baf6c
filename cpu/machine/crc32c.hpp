#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace sluice::cpu {

/// CRC-32C (Castagnoli, RFC 3720 appendix B.4) of some bytes: any damage that spans 32 bits or less shows. By the
/// processor's instruction if it has one.
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes) noexcept;

/// Where quarter `i` of some bytes begins; quarter 4 is their end. All are as long, but for the last, which has the
/// rest.
[[nodiscard]] constexpr std::uint64_t quarter_begin(std::uint64_t bytes, std::uint32_t i) noexcept {
  return i == 4 ? bytes : bytes / 32 * 8 * i;
}

/// Of each quarter, computed side by side: the instruction gives its result three cycles later and can begin in each.
[[nodiscard]] std::array<std::uint32_t, 4> crc32c_of_quarters(std::span<const std::byte> bytes) noexcept;

/// The same without the instruction, for processors that have none.
[[nodiscard]] std::uint32_t crc32c_by_table(std::span<const std::byte> bytes) noexcept;

}  // namespace sluice::cpu
