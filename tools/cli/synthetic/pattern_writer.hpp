#pragma once

#include <cstdint>
#include <vector>

#include "tools/cli/synthetic/prompt_pattern.hpp"

namespace sluice::tools {

/// Writes a pattern's tokens as tensors of bf16 have them, one head behind the other. For one thread.
class PatternWriter {
 public:
  /// `pattern` must outlive it.
  PatternWriter(const PromptPattern& pattern, const AttentionShape& shape);

  /// [q_heads, head_dim] of the token at `position`, whose keys, from the first one on, are the pattern's from `shift`
  /// on; returns the end.
  std::uint16_t* query(std::uint32_t position, std::uint32_t shift, std::uint16_t* out);
  /// [2, kv_heads, head_dim]: key and value at `position` of the pattern; returns the end.
  std::uint16_t* key_and_value(std::uint32_t position, std::uint16_t* out);

 private:
  std::uint16_t* put(std::uint16_t* out) const;

  const PromptPattern& pattern_;
  AttentionShape shape_;
  std::vector<float> rotation_, row_;
};

}  // namespace sluice::tools
