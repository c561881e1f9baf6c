#pragma once

#include <cstdint>

/// How far tokens are shared by the CPU and the link, see EngineOptions::fetch_share. 1 GB = 1e9 bytes.
namespace sluice::scheduler {

/// Lists of a forward, decode rows times KV heads, from which on it pays to share them with the link.
inline constexpr std::uint32_t kFetchLists = 128;

/// The share with which the link and the CPU are done with a list at about the same time: of a link that brings whole
/// pages with `link_gbps`, and host memory that the threads read with `cpu_gbps` from one end to the other. Below 1; 0
/// where a rate is not known.
[[nodiscard]] float advised_fetch_share(double link_gbps, double cpu_gbps) noexcept;

/// What so many threads read together, where it was not measured.
[[nodiscard]] double gbps_of_threads(std::uint32_t threads) noexcept;

}  // namespace sluice::scheduler
