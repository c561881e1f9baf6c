#pragma once

#include <cstdint>
#include <memory>

#include "tools/cli/bench/decode_prompt.hpp"
#include "tools/cli/synthetic/prompt_pattern.hpp"

namespace sluice::tools {

struct PatternPromptOptions {
  PromptStructure structure{};
  std::uint64_t seed = 0;
  std::uint32_t tokens = 0;  ///< of a prompt
  std::uint32_t sequences = 1;
  std::uint32_t steps = 1;   ///< positions behind the prompt that forwards have tokens at
  std::uint32_t drafts = 1;  ///< tokens of a forward, at most
};

/// Prompts with synthetic attention, whatever a model computes around it. Each layer of each sequence has a stretch of
/// one long pattern, from another place on, so that its passages lie elsewhere, behind the pattern's sinks; and queries
/// of its own, which want bands at other distances. What a sequence is does not depend on how many there are.
/// All of the model's work is done, but what it says of queries, keys and values is not attended.
class PatternPrompt final : public DecodePrompt {
 public:
  /// `stream`, of that device, is waited for.
  PatternPrompt(const PatternPromptOptions& options, const AttentionShape& shape, Device& device, Stream& stream);

  [[nodiscard]] const PatternPromptOptions& options() const noexcept { return options_; }
  /// `tokens`: as in the options.
  void for_each_chunk(std::uint32_t sequence, std::uint32_t tokens, const PutChunk& put) const override;
  /// One copy within device memory, of some 400 KB for a sequence of Llama-3.1-8B's.
  void begin(std::uint32_t position, std::uint32_t drafts, Stream& stream) override;
  /// One token of each sequence, or several of the first one.
  [[nodiscard]] AttentionCall attended(const AttentionCall& call, std::uint32_t drafts) const override;

 private:
  /// Where a sequence's keys of a layer come from: those behind the sinks lie this much further in the pool.
  [[nodiscard]] std::uint32_t shift(std::uint32_t sequence, std::uint32_t layer) const noexcept;
  [[nodiscard]] std::uint64_t row_elements() const noexcept;
  /// Of all rows of a position.
  [[nodiscard]] std::uint64_t step_bytes() const noexcept {
    return std::uint64_t{shape_.layers} * options_.sequences * row_elements() * sizeof(std::uint16_t);
  }
  void draw_keys(const PromptPattern& pattern);
  void draw_rows(Device& device, Stream& stream);

  AttentionShape shape_;
  PatternPromptOptions options_;
  std::uint32_t spread_;             ///< positions that a stretch may begin at
  std::unique_ptr<Buffer> keys_;     ///< pinned: [positions, 2, kv_heads, head_dim], key and value
  std::unique_ptr<Buffer> queries_;  ///< pinned: [sequences, layers, kShownQueries, q_heads, head_dim]
  std::unique_ptr<Buffer> rows_;     ///< device: [steps, layers, sequences, q_heads + 2 * kv_heads, head_dim]
  std::unique_ptr<Buffer> now_;      ///< device: [drafts, ...] likewise, of the forward that began last
};

}  // namespace sluice::tools
