#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/shape.hpp"

namespace sluice::scheduler {

/// Newest queries of a prompt that keys are skewed by.
inline constexpr std::uint32_t kSkewQueries = 32;

/// A few channels of every key of one KV head in skewed coordinates, in bf16: InfiniGen's partial key cache (Lee et
/// al., OSDI 2024, section 4.3). Coordinates are those of `skewing_matrix` of the prompt's newest queries, of all heads
/// of the group, after RoPE; the paper, whose heads have keys of their own, finds them once per model, on a sample
/// text. Kept are the channels in which these queries are largest, summed without signs; ties go to the lower.
/// Where no queries are known the keys take their place. Without a prompt keys are scored whole.
class SkewedCache {
 public:
  /// @param share  of the channels that are kept, rounded down, at least one
  SkewedCache(float share, const AttentionShape& shape);

  void begin(const PromptContext& prompt);
  /// Takes in keys of the tokens before `tokens` that it lacks, and the newest in any case: that of a forward which
  /// failed may have been another one.
  void follow(std::uint32_t tokens, KvReader& kv);
  /// As if there had never been more than `tokens` tokens.
  void truncate(std::uint32_t tokens) noexcept;

  /// out[i, h] = q[h].k[i] of tokens [0, tokens), which it has, over the channels that are kept; scaled as scores are
  /// but without a soft-cap.
  void estimate(const float* q, std::uint32_t tokens, KvReader& kv, float* out) const;

  /// Rows of the skewing matrix that are kept, [channels, head_dim]; empty without a prompt.
  [[nodiscard]] std::span<const float> rows() const noexcept { return rows_; }
  [[nodiscard]] std::uint32_t channels() const noexcept { return static_cast<std::uint32_t>(rows_.size()) / head_dim_; }
  [[nodiscard]] std::uint32_t tokens() const noexcept {
    return rows_.empty() ? 0 : static_cast<std::uint32_t>(keys_.size()) / channels();
  }
  /// Of one token.
  [[nodiscard]] std::uint64_t bytes_per_token() const noexcept { return channels() * sizeof(std::uint16_t); }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(rows_, keys_); }
  /// What a cache of `tokens` tokens holds at most.
  [[nodiscard]] static std::uint64_t most_heap_bytes(float share, const AttentionShape& shape,
                                                     std::uint32_t tokens) noexcept;

 private:
  [[nodiscard]] static std::uint32_t wanted(float share, const AttentionShape& shape) noexcept;
  /// By rows of queries, [any, head_dim].
  void choose_rows(std::span<const float> queries);

  std::uint32_t wanted_;
  std::uint32_t group_;
  std::uint32_t head_dim_;
  float scale_;                      ///< AttentionShape::score_scale
  std::vector<float> rows_;          ///< [channels, head_dim]
  std::vector<std::uint16_t> keys_;  ///< bf16, [tokens, channels]
};

}  // namespace sluice::scheduler
