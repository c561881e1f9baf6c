#pragma once

#include <cstdint>
#include <vector>

#include "sluice/audit.hpp"
#include "sluice/engine.hpp"
#include "sluice/step/page.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// What sequences of an engine did while they decoded.
struct DecodeScore {
  std::uint64_t tokens = 0;        ///< decoded
  std::uint64_t dense_tokens = 0;  ///< that dense attention would have attended, of one KV head and layer
  EngineStats stats;
  AuditReport audited;  ///< without heads
  std::uint32_t code_bits = 4;  ///< of the engine, see EngineSizes
};

/// What was attended and read, as shares of dense attention's tokens, and of the bytes of its keys and values, which
/// has all of them near.
struct ReadShares {
  double attended = 0.0;  ///< tokens
  double near = 0.0;      ///< bytes of keys and values in the device's memory
  double far = 0.0;       ///< in host memory, by the CPU, with what it read to choose
  double link = 0.0;      ///< in host memory, by the device over the link
  double choice = 0.0;    ///< of copies and digests by which the device chose

  [[nodiscard]] double bytes() const noexcept { return near + far + link + choice; }
};
/// `layout`: of the engine's pages. NaN if nothing was decoded.
[[nodiscard]] ReadShares read_shares(const DecodeScore& score, const AttentionShape& shape, const PageLayout& layout);
/// The counters of `after` less those of `before`.
[[nodiscard]] EngineStats since(const EngineStats& before, EngineStats after) noexcept;

inline constexpr const char* kDecodeNote =
    "attended: tokens per KV head and step; of dense, near bytes, far bytes: of what dense attention reads; near: of "
    "what is attended, in device memory; brought: near, tokens per KV head and step";

/// Columns of a decode, the same for every policy. `layout`: of the engine's pages.
void append_decode(const DecodeScore& score, const AttentionShape& shape, const PageLayout& layout,
                   std::vector<Column>& columns, std::vector<Json>& row);

/// Appends what prefill computed: blocks as a share of dense attention's where they were chosen (all, if they never
/// were), and the share of chunks and layers where they were.
void append_blocks(const EngineStats& stats, std::vector<Column>& columns, std::vector<Json>& row);

}  // namespace sluice::tools
