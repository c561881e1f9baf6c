#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/kernels/attend.hpp"
#include "gpu/kernels/top_k.hpp"
#include "sluice/backend.hpp"
#include "sluice/decode.hpp"

namespace sluice::gpu {

/// What the kernels of a forward tell each other, in device memory; see DecodeVerbs::scratch_bytes.
struct DecodeScratch {
  ScoreInt4Task* score_tasks = nullptr;  ///< [rows, kv_heads]
  TopKRow* top_k_rows = nullptr;         ///< [rows, q_heads]
  AttendJob* jobs = nullptr;             ///< [rows, kv_heads, head_blocks]
  std::uint32_t* counters = nullptr;     ///< [jobs] of AttendArgs
  float* partials = nullptr;             ///< of AttendArgs
  std::uint32_t* far_rows = nullptr;     ///< as in DecodeMemory, before they cross the link
  std::uint32_t* far_counts = nullptr;   ///< likewise
  std::uint32_t head_blocks = 1;         ///< jobs that share the query heads of a KV head
  std::uint32_t block_heads = 8;         ///< query heads of a job
  std::uint32_t slices = 1;              ///< thread blocks of a job
};

void launch_decode_apply(const DecodeMemory& memory, cudaStream_t stream);
void launch_decode_begin(const DecodeMemory& memory, cudaStream_t stream);
void launch_decode_append(const DecodeMemory& memory, const DecodeScratch& scratch, const DecodeLayer& layer);
void launch_decode_split(const DecodeMemory& memory, const DecodeScratch& scratch, const DecodeLayer& layer);
void launch_decode_merge(const DecodeMemory& memory, const DecodeScratch& scratch, const DecodeLayer& layer);
void launch_decode_cancel(const DecodeMemory& memory, cudaStream_t stream);
void launch_decode_end(const DecodeMemory& memory, cudaStream_t stream);

/// Loads all of them, and asks for the shared memory that the longest sequences need.
void load_decode_kernels();

/// Tokens of the longest sequence whose choice `split` can mark in shared memory.
[[nodiscard]] std::uint32_t most_decode_tokens();

}  // namespace sluice::gpu
