#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/tensor.hpp"
#include "sluice/units.hpp"
#include "tools/llama/config.hpp"
#include "tools/llama/generation_config.hpp"
#include "tools/llama/likeliest.hpp"

namespace sluice::tools {

class Engine;
struct WeightSource;

/// Called while weights load, with the bytes that are in place and that all of them take there. What it throws ends
/// the loading.
using LoadProgress = std::function<void(std::uint64_t done_bytes, std::uint64_t total_bytes)>;

struct ModelOptions {
  /// Threads of the matrix products on the CPU, the caller's included. 0: as many as the process may use. [0, 4096]
  std::uint32_t threads = 0;
  /// A CUDA device: weights and arithmetic are there, in bf16. Null or the embedded host device: on the CPU, float32.
  std::shared_ptr<Device> device = nullptr;
  LoadProgress progress = {};
};

/// One attention layer, as the model asks its host for it. On the CPU float32, valid during the call. On a device
/// bf16 in its memory: q, k and v are ready for what is enqueued on the Activations' stream from now on, and what
/// the model enqueues there afterwards reads `out`.
struct AttentionCall {
  LayerId layer;
  TensorView q;           ///< [rows, q_heads, head_dim], after RoPE
  TensorView k;           ///< [rows, kv_heads, head_dim], after RoPE
  TensorView v;           ///< [rows, kv_heads, head_dim]
  MutableTensorView out;  ///< [rows, q_heads, head_dim], to be written
  /// As q, if Activations::rehearse says so and the layer is not the first: the attention input of the layer before
  /// times this layer's query weights, after RoPE. Else without rows.
  TensorView rehearsed{};
};
using Attend = std::function<void(const AttentionCall&)>;

/// How a forward gets to a device.
enum class Launch : std::uint8_t {
  enqueue,  ///< kernel by kernel
  /// As one graph, which is captured the second time that there are as many rows and the same Activations::variant,
  /// and replayed from then on: what `attend` enqueues must be the same every time. Enqueued where there are no graphs.
  graph,
};

/// Buffers of a forward pass; what they are is the model's affair. They grow to the largest number of rows seen and
/// are then reused, by one model only.
struct Activations {
  class Memory {
   public:
    virtual ~Memory() = default;
  };

  std::uint32_t rows = 0;                     ///< of the last forward pass
  std::uint32_t chosen = 0;                   ///< so many of them, the last ones, have logits
  std::uint64_t replays = 0;                  ///< forward passes so far that were a graph
  std::uint32_t variant = 0;                  ///< of what attends as many rows otherwise; each has a graph of its own
  bool rehearse = false;                      ///< calls have rehearsed queries; not on a device
  Stream* stream = nullptr;                   ///< of the model's device, which needs one; else unused
  std::chrono::milliseconds timeout{30'000};  ///< of every wait for the stream
  std::unique_ptr<Memory> memory;
};

/// One token of a forward pass and where it stands in its sequence.
struct PlacedToken {
  int token = 0;
  std::uint32_t position = 0;
};

/// A Llama (RMSNorm, rotate-half RoPE, grouped-query attention, SwiGLU), attention excepted.
/// On the CPU weights are held in float32 whatever the file has: 4 bytes per parameter, so this is for models of up
/// to a few billion parameters, and results do not depend on the number of threads. On a CUDA device weights and the
/// inputs of products are bf16, the residual stream, norms and sums float32.
///
/// Thread safety: const members may be called from several threads with different Activations; they share
/// the model's threads.
class Model {
 public:
  /// Loads config.json, generation_config.json if there is one, and the safetensors of a Hugging Face directory.
  /// Memory is compared with what the weights take before they are read.
  /// @throws Error as load_config, load_generation_config and Checkpoint; Error{Errc::corrupt} if files disagree;
  ///         Error{Errc::unsupported} for a tensor that config.json does not account for.
  /// @throws Error{Errc::unsupported} for a device other than the host's in a build without CUDA, and for shapes that
  ///         its kernels lack; Error{Errc::out_of_capacity} if host or device has too little memory.
  explicit Model(const std::filesystem::path& directory, const ModelOptions& options = {});
  /// A model of random weights, the same on every device: activations stay finite, the text is noise. Weights are
  /// drawn where they are kept.
  /// @throws Error{Errc::out_of_capacity} if they exceed the memory; else as the constructor.
  [[nodiscard]] static Model random(const ModelConfig& config, std::uint64_t seed, const ModelOptions& options = {});
  ~Model();
  Model(Model&&) noexcept;
  Model& operator=(Model&&) noexcept;

  /// End-of-text ids are generation_config.json's where it has some.
  [[nodiscard]] const ModelConfig& config() const noexcept;
  /// Empty for random weights.
  [[nodiscard]] const GenerationConfig& generation() const noexcept;
  /// Element type for a KV cache that loses nothing of what the checkpoint's own type holds: that type on the CPU; bf16
  /// on a device, where keys and values are bf16, and for random weights, which are.
  [[nodiscard]] DType kv_dtype() const noexcept;
  [[nodiscard]] std::uint64_t parameters() const noexcept;
  [[nodiscard]] std::uint32_t threads() const noexcept;
  /// The device that holds weights and activations; null: ordinary memory and the CPU.
  [[nodiscard]] Device* device() const noexcept;
  /// Instruction set or library of the products in use.
  [[nodiscard]] const char* isa() const noexcept;

  /// @throws Error{Errc::invalid_argument} unless the vocabulary has this token.
  void require_token(int token) const;

  /// Runs all layers for `tokens`, which may belong to one sequence or to many: only `attend`, called once per
  /// layer in ascending order, knows. On a device, returns once everything is queued on `work.stream`.
  /// @throws Error{Errc::invalid_argument} for a token outside the vocabulary, before anything is computed;
  ///         whatever `attend` throws.
  void forward(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work) const;

  /// Logits and likeliest tokens after the last `rows` rows of the last forward pass; 1 <= rows <= work.rows. On a
  /// device, returns once they are queued on `work.stream`.
  void choose(Activations& work, std::uint32_t rows) const;
  /// `forward`, at least one token, and `choose` for all of them.
  /// @throws as forward
  void decode(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work, Launch launch) const;

  /// What was chosen last, from its first row on. On a device, waits for the stream, and so reports what failed there.
  /// @param out  at most as many as rows
  void likeliest(Activations& work, std::span<Likeliest> out) const;
  /// The logits of its rows from `first` on.
  /// @param out  [any, vocab_size]
  void chosen_logits(Activations& work, std::uint32_t first, std::span<float> out) const;
  /// `choose` and `chosen_logits` of all its rows.
  /// @param out  [rows, vocab_size]
  void logits(Activations& work, std::uint32_t rows, std::span<float> out) const;

 private:
  Model(ModelConfig config, const WeightSource& source, const ModelOptions& options);
  [[nodiscard]] static Model load(const std::filesystem::path& directory, const ModelOptions& options);

  ModelConfig config_;
  GenerationConfig generation_;
  DType kv_dtype_ = DType::bf16;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace sluice::tools
