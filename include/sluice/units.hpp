#pragma once

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "sluice/run_clock.hpp"

namespace sluice {

inline constexpr std::uint64_t KiB = 1024;
inline constexpr std::uint64_t MiB = 1024 * KiB;
inline constexpr std::uint64_t GiB = 1024 * MiB;

/// A number that cannot be mistaken for another kind of number. `Tag` is never defined.
template <class Tag, class Rep = std::uint32_t>
struct Id {
  Rep value{};
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using LayerId = Id<struct LayerTag>;
/// Handle of a sequence; never reused within one Engine, so a stale handle is detected.
using SequenceId = Id<struct SequenceTag, std::uint64_t>;

/// A frame of the host pool together with the generation that it was allocated in. The generation is
/// raised when the frame is freed, so a reference that outlived its page is recognised.
struct PageRef {
  std::uint32_t frame = 0;
  std::uint32_t generation = 0;
  friend constexpr auto operator<=>(const PageRef&, const PageRef&) = default;
};

/// "No frame", "no slot": a page that is not there.
inline constexpr std::uint32_t kNone = 0xffff'ffffu;

/// Of traces, statistics and measurements. Deadlines are RunClock's.
using Clock = std::chrono::steady_clock;

[[nodiscard]] constexpr std::uint64_t div_up(std::uint64_t a, std::uint64_t b) noexcept { return (a + b - 1) / b; }

}  // namespace sluice

template <class Tag, class Rep>
struct std::hash<sluice::Id<Tag, Rep>> {
  std::size_t operator()(const sluice::Id<Tag, Rep>& id) const noexcept { return std::hash<Rep>{}(id.value); }
};
