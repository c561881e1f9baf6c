#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "scheduler/undo.hpp"

namespace sluice::scheduler {

/// Tokens that were visible in each of the newest steps. A step may be several tokens longer than the one before it, so
/// which step is the newest after tokens were taken back cannot be told from their number.
class RecentSteps {
 public:
  /// 0: there was none.
  [[nodiscard]] std::uint32_t newest() const noexcept { return tokens_[0]; }
  [[nodiscard]] std::uint32_t before() const noexcept { return tokens_[1]; }

  /// A step that is repeated is the same one.
  void add(std::uint32_t tokens) noexcept {
    if (tokens == newest()) return;
    std::shift_right(tokens_.begin(), tokens_.end(), 1);
    tokens_[0] = tokens;
  }
  /// As if no step had had more than as many tokens; exact for kUndoTokens tokens.
  void truncate(std::uint32_t tokens) noexcept {
    const auto stays = std::ranges::find_if(tokens_, [&](std::uint32_t step) { return step <= tokens; });
    std::fill(std::move(stays, tokens_.end(), tokens_.begin()), tokens_.end(), 0u);
  }

 private:
  std::array<std::uint32_t, kUndoTokens + 2> tokens_{};  ///< newest first; 0: there was none
};

}  // namespace sluice::scheduler
