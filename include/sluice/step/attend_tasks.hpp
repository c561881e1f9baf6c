#pragma once

#include <cstdint>
#include <span>

#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"
#include "sluice/step/partial.hpp"

namespace sluice {

/// One (sequence, KV head) of an `attend`. The selection is the union of `runs` and `tokens`.
struct AttendTask {
  const float* q = nullptr;  ///< [group, head_dim], not scaled
  KvView kv;
  std::span<const PageRun> runs;           ///< may be empty
  std::span<const std::uint32_t> tokens;   ///< ascending; may be empty
  std::span<const std::uint32_t> members;  ///< [tokens] or empty: see SelectionRow
  std::span<const float> scores;           ///< [tokens, group] or empty: then K is read
  Partial out;                             ///< [group, head_dim], [group]
};

}  // namespace sluice
