#pragma once

#include <cstdint>

namespace sluice::scheduler {

/// Lists of a forward, decode rows times KV heads, from which on it pays to share them with the link.
inline constexpr std::uint32_t kFetchLists = 128;

/// EngineOptions::fetch_share with which the link and the threads are done with a list at about the same time. A link
/// of `link_gbps` for whole pages (1 GB = 1e9 bytes), and so many threads that attend. 0 where there are none, or no
/// link; below 1.
[[nodiscard]] float fetch_share_of_device(double link_gbps, std::uint32_t threads) noexcept;

}  // namespace sluice::scheduler
