#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "sluice/step/forward_memory.hpp"
#include "sluice/units.hpp"

namespace sluice::cpu {

/// A bit for each of a row's tokens.
class Marks {
 public:
  explicit Marks(std::uint32_t tokens) : words_(div_up(tokens, 64)) {}
  void set(std::uint32_t token) noexcept { words_[token / 64] |= std::uint64_t{1} << token % 64; }
  void set(std::uint32_t begin, std::uint32_t end) noexcept {
    for (; begin < end; ++begin) set(begin);
  }
  [[nodiscard]] bool contains(std::uint32_t token) const noexcept {
    return (words_[token / 64] >> token % 64 & 1) != 0;
  }
  template <class Body>
  void for_each(const Body& body) const {
    for (std::uint32_t i = 0; i < words_.size(); ++i) {
      for (std::uint64_t word = words_[i]; word != 0; word &= word - 1)
        body(i * 64 + static_cast<std::uint32_t>(std::countr_zero(word)));
    }
  }

 private:
  std::vector<std::uint64_t> words_;
};

/// Tokens that some head of the group attends, of the list of a row and KV head whose heads have chosen.
[[nodiscard]] Marks marks_of(const ForwardMemory& memory, const ForwardRow& row, std::uint32_t index);

}  // namespace sluice::cpu
