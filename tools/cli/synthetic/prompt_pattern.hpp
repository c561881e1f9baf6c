#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/shape.hpp"

namespace sluice::tools {

/// What the attention of a synthetic prompt looks like.
enum class PromptStructure : std::uint8_t {
  vertical_slash,  ///< sinks and passages that every query wants, bands at distances of the head's own
  narrow_slash,    ///< likewise, with passages of 64 keys instead of 512: 1% of 128K keys hold nearly all
  query_aware,     ///< every block of queries wants the key blocks of one topic, another one for each block
  uniform,         ///< q.k is noise: nothing can be left out, the worst case
};

[[nodiscard]] const char* to_string(PromptStructure structure) noexcept;
/// `flag`: where it was written.
/// @throws Error{Errc::invalid_argument} that names the flag and lists the structures.
[[nodiscard]] PromptStructure parse_prompt_structure(std::string_view text, const std::string& flag);

/// The rows of one layer of a prompt, each a function of the seed, its head and its position alone.
///
/// vertical_slash, narrow_slash: score(i, j) = sink(j) + passage(j) + bands(i - j) + noise. A band is a sum of rotary
/// pairs that peaks at one distance, as RoPE makes them; the sum's other distances are its background. Each head shares
/// a row's mass among the three in proportions of its own and leaves some 5% to the background, whatever the row's
/// length. query_aware: keys of a block share one of 16 directions, more or less of it by block, and so do the queries.
/// All have an outlier channel, a large constant in every key, and some elements four times as large as they would be.
class PromptPattern {
 public:
  static constexpr std::uint32_t kSinks = 4;

  /// `query_seed`: queries of another one want bands at other distances, or other topics, of the same keys.
  PromptPattern(PromptStructure structure, const AttentionShape& shape, std::uint64_t seed,
                std::optional<std::uint64_t> query_seed = {});

  /// Floats that `rotation` writes.
  [[nodiscard]] std::uint32_t rotation_size() const noexcept { return 2 * pairs_; }
  /// Cosine and sine of every pair at a position; what key and query want. Bands are a matter of distance: queries may
  /// be rotated by more than their position is, if the keys that they meet come from as far behind.
  void rotation(std::uint32_t position, float* out) const;
  /// Each writes [head_dim].
  void key(std::uint32_t kv_head, std::uint32_t position, const float* rotation, float* out) const;
  void value(std::uint32_t kv_head, std::uint32_t position, float* out) const;
  void query(std::uint32_t q_head, std::uint32_t position, const float* rotation, float* out) const;

 private:
  void add_patterns(std::uint32_t q_head, std::uint32_t position, const float* rotation, float* out) const;
  /// A topic's direction: [head_dim], +1 or -1.
  [[nodiscard]] const float* topic(std::uint32_t kv_head, std::uint32_t topic) const noexcept;

  [[nodiscard]] bool has_bands() const noexcept { return pairs_ != 0; }

  PromptStructure structure_;
  AttentionShape shape_;
  std::uint32_t passage_;                           ///< tokens of a passage
  std::uint64_t keys_, values_, queries_, places_;  ///< keys of the random streams
  std::uint32_t pairs_;
  std::vector<double> frequency_;  ///< [pairs] radians per token
  std::vector<float> topics_;      ///< [kv_heads, topics, head_dim]
  std::vector<float> bands_;       ///< [q_heads, pairs, 2] sum of height * exp(-i * frequency * distance)
};

}  // namespace sluice::tools
