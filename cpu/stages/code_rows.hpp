#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/kernels.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::cpu {

/// Addresses of the codes of a few keys, on their way to the kernel that scores by them.
class CodeRows {
 public:
  static constexpr std::uint32_t kMost = 1024;

  explicit CodeRows(const CodeLayout& layout) : layout_(layout) {}
  [[nodiscard]] bool full() const noexcept { return count_ == kMost; }
  void add(const std::byte* copy, std::uint32_t row) noexcept {
    codes_[count_] = copy + layout_.codes_offset(row);
    if (layout_.few()) thirds_[count_] = copy + layout_.thirds_offset(row);
    params_[count_++] = copy + layout_.params_offset() + row * CodeLayout::kParamBytes;
  }
  /// Scores the rows for heads [0, group) of `q` and starts again.
  void flush(const Kernels& kernels, const float* q, const float* mean, float scale, std::uint32_t group, float* out,
             std::uint64_t token_stride, std::uint64_t head_stride) noexcept {
    kernels.score_int4({.q = q,
                        .mean = mean,
                        .scale = scale,
                        .codes = codes_,
                        .thirds = layout_.few() ? thirds_ : nullptr,
                        .params = params_,
                        .count = count_,
                        .group = group,
                        .head_dim = layout_.head_dim,
                        .out = out,
                        .token_stride = token_stride,
                        .head_stride = head_stride});
    count_ = 0;
  }

 private:
  CodeLayout layout_;
  std::uint32_t count_ = 0;
  const std::byte* codes_[kMost];
  const std::byte* thirds_[kMost];  ///< of 3 bits
  const std::byte* params_[kMost];
};

}  // namespace sluice::cpu
