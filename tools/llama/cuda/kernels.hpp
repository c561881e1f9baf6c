#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tools/llama/likeliest.hpp"
#include "tools/llama/model.hpp"

namespace sluice::tools::cuda {

/// bf16 as bits, for code that the host compiler sees.
using Bf16 = std::uint16_t;

// All pointers are device memory, dense and 16-byte aligned unless said otherwise; widths are multiples of 8. Every
// function enqueues on `stream` and returns.

/// Loads every kernel of this host now: loading one later could wait for a kernel that waits for the caller.
/// @throws Error{Errc::device} if this build has no kernels for the current GPU.
void load_kernels();

/// What a forward pass starts with: embeddings of its tokens and the rotations that all layers share.
struct StartArgs {
  const PlacedToken* tokens = nullptr;  ///< [rows], may be pinned host memory
  const Bf16* embeddings = nullptr;     ///< [vocab_size, hidden]
  const double* frequencies = nullptr;  ///< [half], radians per position
  float* residual = nullptr;            ///< [rows, hidden]
  float* rotation = nullptr;            ///< [rows, 2, half]: cosines, then sines
  std::uint32_t rows = 0;
  std::uint32_t hidden = 0;
  std::uint32_t half = 0;  ///< head_dim / 2
};
void start(const StartArgs& args, cudaStream_t stream);

/// out[r, i] = x[r, i] / sqrt(mean(x[r]^2) + eps) * gain[i]
struct NormArgs {
  const float* x = nullptr;     ///< [rows, hidden]
  const float* gain = nullptr;  ///< [hidden]
  Bf16* out = nullptr;          ///< [rows, hidden]
  std::uint32_t rows = 0;
  std::uint32_t hidden = 0;
  float eps = 0.f;
};
void rms_norm(const NormArgs& args, cudaStream_t stream);

/// Rounds to bf16, the first `rotated` heads of each row after turning their pairs (i, i + half).
struct RotateArgs {
  const float* x = nullptr;         ///< [rows, heads, 2 * half]
  const float* rotation = nullptr;  ///< [rows, 2, half]
  Bf16* out = nullptr;              ///< as x
  std::uint32_t rows = 0;
  std::uint32_t heads = 0;
  std::uint32_t rotated = 0;
  std::uint32_t half = 0;
};
void rotate(const RotateArgs& args, cudaStream_t stream);

/// out[r, i] = silu(gate_up[r, i]) * gate_up[r, width + i], silu(g) = g / (1 + exp(-g))
struct SwigluArgs {
  const float* gate_up = nullptr;  ///< [rows, 2, width]
  Bf16* out = nullptr;             ///< [rows, width]
  std::uint32_t rows = 0;
  std::uint32_t width = 0;
};
void swiglu(const SwigluArgs& args, cudaStream_t stream);

/// Rows that the matrix-vector kernel takes. More are cuBLASLt's: from then on the arithmetic costs as much as the
/// weights' way from memory.
inline constexpr std::uint32_t kVectorRows = 4;

/// y[i, j] (=, +=) sum_c x[i, c] * w[j, c]. Device memory, dense.
struct ProductArgs {
  const Bf16* x = nullptr;  ///< [rows, inner]
  const Bf16* w = nullptr;  ///< [outs, inner]
  float* y = nullptr;       ///< [rows, outs]
  std::uint32_t rows = 0;
  std::uint32_t inner = 0;
  std::uint32_t outs = 0;
  bool add = false;
};
/// Sums in float32 in an order that depends on `inner` alone, so that a row's result does not depend on its company.
/// 1 <= rows <= kVectorRows.
void matvec(const ProductArgs& args, cudaStream_t stream);

/// Parts of a row of logits that thread blocks look through, at most.
inline constexpr std::uint32_t kLikeliestParts = 64;

/// out[r] is what `likeliest` says of row r.
struct LikeliestArgs {
  const float* logits = nullptr;   ///< [rows, width]
  std::uint64_t* parts = nullptr;  ///< [rows, kLikeliestParts], scratch
  Likeliest* out = nullptr;        ///< [rows], may be pinned host memory
  std::uint32_t rows = 0;
  std::uint32_t width = 0;
};
void likeliest(const LikeliestArgs& args, cudaStream_t stream);

/// Writes `value` to a word in pinned host memory when the stream gets there: for a thread that watches it, which is
/// quicker than asking CUDA. It says that work is done, not that its results are visible: synchronise for that.
void raise(std::uint64_t* word, std::uint64_t value, cudaStream_t stream);

/// out[i] = random_normal(key, i) * deviation
struct DrawArgs {
  Bf16* out = nullptr;  ///< [count]
  std::uint64_t count = 0;
  std::uint64_t key = 0;
  float deviation = 1.f;
};
void draw(const DrawArgs& args, cudaStream_t stream);

}  // namespace sluice::tools::cuda
