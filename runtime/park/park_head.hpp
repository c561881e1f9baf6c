#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/park/park_source.hpp"
#include "sluice/prefill.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"
#include "sluice/tensor.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

/// A parked sequence, the same in a file and in memory. All numbers are little-endian, nothing is aligned.
///
///   preamble  the same in all versions: 8 bytes 0x89 "SLUICE" 0x0a; u32 version; u32 bytes of the head; u64 bytes of
///             the body, checksums apart; u32 0; u32 CRC-32C of the 28 bytes before it
///   head      the fields of ParkHead, in their order: texts as u32 bytes and the bytes, lists as u32 count and u32
///             each; u32 CRC-32C of it
///   body      in blocks of kParkBlock bytes, the last of which has what is left, each followed by the four CRC-32C of
///             its quarters, see cpu::quarter_begin, the first of them xor the number of the block, so that none is
///             taken for another:
///               names    i32 [names]
///               queries  f32 [layers, tail_end - tail_begin, q_heads, head_dim]
///               rows     of `dtype` [layers, kv_heads, 2, tokens, head_dim], keys before values; of a dtype with
///                        scales, see E4m3, behind those of each KV head f32 [tokens, 2]. Of layers with windows
///                        tokens [passed, tokens) alone
///
/// What is made of keys, digests and copies in codes, is not in it: an engine makes what it keeps. So pages may have
/// another size in the engine that resumes the sequence.
inline constexpr std::uint32_t kParkVersion = 2;
/// As much as stays in a core's cache between being copied and being checked.
inline constexpr std::uint64_t kParkBlock = 256 * KiB;
inline constexpr std::uint64_t kParkChecks = 4 * sizeof(std::uint32_t);  ///< bytes behind a block
inline constexpr std::uint64_t kMostModelBytes = 4 * KiB;

/// What a sequence is, but for its rows.
struct ParkHead {
  AttentionShape shape{};
  DType dtype = DType::bf16;  ///< as u32
  std::uint32_t tokens = 0;
  std::uint32_t prompt_end = 0;  ///< position behind the newest token that was not decoded
  std::uint32_t sparse = kNone;  ///< first token that was decoded without attending everything
  std::uint32_t tail_begin = 0;  ///< positions [tail_begin, tail_end) have their queries in the body
  std::uint32_t tail_end = 0;
  std::uint32_t names = 0;      ///< of its first tokens, also of some that are still to come
  std::uint64_t salt = 0;       ///< of the names
  double balance = 0.0;         ///< of PrefillBets
  std::uint32_t chunk_end = 0;  ///< PrefillBook::end
  /// How its prompts attended: u32 mode, f32 gamma, f32 tau, u32 min_budget, u32 max_budget, u32 with bit 0 for lines
  /// and bit 1 for flattened. Only with these modes: of streaming u32 sinks, u32 window; of minference u32 pattern, u32
  /// columns, u32 diagonals, u32 blocks, and sinks and window of its A-shape.
  PrefillSpec prefill{};
  std::string model{};          ///< what the caller said that keys and values are of
  std::string policy{};         ///< as sluice::to_string has it
  std::string policy_name{};
  std::vector<std::uint32_t> rests{};  ///< PrefillBook::rests: one for each layer, or none
  std::uint32_t passed = 0;  ///< tokens that layers with windows do not have any more
  std::vector<std::uint32_t> windows{};  ///< EngineOptions::windows: one for each layer, or none

  /// Of which a layer has rows.
  [[nodiscard]] std::uint32_t first_token(std::uint32_t layer) const noexcept {
    return windows.empty() || windows[layer] == 0 ? 0 : passed;
  }
  [[nodiscard]] std::uint64_t query_bytes() const noexcept {
    const std::uint64_t rows = std::uint64_t{shape.layers} * (tail_end - tail_begin);
    return rows * shape.q_heads * shape.head_dim * sizeof(float);
  }
  /// Of the body, checksums apart.
  [[nodiscard]] std::uint64_t body_bytes() const noexcept {
    const PageLayout token{.page_tokens = 1, .head_dim = shape.head_dim, .dtype = dtype};
    std::uint64_t rows = 0;
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) rows += tokens - first_token(layer);
    return names * sizeof(std::int32_t) + query_bytes() + rows * shape.kv_heads * token.page_bytes();
  }
};

/// Without what the mode does not read.
[[nodiscard]] PrefillSpec prefill_of(const PrefillSpec& spec) noexcept;

/// Of a body, with its checksums.
[[nodiscard]] constexpr std::uint64_t parked_body_bytes(std::uint64_t body_bytes) noexcept {
  return body_bytes + div_up(body_bytes, kParkBlock) * kParkChecks;
}

/// Why nobody could read it again; empty if they can.
[[nodiscard]] std::string unsound(const ParkHead& head);

/// Preamble and head, with their checksums.
[[nodiscard]] std::vector<std::byte> encode(const ParkHead& head);

/// Reads and checks both: all ranges and all lengths, so that what the head says fits what is there.
/// @throws Error{Errc::corrupt}; Error{Errc::invalid_argument} for another version, or what the source throws
[[nodiscard]] ParkHead read_head(ParkSource& source);

}  // namespace sluice::runtime
