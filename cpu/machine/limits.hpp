#pragma once

#include <cstdint>
#include <string>

namespace sluice::cpu {

/// What the kernel and the control groups leave to this process, read anew at every call. `root` is "/",
/// or a directory with a `proc` and a `sys/fs/cgroup` of its own for tests. Control groups v1 and v2.
/// Unreadable files count as "no limit". Never throws except std::bad_alloc.

inline constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};

/// Bytes that can still be touched before the kernel reclaims in anger or kills: the smaller of MemAvailable
/// and what each control group above this process has left, its inactive file cache counted as free.
[[nodiscard]] std::uint64_t available_memory_bytes(const std::string& root = "/");

/// CPUs worth of time that the control groups grant, rounded up; kNoLimit without a quota.
[[nodiscard]] std::uint64_t cpu_quota(const std::string& root = "/");

}  // namespace sluice::cpu
