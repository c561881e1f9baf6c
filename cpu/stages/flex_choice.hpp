#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/prefill.hpp"

namespace sluice::cpu {

/// The parts of a choice of blocks that know nothing of queries and keys, for one query head.

/// The query blocks and key blocks of a chunk, and how many of a kind it takes at least and at most.
struct ChunkGrid {
  ChunkGrid(std::uint32_t first, std::uint32_t count, const FlexPrefillSpec& spec) noexcept;
  /// FlexPrefill's budgets are of its modes alone.
  ChunkGrid(std::uint32_t first, std::uint32_t count, const PrefillSpec& spec) noexcept;
  /// The least is everything: there is nothing to choose.
  [[nodiscard]] bool everything() const noexcept { return blocks <= least; }

  std::uint32_t top = 0;     ///< first query block
  std::uint32_t rows = 0;    ///< query blocks
  std::uint32_t blocks = 0;  ///< key blocks
  std::uint32_t words = 0;   ///< of one query block's bits
  std::uint32_t least = 1;
  std::uint32_t most = 1;
};

/// Softmax in place; what is not a number weighs nothing. All 0 if nothing weighs anything.
void soften(std::span<double> scores) noexcept;
/// Sums over blocks of 128.
[[nodiscard]] std::vector<double> block_sums(std::span<const float> lines);
/// Distance of two distributions, natural logarithm, with 0 log 0 = 0.
[[nodiscard]] double jensen_shannon(std::span<const double> p, std::span<const double> q) noexcept;

/// A set of columns, or of offsets from the diagonal, in blocks.
struct BlockSet {
  std::vector<std::uint8_t> has;  ///< [key blocks]
  std::uint32_t count = 0;
};
/// The `count` blocks with the largest sums, block 0 before all others; equal ones by lowest index.
[[nodiscard]] BlockSet largest_blocks(std::span<const double> sums, std::uint32_t count);
/// What the fewest of `lines` that hold spec.gamma come to, as spec.lines has it. A diagonal, unlike a column, touches
/// two blocks unless its distance is a multiple of 128.
enum class LineKind : std::uint8_t { column, diagonal };
[[nodiscard]] BlockSet choose_lines(std::span<const float> lines, std::span<const double> sums, LineKind kind,
                                    const FlexPrefillSpec& spec, const ChunkGrid& grid);

/// Writes all words of a head's bits [rows, words]: the pairs of the columns and of the offsets.
void write_lines(const BlockSet& columns, const BlockSet& offsets, const ChunkGrid& grid, std::uint32_t* bits) noexcept;
/// Adds the fewest of a query block's weights that hold `gamma`, or `most` of them if these are fewer, the largest
/// first; equal ones by lowest index.
void add_fewest(std::span<const double> weights, double gamma, std::uint32_t most, std::uint32_t* row_bits);
/// The same of all query blocks' weights together, which hold 1 each: the fewest that hold `gamma` of them all, of
/// equal ones the earlier query block's first. bits [rows, words]
void add_fewest_of_all(std::span<const std::vector<double>> weights, double gamma, std::uint32_t words,
                       std::uint32_t* bits);

}  // namespace sluice::cpu
