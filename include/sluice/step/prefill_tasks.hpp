#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sluice/error.hpp"
#include "sluice/prefill.hpp"
#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "sluice/tensor.hpp"
#include "sluice/units.hpp"

namespace sluice {

/// Strides in elements, shared by the queries and by the outputs of a prefill. A choice of blocks has no outputs.
struct PrefillShape {
  DType q_dtype = DType::f32;
  DType out_dtype = DType::f32;
  std::uint64_t q_token_stride = 0;
  std::uint64_t q_head_stride = 0;
  std::uint64_t out_token_stride = 0;
  std::uint64_t out_head_stride = 0;
};

/// Causal attention of a chunk of a prompt: query i (position first + i) of one KV head's group attends the keys
/// key_begin <= j < min(key_end, first + i + 1), with `reach` only the newest, j > first + i - reach; all of them or
/// those in the blocks that `blocks` names. Keys may come in windows, one call after the other: see `so_far`. A row
/// that attends no key has out 0 and lse -infinity.
struct PrefillTask {
  const std::byte* q = nullptr;  ///< row of (chunk token 0, first head of the group); see strides
  KvView kv;                     ///< its first page holds the keys from position key_begin on
  std::uint32_t first = 0;       ///< position of the chunk's first token
  std::uint32_t count = 0;       ///< tokens of the chunk
  std::byte* out = nullptr;      ///< row of (chunk token 0, first head of the group)
  std::uint32_t key_begin = 0;   ///< a multiple of page_tokens
  std::uint32_t key_end = kNone; ///< kNone: first + count
  std::uint32_t reach = 0;       ///< keys that a query sees, its own included; 0: all. Not with `blocks`
  /// [group, prefill_blocks(first, count), prefill_mask_words(first + count)] or null: bit J % 32 of word J / 32 is set
  /// if the queries of that block attend key block J. Positions are absolute, not of the window. Memory that the
  /// device's kernels read.
  const std::uint32_t* blocks = nullptr;
  float* lse = nullptr;  ///< [count, group] or null: receives the natural log of the sum of exponentials
  /// [count, group, head_dim] or null. What earlier windows gave is in `so_far` and `lse`, unless this is the first;
  /// what this one adds goes there, and to `out` with the last only.
  float* so_far = nullptr;
  bool first_window = true;
  bool last_window = true;
};

/// The choice of a chunk of a prompt, for one KV head's group: which blocks of keys each block of queries is to attend.
/// Every key that the chunk sees is in `kv`, from position 0 on. Scores are not soft-capped.
struct SelectBlocksTask {
  const std::byte* q = nullptr;  ///< as in PrefillTask
  KvView kv;
  std::uint32_t first = 0;
  std::uint32_t count = 0;            ///< 0: nothing is written
  std::uint32_t* blocks = nullptr;    ///< as in PrefillTask; receives the choice
  PrefillChoice* choices = nullptr;   ///< [group] receives what it came from; memory that the kernels write
  std::byte* scratch = nullptr;       ///< scratch memory of a device, 256-byte aligned
};

}  // namespace sluice
