#pragma once

#include <cstdint>

#include "runtime/near_pool.hpp"

namespace sluice::runtime {

/// Pages of device memory that prompts pass through, as indices into the memory that begins with the near slots:
/// two areas for chunks behind the slots, and for prefixes whatever near slots are free when a prompt comes, or two
/// small windows if that is less.
class PromptMemory {
 public:
  struct Area {
    std::uint32_t first = 0;
    std::uint32_t pages = 0;
  };
  /// `chunk_pages` each for two chunks, `window_pages` each for two windows, all from page `first` on.
  PromptMemory(NearPool& pool, std::uint32_t first, std::uint32_t chunk_pages, std::uint32_t window_pages) noexcept
      : pool_(pool), first_(first), chunk_pages_(chunk_pages), window_pages_(window_pages) {}

  [[nodiscard]] static std::uint32_t total(std::uint32_t chunk_pages, std::uint32_t window_pages) noexcept {
    return 2 * (chunk_pages + window_pages);
  }
  [[nodiscard]] Area chunk(std::size_t half) const noexcept {
    return {.first = first_ + static_cast<std::uint32_t>(half) * chunk_pages_, .pages = chunk_pages_};
  }
  /// All that prefixes may use, and halves of it.
  [[nodiscard]] Area whole() const noexcept;
  [[nodiscard]] Area half(std::size_t half) const noexcept;

  /// Takes the longest run of free near slots, until give_back. False if it has been taken already.
  bool borrow();
  void give_back() noexcept;

 private:
  NearPool& pool_;
  std::uint32_t first_;
  std::uint32_t chunk_pages_;
  std::uint32_t window_pages_;
  bool borrowed_ = false;
  SlotRun run_;
};

}  // namespace sluice::runtime
