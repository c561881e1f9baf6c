#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "tools/llama/model.hpp"
#include "tools/llama/weights.hpp"

namespace sluice::tools {

/// The arithmetic of a Model on one kind of memory. Tokens and row counts were checked by the Model.
class Engine {
 public:
  virtual ~Engine() = default;
  [[nodiscard]] virtual std::uint64_t parameters() const noexcept = 0;
  [[nodiscard]] virtual std::uint32_t threads() const noexcept = 0;
  [[nodiscard]] virtual const char* isa() const noexcept = 0;
  /// As Model::forward; at least one token.
  virtual void forward(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work) const = 0;
  /// As Model::choose.
  virtual void choose(Activations& work, std::uint32_t rows) const = 0;
  /// As Model::decode; enqueued unless an engine has graphs.
  virtual void decode(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work,
                      Launch launch) const;
  /// Of the rows that were chosen last, `first` and those behind it.
  virtual void likeliest(Activations& work, std::span<Likeliest> out) const = 0;
  virtual void logits(Activations& work, std::uint32_t first, std::span<float> out) const = 0;
};

/// Queries, keys and values of one product.
struct QkvViews {
  TensorView q;
  TensorView k;
  TensorView v;
};

/// `qkv` [tokens, q_heads + 2 * kv_heads, head_dim]: the heads of a token's query, then those of its key and its value.
[[nodiscard]] inline QkvViews qkv_views(const TensorView& qkv, std::uint32_t q_heads, std::uint32_t kv_heads) {
  QkvViews views{.q = qkv, .k = qkv, .v = qkv};
  views.q.heads = q_heads;
  views.k.heads = views.v.heads = kv_heads;
  views.k.data = qkv.row(0, q_heads);
  views.v.data = qkv.row(0, q_heads + kv_heads);
  return views;
}

/// Engine of ordinary memory and the CPU, float32.
[[nodiscard]] std::unique_ptr<Engine> make_host_engine(const ModelConfig& config, const WeightSource& source,
                                                       const ModelOptions& options);

/// Engine of a CUDA device, bf16 weights and float32 sums. `options.device` must be a CUDA device.
/// @throws Error{Errc::unsupported} in a build without CUDA and for widths that are no multiple of 8.
[[nodiscard]] std::unique_ptr<Engine> make_cuda_engine(const ModelConfig& config, const WeightSource& source,
                                                       const ModelOptions& options);

}  // namespace sluice::tools
