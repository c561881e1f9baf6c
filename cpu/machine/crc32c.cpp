#include "cpu/machine/crc32c.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace sluice::cpu {
namespace {

constexpr std::uint32_t kBegin = 0xffff'ffffu;

constexpr std::array<std::uint32_t, 256> make_table() {
  constexpr std::uint32_t kReversedPolynomial = 0x82f6'3b78u;
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ ((rest & 1) != 0 ? kReversedPolynomial : 0);
    table[byte] = rest;
  }
  return table;
}
constexpr std::array<std::uint32_t, 256> kTable = make_table();

std::array<std::uint32_t, 4> quarters_by_table(std::span<const std::byte> bytes) noexcept {
  std::array<std::uint32_t, 4> crcs{};
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint64_t begin = quarter_begin(bytes.size(), i);
    crcs[i] = crc32c_by_table(bytes.subspan(begin, quarter_begin(bytes.size(), i + 1) - begin));
  }
  return crcs;
}

#if defined(__x86_64__)
const bool kHasInstruction = __builtin_cpu_supports("sse4.2") != 0;

__attribute__((target("sse4.2"))) std::uint64_t step(std::uint64_t crc, const std::byte* eight_bytes) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, eight_bytes, sizeof word);
  return _mm_crc32_u64(crc, word);
}

/// Goes on with `crc`, which is not complemented.
__attribute__((target("sse4.2"))) std::uint32_t extend(std::uint64_t crc, std::span<const std::byte> bytes) noexcept {
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) crc = step(crc, bytes.data() + at);
  auto narrow = static_cast<std::uint32_t>(crc);
  for (; at < bytes.size(); ++at) narrow = _mm_crc32_u8(narrow, std::to_integer<unsigned char>(bytes[at]));
  return narrow;
}

__attribute__((target("sse4.2"))) std::array<std::uint32_t, 4> quarters_by_instruction(
    std::span<const std::byte> bytes) noexcept {
  const std::uint64_t quarter = quarter_begin(bytes.size(), 1);
  const std::byte* const from = bytes.data();
  std::uint64_t a = kBegin, b = kBegin, c = kBegin, d = kBegin;
  for (std::uint64_t at = 0; at < quarter; at += 8) {
    a = step(a, from + at);
    b = step(b, from + quarter + at);
    c = step(c, from + 2 * quarter + at);
    d = step(d, from + 3 * quarter + at);
  }
  d = extend(d, bytes.subspan(4 * quarter));
  return {~static_cast<std::uint32_t>(a), ~static_cast<std::uint32_t>(b), ~static_cast<std::uint32_t>(c),
          ~static_cast<std::uint32_t>(d)};
}
#endif

}  // namespace

std::uint32_t crc32c_by_table(std::span<const std::byte> bytes) noexcept {
  std::uint32_t crc = kBegin;
  for (const std::byte byte : bytes) crc = crc >> 8 ^ kTable[(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xff];
  return ~crc;
}

std::uint32_t crc32c(std::span<const std::byte> bytes) noexcept {
#if defined(__x86_64__)
  if (kHasInstruction) return ~extend(kBegin, bytes);
#endif
  return crc32c_by_table(bytes);
}

std::array<std::uint32_t, 4> crc32c_of_quarters(std::span<const std::byte> bytes) noexcept {
#if defined(__x86_64__)
  if (kHasInstruction) return quarters_by_instruction(bytes);
#endif
  return quarters_by_table(bytes);
}

}  // namespace sluice::cpu
