#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice {

/// How the attention of a prompt is computed.
enum class PrefillMode : std::uint8_t {
  full,         ///< dense
  flexprefill,  ///< FlexPrefill: blocks of keys chosen per query head and chunk, see FlexPrefillSpec
  automatic,    ///< flexprefill where it pays: from the device's crossover length on, unless it keeps nearly all
  streaming,    ///< StreamingLLM: the first and the newest tokens, by place alone, see StreamingPrefillSpec
  minference,   ///< MInference: a pattern per query head, as dense as it says, see MInferenceSpec
};

/// Queries and keys per block of FlexPrefill. Blocks lie on the grid of positions: block J holds the positions
/// [128 J, 128 J + 128), of queries and of keys, wherever a chunk begins.
inline constexpr std::uint32_t kPrefillBlock = 128;

/// FlexPrefill (Lai et al., ICLR 2025), the parameters of its section 4.1.
struct FlexPrefillSpec {
  float gamma = 0.95f;  ///< share of the representative attention that is enough. (0, 1]
  /// A head whose Jensen-Shannon distance between pooled and true attention is below chooses per query block, the
  /// others by columns and diagonals. 0: all by columns and diagonals. [0, 1]
  float tau = 0.1f;
  std::uint32_t min_budget = 1024;  ///< tokens: at least as many columns, and as many diagonals, per head
  /// Tokens: at most as many of each, those with the largest sums, and of each query block that chooses for itself as
  /// many beside them; 0: any. At least min_budget otherwise.
  std::uint32_t max_budget = 0;
  /// The paper's Algorithm 3: every block that one of the fewest columns or diagonals with a share of gamma touches.
  /// Otherwise as many blocks as those lines would fill, those with the largest sums first, as the official code has it.
  bool lines = false;
  /// The paper's Algorithm 4 for heads that choose per query block: the fewest of all pairs of a query and a key block
  /// of the chunk that hold a share of gamma of all query blocks' pooled attention, so that late query blocks, whose
  /// weights are spread over many keys, get less. Otherwise each query block has the fewest that hold gamma of its own.
  /// Not with max_budget; on the CPU alone.
  bool flattened = false;
  friend bool operator==(const FlexPrefillSpec&, const FlexPrefillSpec&) = default;
};

/// StreamingLLM (Xiao et al., ICLR 2024) as a mask over prompts, at original positions: every block of keys that the
/// first `sinks` tokens, or any of the newest `window` of a query of the block, touch. The same for all heads, and
/// for any chunks. As FlexPrefill's authors have it as a baseline.
struct StreamingPrefillSpec {
  std::uint32_t sinks = 1024;   ///< tokens; 0: none but those of the first block, which is always attended
  std::uint32_t window = 8192;  ///< tokens, a query's own included; at least 1
  friend bool operator==(const StreamingPrefillSpec&, const StreamingPrefillSpec&) = default;
};

/// What a query head of MInference attends.
enum class HeadPattern : std::uint8_t {
  vertical_slash,  ///< the columns and diagonals that the newest queries attend most
  a_shape,         ///< the first and the newest tokens, see StreamingPrefillSpec
  block_sparse,    ///< of every query block the key blocks that score highest by mean queries and mean keys
  /// Each head and chunk for itself: the first of a_shape, vertical_slash and block_sparse that holds at most
  /// kPatternMargin less of what the newest queries attend than the best of them.
  best,
};
inline constexpr float kPatternMargin = 0.01f;

/// MInference (Jiang et al., NeurIPS 2024). Sizes are the heads' own there, found by a search over samples; here all
/// heads have the same. Those of columns and diagonals are the official code's for heads without any, those of blocks
/// its 100 blocks of 64, those of the A-shape of the paper's search. Block 0 and a query block's own are always kept.
struct MInferenceSpec {
  HeadPattern pattern = HeadPattern::vertical_slash;
  std::uint32_t columns = 1000;    ///< tokens of columns: so many blocks as these would fill, largest sums first
  std::uint32_t diagonals = 6096;  ///< tokens of diagonals, likewise
  std::uint32_t blocks = 6400;     ///< tokens of the key blocks of a query block
  StreamingPrefillSpec a_shape{.sinks = 1024, .window = 4096};
  friend bool operator==(const MInferenceSpec&, const MInferenceSpec&) = default;
};

struct PrefillSpec {
  PrefillMode mode = PrefillMode::full;
  FlexPrefillSpec flex{};
  StreamingPrefillSpec streaming{};
  MInferenceSpec minference{};
  friend bool operator==(const PrefillSpec&, const PrefillSpec&) = default;
};

/// @throws Error{Errc::invalid_argument} naming the first field that breaks its range.
void validate(const PrefillSpec& spec);
/// @throws Error{Errc::invalid_argument} listing the modes.
[[nodiscard]] PrefillMode parse_prefill_mode(std::string_view text);
/// "full", "flexprefill", "auto", "streaming", "minference"
[[nodiscard]] const char* to_string(PrefillMode mode) noexcept;
/// @throws Error{Errc::invalid_argument} listing the patterns.
[[nodiscard]] HeadPattern parse_head_pattern(std::string_view text);
/// "vertical_slash", "a_shape", "block_sparse", "best"
[[nodiscard]] const char* to_string(HeadPattern pattern) noexcept;

}  // namespace sluice
