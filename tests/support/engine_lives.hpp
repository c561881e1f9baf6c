#pragma once

#include <cstdint>

#include "tests/support/engine_named.hpp"
#include "tests/support/engine_rig.hpp"

/// What cases of sequences that fork and shrink, and of forwards in flight, share.
namespace sluice::test::lives {

inline constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
inline constexpr const char* kPolicy = "exact | int4 | top_k=10 | near=0,sinks=2,recent=6";

inline EngineOptions life_options(const EngineRig& rig, std::uint32_t rows, std::uint32_t blocks) {
  EngineOptions options{.shape = kShape, .kv_dtype = rig.kv_dtype, .largest = {.decode_rows = rows}};
  options.host_bytes = blocks * block_bytes(options);
  options.near_bytes = 3 * near_block_bytes(options);
  options.sequences = 4;
  options.import_rows = 100;
  options.in_flight = 3;
  options.threads = 2;
  options.pin_threads = false;
  return named(options, {kManyTokens});
}

}  // namespace sluice::test::lives
