#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"

namespace sluice::scheduler {

/// A set of token positions that is cheap to unite and to walk in order: one bit per position, and above it
/// one summary bit per 64-bit word that is not zero. Emptying and walking cost O(words that hold members)
/// plus one summary word per 4,096 positions.
class TokenSet {
 public:
  /// Empties the set and makes room for positions [0, tokens).
  void reset(std::uint32_t tokens) {
    for_each_word([this](std::size_t word) { words_[word] = 0; });
    const std::size_t words = (std::size_t{tokens} + 63) / 64;
    // It grows by a word now and then; doubling would waste half of it.
    if (words > words_.capacity() && !words_.empty()) words_.reserve(words + words / kSlackShare);
    words_.resize(words);
    summary_.assign((words_.size() + 63) / 64, 0);
  }

  void add(std::uint32_t token) noexcept { add_word(token / 64, std::uint64_t{1} << (token % 64)); }

  /// Adds token + i for every set bit i of `bits`; all of them must be below the set's room.
  void add_bits(std::uint32_t token, std::uint32_t bits) noexcept {
    const std::uint64_t wide = bits;
    const std::uint32_t shift = token % 64;
    add_word(token / 64, wide << shift);
    if (shift > 32 && (wide >> (64 - shift)) != 0) add_word(token / 64 + 1, wide >> (64 - shift));
  }

  /// Adds [begin, end).
  void add_range(std::uint32_t begin, std::uint32_t end) noexcept {
    while (begin < end) {
      const std::uint32_t shift = begin % 64;
      const std::uint32_t count = end - begin < 64 - shift ? end - begin : 64 - shift;
      add_word(begin / 64, (~std::uint64_t{0} >> (64 - count)) << shift);
      begin += count;
    }
  }

  /// Adds every member of `other`, whose room must not exceed this set's.
  void unite(const TokenSet& other) noexcept {
    other.for_each_word([&](std::size_t word) { add_word(word, other.words_[word]); });
  }

  /// Adds every member of `other` moved up by `by` positions, as far as this set has room.
  void unite_shifted(const TokenSet& other, std::uint32_t by) noexcept {
    const std::size_t words = by / 64;
    const std::uint32_t bits = by % 64;
    other.for_each_word([&](std::size_t word) {
      const std::uint64_t from = other.words_[word];
      if (word + words < words_.size()) add_word(word + words, from << bits);
      if (bits != 0 && word + words + 1 < words_.size()) add_word(word + words + 1, from >> (64 - bits));
    });
  }

  [[nodiscard]] bool contains(std::uint32_t token) const noexcept {
    return token / 64 < words_.size() && ((words_[token / 64] >> (token % 64)) & 1) != 0;
  }

  [[nodiscard]] std::uint32_t size() const noexcept {
    std::uint32_t count = 0;
    for_each_word([&](std::size_t word) { count += static_cast<std::uint32_t>(std::popcount(words_[word])); });
    return count;
  }

  /// The 64 positions from 64 * index on; bit i is position 64 * index + i.
  [[nodiscard]] std::uint64_t word(std::size_t index) const noexcept { return words_[index]; }

  /// Every position's bit, to at least as many words as the set has room for; those behind them stay.
  void copy_to(std::span<std::uint64_t> words) const noexcept {
    for (std::size_t i = 0; i < words_.size(); ++i) words[i] = words_[i];
  }

  /// Calls visit(index) for every non-zero word, ascending.
  template <class Visit>
  void for_each_word(Visit&& visit) const {
    for (std::size_t s = 0; s < summary_.size(); ++s) {
      for (std::uint64_t live = summary_[s]; live != 0; live &= live - 1) {
        visit(s * 64 + static_cast<std::size_t>(std::countr_zero(live)));
      }
    }
  }

  /// Calls visit(index) for every word that is not zero in some of `sets`, ascending. All have the same room.
  template <class Visit>
  static void for_each_word_of_any(std::span<const TokenSet* const> sets, Visit&& visit) {
    for (std::size_t s = 0; s < sets.front()->summary_.size(); ++s) {
      std::uint64_t live = 0;
      for (const TokenSet* set : sets) live |= set->summary_[s];
      for (; live != 0; live &= live - 1) visit(s * 64 + static_cast<std::size_t>(std::countr_zero(live)));
    }
  }

  /// Calls visit(token) for every member, ascending.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for_each_word([&](std::size_t word) {
      for (std::uint64_t bits = words_[word]; bits != 0; bits &= bits - 1) {
        visit(static_cast<std::uint32_t>(word * 64 + static_cast<std::size_t>(std::countr_zero(bits))));
      }
    });
  }

  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(words_, summary_); }
  /// What a set with room for `tokens` tokens holds at most, however it grew.
  [[nodiscard]] static std::uint64_t most_heap_bytes(std::uint32_t tokens) noexcept {
    const std::uint64_t words = (std::uint64_t{tokens} + 63) / 64;
    return (words + words / kSlackShare + 2 * (words / 64 + 1)) * sizeof(std::uint64_t);
  }

 private:
  static constexpr std::size_t kSlackShare = 16;

  void add_word(std::size_t word, std::uint64_t bits) noexcept {
    words_[word] |= bits;
    // A zero word marked live would only be visited in vain; a caller's empty `bits` is that rare.
    summary_[word / 64] |= std::uint64_t{1} << (word % 64);
  }

  std::vector<std::uint64_t> words_;
  std::vector<std::uint64_t> summary_;
};

}  // namespace sluice::scheduler
