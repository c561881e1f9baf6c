#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/units.hpp"

namespace sluice {

/// How the attention of a prompt is computed.
enum class PrefillMode : std::uint8_t {
  full,         ///< dense
  flexprefill,  ///< FlexPrefill: blocks of keys chosen per query head and chunk, see FlexPrefillSpec
  automatic,    ///< flexprefill where it pays: from the device's crossover length on, unless it keeps nearly all
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

struct PrefillSpec {
  PrefillMode mode = PrefillMode::full;
  FlexPrefillSpec flex;
  friend bool operator==(const PrefillSpec&, const PrefillSpec&) = default;
};

/// @throws Error{Errc::invalid_argument} naming the first field that breaks its range.
void validate(const PrefillSpec& spec);
/// @throws Error{Errc::invalid_argument} listing the modes.
[[nodiscard]] PrefillMode parse_prefill_mode(std::string_view text);
/// "full", "flexprefill", "auto"
[[nodiscard]] const char* to_string(PrefillMode mode) noexcept;

/// What FlexPrefill costs on a device besides the pairs that it keeps, in units of the time in which dense attention
/// computes one (query block, key block) pair of a query head. Measured; what PrefillMode::automatic goes by.
struct PrefillCosts {
  double per_chunk = 0.0;
  double per_key_block = 0.0;  ///< that the chunk sees
  double per_pair = 0.0;       ///< of a query block and any of these
};

/// What FlexPrefill found out about one query head of one chunk.
struct PrefillChoice {
  float divergence = 0.f;         ///< Jensen-Shannon distance, [0, sqrt(ln 2)]
  std::uint32_t query_aware = 0;  ///< 1: blocks were chosen per query block
  std::uint32_t columns = 0;      ///< blocks of columns that were chosen (N_v)
  std::uint32_t diagonals = 0;    ///< block offsets that were chosen (N_s)
  std::uint64_t kept = 0;         ///< (query block, key block) pairs to compute
  std::uint64_t causal = 0;       ///< and those that dense attention computes
};

/// Blocks of positions that the tokens [first, first + count) touch.
[[nodiscard]] constexpr std::uint32_t prefill_blocks(std::uint32_t first, std::uint32_t count) noexcept {
  return count == 0 ? 0 : (first + count - 1) / kPrefillBlock - first / kPrefillBlock + 1;
}
/// Words of one query block's bits when `keys` keys are visible to the chunk.
[[nodiscard]] constexpr std::uint32_t prefill_mask_words(std::uint32_t keys) noexcept {
  return static_cast<std::uint32_t>(div_up(div_up(keys, kPrefillBlock), 32));
}

}  // namespace sluice
