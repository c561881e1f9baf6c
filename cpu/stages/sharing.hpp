#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/threads/lent.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/units.hpp"

/// How a stage's work goes over the workers.
namespace sluice::cpu {

/// Below this a thread is done (40 us at 12 GB/s) before others have woken up (5 to 10 us) and helped; small
/// stages are also called from inside workers, where every thread has work already.
inline constexpr std::uint64_t kWorthSharing = 512 * KiB;

/// body(i) for 0 <= i < count; on all workers if the memory that it touches makes that worthwhile. They copy the body:
/// what it refers to is Lent, or memory that the stage's tasks point to.
template <class Body>
void for_each_unit(const Workers& workers, std::size_t count, std::uint64_t bytes, const Body& body) {
  if (bytes >= kWorthSharing) {
    workers.parallel_for(static_cast<std::uint32_t>(count), body);
  } else {
    for (std::size_t i = 0; i < count; ++i) body(static_cast<std::uint32_t>(i));
  }
}

/// body(task) for each of a stage's tasks, likewise. Shared tasks are copied: the array is the caller's.
template <class Task, class Body>
void for_each_task(const Workers& workers, std::span<const Task> tasks, std::uint64_t bytes, const Body& body) {
  if (tasks.size() <= 1 || bytes < kWorthSharing) {
    for (const Task& task : tasks) body(task);
    return;
  }
  const Lent<std::vector<Task>> lent(workers, tasks.begin(), tasks.end());
  workers.parallel_for(static_cast<std::uint32_t>(tasks.size()),
                       [first = lent->data(), body](std::uint32_t i) { body(first[i]); });
}

/// Memory that a thread keeps between calls; kernels like whole cache lines.
class Scratch {
 public:
  [[nodiscard]] float* floats(std::uint64_t count) {
    const std::uint64_t lines = div_up(count, kFloats);
    if (lines_.size() < lines) lines_.resize(lines);
    return lines_.empty() ? nullptr : lines_.front().floats;
  }

 private:
  static constexpr std::uint32_t kFloats = 16;
  struct alignas(64) Line {
    float floats[kFloats];
  };
  std::vector<Line> lines_;
};

}  // namespace sluice::cpu
