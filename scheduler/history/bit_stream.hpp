#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace sluice::scheduler {

/// Writes numbers of few bits to words that have room for them, lowest bits first. `flush` comes last.
class BitWriter {
 public:
  explicit BitWriter(std::uint64_t* to) noexcept : to_(to) {}
  /// `value` < 2^count, `count` < 64.
  void put(std::uint64_t value, std::uint32_t count) noexcept {
    pending_ |= value << held_;
    held_ += count;
    if (held_ < 64) return;
    *to_++ = pending_;
    held_ -= 64;
    pending_ = value >> (count - held_);
  }
  /// Rice's code: `low` < 32 bits as they are behind the others in unary.
  void put_rice(std::uint32_t value, std::uint32_t low) noexcept {
    std::uint32_t zeros = value >> low;
    for (; zeros >= 32; zeros -= 32) put(0, 32);
    const std::uint64_t lowest = value & ((std::uint64_t{1} << low) - 1);
    put((lowest << 1 | 1) << zeros, zeros + 1 + low);
  }
  /// @return the word behind those that were written to
  std::uint64_t* flush() noexcept {
    if (held_ != 0) *to_++ = pending_;
    pending_ = held_ = 0;
    return to_;
  }

 private:
  std::uint64_t* to_;
  std::uint64_t pending_ = 0;
  std::uint32_t held_ = 0;
};

/// Reads what a BitWriter wrote.
class BitReader {
 public:
  explicit BitReader(std::span<const std::uint64_t> words) noexcept : words_(words) {}
  [[nodiscard]] std::uint64_t get(std::uint32_t count) noexcept {
    const std::uint64_t bits = ahead() & ((std::uint64_t{1} << count) - 1);
    at_ += count;
    return bits;
  }
  [[nodiscard]] std::uint32_t get_rice(std::uint32_t low) noexcept {
    std::uint32_t zeros = 0;
    std::uint64_t bits = ahead();
    for (; bits == 0 && at_ / 64 < words_.size(); bits = ahead()) {
      zeros += 64;
      at_ += 64;
    }
    const auto more = static_cast<std::uint32_t>(std::countr_zero(bits));
    at_ += more + 1;
    return ((zeros + more) << low) | static_cast<std::uint32_t>(get(low));
  }
  /// What begins with the next word that nothing was read of.
  [[nodiscard]] BitReader next_word() const noexcept { return BitReader(words_.subspan((at_ + 63) / 64)); }

 private:
  /// The next 64 bits, 0 behind the last one.
  [[nodiscard]] std::uint64_t ahead() const noexcept {
    const std::size_t word = at_ / 64;
    const std::uint32_t shift = at_ % 64;
    const auto at = [&](std::size_t i) { return i < words_.size() ? words_[i] : 0; };
    return shift == 0 ? at(word) : at(word) >> shift | at(word + 1) << (64 - shift);
  }

  std::span<const std::uint64_t> words_;
  std::size_t at_ = 0;
};

}  // namespace sluice::scheduler
