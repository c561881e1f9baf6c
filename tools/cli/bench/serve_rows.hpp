#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "sluice/device.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "tools/cli/synthetic/prompt_pattern.hpp"
#include "tools/llama/engine.hpp"

namespace sluice::tools {

/// Consecutive tokens of one sequence among the rows of a forward.
struct RowSpan {
  std::uint32_t first = 0;  ///< position of the first one
  std::uint32_t count = 1;
};

/// Queries, keys and values of any forward in device memory, in bf16: a synthetic prompt's, of which every sequence has
/// the tokens from the first one on, and every layer the same.
class ServeRows {
 public:
  /// `tokens`: of the longest sequence; `rows`: of the largest forward.
  ServeRows(Device& device, const AttentionShape& shape, PromptStructure structure, std::uint64_t seed,
            std::uint32_t tokens, std::uint32_t rows);

  /// The rows of the next forward, of which there are `rows`, one span behind the other; what is left over is padding.
  /// They are where those of the forward before were. Enqueues, from pinned memory.
  void put(std::span<const RowSpan> spans, std::uint32_t rows, Stream& stream);
  /// Of that forward: [rows, heads, head_dim]
  [[nodiscard]] QkvViews views() const;
  [[nodiscard]] MutableTensorView out() const;

 private:
  void draw(PromptStructure structure, std::uint64_t seed, std::uint32_t tokens);

  AttentionShape shape_;
  std::uint64_t row_bytes_;       ///< of a token's query, key and value
  std::unique_ptr<Buffer> pool_;  ///< pinned: [tokens, q_heads + 2 * kv_heads, head_dim]
  std::unique_ptr<Buffer> rows_;  ///< likewise, of the forward
  std::unique_ptr<Buffer> out_;   ///< [rows, q_heads, head_dim]
  std::uint32_t count_ = 0;
};

}  // namespace sluice::tools
