#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "tools/llama/model.hpp"

namespace sluice::tools {

/// A prompt after its prefill, detached from any engine: keys and values of every layer exactly as they were
/// given to the engine (widened to float32), the last queries, and the logits. In ordinary memory. Prefill once, then
/// import under as many policies as an evaluation compares.
///
/// Memory: 8 bytes * layers * kv_heads * head_dim per token, 256 KiB for Llama-3.1-8B's shape, 8 KiB for the testbed's.
/// Thread safety: const members from any thread.
class PromptCache {
 public:
  /// Queries kept per layer: the most that a policy's history reads (HistoryOptions::init_queries).
  static constexpr std::uint32_t kQueries = 256;

  [[nodiscard]] std::uint32_t tokens() const noexcept { return static_cast<std::uint32_t>(ids_.size()); }
  [[nodiscard]] std::span<const int> ids() const noexcept { return ids_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept;
  /// Bytes of the keys, values and queries of a prompt of so many tokens.
  [[nodiscard]] static std::uint64_t bytes_of(const AttentionShape& shape, std::uint64_t tokens) noexcept;
  /// Logits after the last token, [vocab_size].
  [[nodiscard]] std::span<const float> logits() const noexcept { return logits_; }

  /// Keys and values of tokens [first, first + count), [count, kv_heads, head_dim].
  [[nodiscard]] TensorView keys(LayerId layer, std::uint32_t first, std::uint32_t count) const noexcept;
  [[nodiscard]] TensorView values(LayerId layer, std::uint32_t first, std::uint32_t count) const noexcept;
  /// The kept queries of tokens [first, first + count), at the end of that range: [m, q_heads, head_dim]
  /// with m from 0 (none kept) to count.
  [[nodiscard]] TensorView last_queries(LayerId layer, std::uint32_t first, std::uint32_t count) const noexcept;

  /// Empties the cache and reserves room for a prompt of these tokens.
  void start(const AttentionShape& shape, std::span<const int> ids);
  /// Records one layer of the chunk that begins at token `first`.
  /// @param call  in ordinary memory, float32 or bf16; `out` is not used
  void record(const AttentionCall& call, std::uint32_t first);
  /// Closes the recording.
  void finish(std::span<const float> logits);

  [[nodiscard]] bool complete() const noexcept { return !logits_.empty(); }
  [[nodiscard]] const AttentionShape& shape() const noexcept { return shape_; }

 private:
  /// First token whose queries are kept.
  [[nodiscard]] std::uint32_t first_query() const noexcept { return tokens() < kQueries ? 0 : tokens() - kQueries; }
  /// Where a token's keys and values begin in k_ and v_.
  [[nodiscard]] std::uint64_t row(LayerId layer, std::uint32_t token) const noexcept {
    return (std::uint64_t{layer.value} * tokens() + token) * shape_.kv_heads * shape_.head_dim;
  }
  /// Where the queries of a token >= first_query() begin in q_.
  [[nodiscard]] std::uint64_t query_row(LayerId layer, std::uint32_t token) const noexcept {
    const std::uint32_t kept = tokens() - first_query();
    return (std::uint64_t{layer.value} * kept + token - first_query()) * shape_.q_heads * shape_.head_dim;
  }

  AttentionShape shape_;
  std::vector<int> ids_;
  std::vector<float> k_;       ///< [layers, tokens, kv_heads, head_dim]
  std::vector<float> v_;       ///< likewise
  std::vector<float> q_;       ///< [layers, min(tokens, kQueries), q_heads, head_dim]
  std::vector<float> logits_;  ///< [vocab_size]; empty until finished
};

}  // namespace sluice::tools
