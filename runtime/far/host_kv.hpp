#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "runtime/far/shared_calls.hpp"
#include "scheduler/layer_policy.hpp"

namespace sluice::runtime {

/// A policy's window on one KV head's keys and values in host memory.
class HostKv : public scheduler::KvReader {
 public:
  /// Of a shape and pages that the CPU's kernels have.
  HostKv(const AttentionShape& shape, const KvView& view)
      : kernels_(cpu::fastest_kernels()), shape_(shape), view_(view) {}

  /// Scores of many keys are shared from now on with threads that help; what comes out is the same.
  void share(const SharedCaller& caller) noexcept { caller_ = caller; }
  void score(const float* q, std::span<const std::uint32_t> tokens, float* out) override;
  /// Later estimates of keys in the head's first `pages` pages come from 4-bit copies that are made for them, as those
  /// of a sequence with so many tokens are.
  void use_codes(std::uint32_t pages, std::uint32_t tokens) noexcept {
    copied_tokens_ = pages * view_.layout.page_tokens;
    centred_ = tokens > view_.layout.page_tokens;
  }
  void estimate(const float* q, std::span<const std::uint32_t> tokens, float* out) override;
  void key(std::uint32_t token, float* out) override { rows(Half::keys, token, 1, out); }
  void value(std::uint32_t token, float* out) override { rows(Half::values, token, 1, out); }
  void keys(std::uint32_t first, std::uint32_t count, float* out) override;
  void cluster(const scheduler::ClusterRequest& request, float* centroids, std::uint32_t* assignment) override;
  void score_rows(const float* x, std::uint32_t columns, const float* rows, std::uint32_t count, float* out) override;
  void each(std::uint32_t count, const std::function<void(std::uint32_t)>& work) override;

 private:
  /// 0, 1, 2, ...
  [[nodiscard]] std::span<const std::uint32_t> first_indices(std::uint32_t count);
  void score_some(const float* q, std::span<const std::uint32_t> tokens, float* out);
  /// The estimates of tokens whose copies are made first.
  void copy_and_estimate(const float* q, std::span<const std::uint32_t> tokens, float* out);
  enum class Half : std::uint8_t { keys, values };
  /// Consecutive rows of one page.
  void rows(Half half, std::uint32_t token, std::uint32_t count, float* out);

  const cpu::Kernels& kernels_;
  AttentionShape shape_;
  KvView view_;
  SharedCaller caller_{};
  std::vector<std::uint32_t> indices_;  ///< 0, 1, 2, ... as many as were needed so far
  std::uint32_t copied_tokens_ = 0;
  bool centred_ = false;     ///< the mean key is that of the first page
  std::vector<float> mean_;  ///< it, once it was needed
  std::vector<std::byte> page_, copy_;  ///< of keys whose copies are made
};

}  // namespace sluice::runtime
