#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

namespace sluice::test {

/// How a process is stopped and resumed while it works.
struct Stops {
  std::chrono::milliseconds every{0};    ///< mean time between two; 0: never
  std::chrono::milliseconds longest{0};  ///< each lasts a random time up to this
  std::uint64_t seed = 0;
};

/// What a process does, for who sees it die: in memory that both see.
struct Doing {
  std::atomic<std::uint64_t> round{0};
  std::atomic<const char*> kind{""};  ///< of the program itself
  std::atomic<std::uint64_t> stops{0};  ///< so far
};
[[nodiscard]] Doing& shared_doing();

/// Runs `work` in a process of its own and stops and resumes it meanwhile, as a terminal or a container engine does.
/// The process is killed if this one dies.
/// @return the exit code of the process: what `work` returned, or 128 + the signal that ended it
[[nodiscard]] int supervised(const std::function<int()>& work, const Stops& stops);

}  // namespace sluice::test
