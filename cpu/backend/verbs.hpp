#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "cpu/threads/lent.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/page.hpp"
#include "sluice/partial.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/select_verbs.hpp"

namespace sluice::cpu {

/// What the verbs of cpu::Backend have in common.

[[nodiscard]] constexpr bool supports(const AttentionShape& shape) noexcept {
  return shape.kv_heads != 0 && shape.q_heads % shape.kv_heads == 0 && shape.group() != 0 && shape.group() <= kMaxGroup &&
         shape.head_dim != 0 && shape.head_dim <= kMaxHeadDim && shape.head_dim % kHeadDimUnit == 0;
}
[[nodiscard]] constexpr bool supports(const PageLayout& layout) noexcept {
  return layout.page_tokens != 0 && layout.head_dim != 0 && layout.head_dim <= kMaxHeadDim &&
         layout.head_dim % kHeadDimUnit == 0;
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
  if (!supports(shape) || !supports(layout) || layout.head_dim != shape.head_dim) refuse(verb, shape, layout);
}

[[nodiscard]] inline const ElementKernels& kernels_for(const Kernels& kernels, DType type) noexcept {
  return kernels.element[static_cast<int>(type)];
}

/// What verbs read and write but pages has no scales.
inline void check_tensor_type(const char* verb, DType type) {
  if (!is_tensor_type(type)) refuse(verb, type);
}

/// The scales of a page from a token on: of its key, of its value; null if it has none.
[[nodiscard]] inline const float* scales_in(const PageLayout& layout, const std::byte* page,
                                            std::uint32_t token = 0) noexcept {
  if (!layout.scaled()) return nullptr;
  return reinterpret_cast<const float*>(page + layout.scales_offset()) + std::size_t{2} * token;
}

/// A row of keys or values of a page to float32. `scale`: the row's, if the layout has scales.
inline void read_row(const Kernels& kernels, const PageLayout& layout, const std::byte* row, const float* scale,
                     float* out) noexcept {
  if (layout.scaled()) return kernels.e4m3.decode(row, *scale, out, layout.head_dim);
  kernels_for(kernels, layout.dtype).widen(row, out, layout.head_dim);
}
inline void write_row(const Kernels& kernels, const PageLayout& layout, const float* in, std::byte* row,
                      float* scale) noexcept {
  if (layout.scaled()) return kernels.e4m3.encode(in, row, scale, layout.head_dim);
  kernels_for(kernels, layout.dtype).narrow(in, row, layout.head_dim);
}

/// The mean key of a full page, see CodeLayout: float32 [head_dim].
void key_mean(const Kernels& kernels, const PageLayout& layout, const std::byte* page, float* out) noexcept;

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

/// Folds `part` into `whole`, row by row, by the merge algebra.
void merge_into(const Partial& whole, const Partial& part, std::uint32_t rows, std::uint32_t head_dim) noexcept;

/// Marks what `task` keeps in its mask; returns how many.
std::uint32_t select_top_p(const Kernels& kernels, const TopPTask& task);

}  // namespace sluice::cpu
