#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "sluice/tensor.hpp"
#include "sluice/units.hpp"
#include "tools/llama/config.hpp"

namespace sluice::tools {

struct ModelOptions {
  /// Threads of the matrix products, the caller's included. 0: as many as the process may use. [0, 4096]
  std::uint32_t threads = 0;
};

/// One attention layer, as the model asks its host for it. float32; valid during the call.
struct AttentionCall {
  LayerId layer;
  TensorView q;           ///< [rows, q_heads, head_dim], after RoPE
  TensorView k;           ///< [rows, kv_heads, head_dim], after RoPE
  TensorView v;           ///< [rows, kv_heads, head_dim]
  MutableTensorView out;  ///< [rows, q_heads, head_dim], to be written
};
using Attend = std::function<void(const AttentionCall&)>;

/// Buffers of a forward pass. They grow to the largest number of rows seen and are then reused.
struct Activations {
  std::uint32_t rows = 0;       ///< of the last forward pass
  std::vector<float> residual;  ///< [rows, hidden]
  std::vector<float> normed;    ///< [rows, hidden]
  std::vector<float> qkv;       ///< [rows, q_heads + 2 * kv_heads, head_dim]
  std::vector<float> attended;  ///< [rows, q_heads, head_dim]
  std::vector<float> gate_up;   ///< [rows, 2, intermediate]
  std::vector<float> rotation;  ///< [rows, 2, head_dim / 2]: cosines, then sines
};

/// One token of a forward pass and where it stands in its sequence.
struct PlacedToken {
  int token = 0;
  std::uint32_t position = 0;
};

/// A Llama (RMSNorm, rotate-half RoPE, grouped-query attention, SwiGLU) on the CPU, attention excepted.
/// Weights are held in float32 whatever the file has: 4 bytes per parameter, so this host is for models of up
/// to a few billion parameters. Results do not depend on the number of threads.
///
/// Thread safety: const members may be called from several threads with different Activations; they share
/// the model's threads.
class Model {
 public:
  /// Loads config.json and the safetensors of a Hugging Face directory.
  /// @throws Error as load_config and Checkpoint; Error{Errc::corrupt} if the two disagree.
  explicit Model(const std::filesystem::path& directory, const ModelOptions& options = {});
  ~Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;

  [[nodiscard]] const ModelConfig& config() const noexcept;
  [[nodiscard]] std::uint64_t parameters() const noexcept;
  [[nodiscard]] std::uint32_t threads() const noexcept;
  /// Instruction set of the products in use.
  [[nodiscard]] const char* isa() const noexcept;

  /// @throws Error{Errc::invalid_argument} unless the vocabulary has this token.
  void require_token(int token) const;

  /// Runs all layers for `tokens`, which may belong to one sequence or to many: only `attend`, called once per
  /// layer in ascending order, knows. Leaves the last layer's output in `work.residual`.
  /// @throws Error{Errc::invalid_argument} for a token outside the vocabulary, before anything is computed;
  ///         whatever `attend` throws.
  void forward(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work) const;

  /// Logits of the last `rows` rows of the last forward pass; 1 <= rows <= work.rows.
  /// @param out  [rows, vocab_size]
  void logits(Activations& work, std::uint32_t rows, std::span<float> out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::tools
