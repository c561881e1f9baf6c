#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "cpu/stages/rows.hpp"
#include "cpu/threads/lent.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"
#include "sluice/step/select_tasks.hpp"

namespace sluice::cpu {

/// What the verbs of cpu::Backend have in common.

[[nodiscard]] constexpr std::uint32_t most_head_dim(bool latent) noexcept {
  return latent ? kMostLatentDim : kMostHeadDim;
}
[[nodiscard]] constexpr bool supports(const AttentionShape& shape) noexcept {
  return shape.kv_heads != 0 && shape.q_heads % shape.kv_heads == 0 && shape.group() != 0 && shape.group() <= kMaxGroup &&
         shape.head_dim != 0 && shape.head_dim <= most_head_dim(shape.latent()) && shape.head_dim % kHeadDimUnit == 0 &&
         shape.value_dim <= shape.head_dim && shape.value_dim % kHeadDimUnit == 0;
}
[[nodiscard]] constexpr bool supports(const PageLayout& layout) noexcept {
  return layout.page_tokens != 0 && layout.head_dim != 0 && layout.head_dim <= most_head_dim(layout.latent) &&
         layout.head_dim % kHeadDimUnit == 0 && !(layout.latent && layout.scaled());
}

/// See Backend::unsupported_reasons.
[[nodiscard]] std::vector<std::string> unsupported_reasons(const AttentionShape& shape, const PageLayout& layout);

/// @throws Error{Errc::unsupported} naming the verb and the reasons.
[[noreturn]] void refuse(const char* verb, const AttentionShape& shape);
[[noreturn]] void refuse(const char* verb, const PageLayout& layout);
[[noreturn]] void refuse(const char* verb, const AttentionShape& shape, const PageLayout& layout);
[[noreturn]] void refuse(const char* verb, DType type);

inline void check(const char* verb, const AttentionShape& shape) {
  if (!supports(shape)) refuse(verb, shape);
}
inline void check(const char* verb, const PageLayout& layout) {
  if (!supports(layout)) refuse(verb, layout);
}
inline void check(const char* verb, const AttentionShape& shape, const PageLayout& layout) {
  if (!supports(shape) || !supports(layout) || layout.head_dim != shape.head_dim ||
      layout.latent != shape.latent())
    refuse(verb, shape, layout);
}

/// What verbs read and write but pages has no scales.
inline void check_tensor_type(const char* verb, DType type) {
  if (!is_tensor_type(type)) refuse(verb, type);
}

/// Below this a thread is done (40 us at 12 GB/s) before others have woken up (5 to 10 us) and helped; small
/// verbs are also called from inside workers, where every thread has work already.
inline constexpr std::uint64_t kWorthSharing = 512 * KiB;

/// body(i) for 0 <= i < count; on all workers if the memory that it touches makes that worthwhile. They copy the body:
/// what it refers to is Lent, or memory that the verb's tasks point to.
template <class Body>
void for_each_unit(const Workers& workers, std::size_t count, std::uint64_t bytes, const Body& body) {
  if (bytes >= kWorthSharing) {
    workers.parallel_for(static_cast<std::uint32_t>(count), body);
  } else {
    for (std::size_t i = 0; i < count; ++i) body(static_cast<std::uint32_t>(i));
  }
}

/// body(task) for each of a verb's tasks, likewise. Shared tasks are copied: the array is the caller's.
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

/// Marks what `task` keeps in its mask; returns how many.
std::uint32_t select_top_p(const Kernels& kernels, const TopPTask& task);

}  // namespace sluice::cpu
