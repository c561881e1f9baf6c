#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "sluice/engine_options.hpp"
#include "sluice/step/forward_memory.hpp"

namespace sluice::scheduler {

/// Which layers share blocks. A block is a page of all layers of a *stack*, and a sequence has a list of blocks for
/// each: layers that see all tokens are the first stack, and those with windows are in stacks of as many layers behind
/// it, so that the blocks of all come from one pool. If all layers have windows, or none has, there is one stack. Of
/// stacks with windows a sequence keeps its newest tokens alone.
class LayerStacks {
 public:
  /// The options are valid.
  explicit LayerStacks(const EngineOptions& options)
      : layers_(options.shape.layers),
        page_tokens_(options.page_tokens),
        slack_(options.window_slack),
        coming_(std::max<std::uint64_t>(
            std::uint64_t{options.in_flight} * std::max(options.largest.prefill_rows, options.largest.decode_rows),
            options.import_rows)) {
    const std::span<const std::uint32_t> windows = options.windows;
    const std::uint32_t layers = options.shape.layers;
    const auto whole = static_cast<std::uint32_t>(windows.empty() ? layers : std::ranges::count(windows, 0u));
    if (whole == layers) return;
    if (whole != 0) {
      layers_ = whole;
      count_ += static_cast<std::uint32_t>(div_up(layers - whole, whole));
      first_windowed_ = 1;
    } else {
      first_windowed_ = 0;
    }
    std::uint32_t next[2] = {};  // Of layers that see all, and of the others.
    for (const std::uint32_t window : windows) {
      const std::uint32_t at = next[window == 0 ? 0 : 1]++;
      const std::uint32_t behind = window == 0 ? 0 : first_windowed_ + at / layers_;
      places_.push_back({.stack = behind, .at = at % layers_});
      widest_ = std::max(widest_, window);
    }
  }

  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }
  /// Of a stack; the last one may have fewer.
  [[nodiscard]] std::uint32_t layers() const noexcept { return layers_; }
  /// [layers of the model]; null: all layers are one stack, in their order.
  [[nodiscard]] const ForwardLayerPlace* places() const noexcept { return places_.empty() ? nullptr : places_.data(); }
  [[nodiscard]] bool windowed(std::uint32_t stack) const noexcept { return stack >= first_windowed_; }
  [[nodiscard]] bool windowed() const noexcept { return first_windowed_ != kNone; }
  [[nodiscard]] std::uint32_t windowed_stacks() const noexcept { return windowed() ? count_ - first_windowed_ : 0; }

  /// First token that the next one sees in some layer with a window, if there are `tokens`.
  [[nodiscard]] std::uint32_t seen_from(std::uint32_t tokens) const noexcept {
    return tokens + 1 > widest_ ? tokens + 1 - widest_ : 0;
  }
  /// Pages that stacks with windows do without once a sequence has as many tokens for good; it can be shortened by
  /// EngineOptions::window_slack.
  [[nodiscard]] std::uint32_t passed_pages(std::uint32_t tokens) const noexcept {
    const std::uint32_t least = tokens > slack_ ? tokens - slack_ : 0;
    return seen_from(least) / page_tokens_;
  }
  /// Pages that a sequence keeps of a stack with windows, at most, those of forwards in flight among them.
  [[nodiscard]] std::uint64_t most_kept() const noexcept {
    return div_up(std::uint64_t{widest_} + slack_ + coming_, page_tokens_) + 1;
  }
  /// And at least while no forward is in flight, once it has as many: what its next token sees, wherever pages end.
  [[nodiscard]] std::uint64_t least_kept() const noexcept {
    return div_up(widest_ - std::min(widest_, 1u), page_tokens_);
  }
  /// Blocks of all stacks, of a sequence with so many pages, at most.
  [[nodiscard]] std::uint64_t blocks(std::uint64_t pages) const noexcept {
    const std::uint64_t whole = count_ - windowed_stacks();
    return whole * pages + windowed_stacks() * std::min(pages, most_kept());
  }
  /// Pages of the longest sequence that `blocks` hold; ~0: of any.
  [[nodiscard]] std::uint64_t pages_in(std::uint64_t blocks) const noexcept {
    if (!windowed()) return blocks;
    const std::uint64_t even = blocks / count_;
    if (even < most_kept()) return even;
    return first_windowed_ == 0 ? ~std::uint64_t{0} : blocks - windowed_stacks() * most_kept();
  }

 private:
  std::uint32_t layers_;
  std::uint32_t page_tokens_;
  std::uint32_t slack_;
  std::uint64_t coming_;  ///< tokens that forwards may bring to a sequence before it has them for good
  std::uint32_t count_ = 1;
  std::uint32_t first_windowed_ = kNone;
  std::uint32_t widest_ = 0;
  std::vector<ForwardLayerPlace> places_;
};

}  // namespace sluice::scheduler
