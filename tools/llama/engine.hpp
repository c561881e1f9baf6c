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
  /// As Model::logits.
  virtual void logits(Activations& work, std::uint32_t rows, std::span<float> out) const = 0;
};

/// Engine of ordinary memory and the CPU, float32.
[[nodiscard]] std::unique_ptr<Engine> make_host_engine(const ModelConfig& config, const WeightSource& source,
                                                       const ModelOptions& options);

/// Engine of a CUDA device, bf16 weights and float32 sums. `options.device` must be a CUDA device.
/// @throws Error{Errc::unsupported} in a build without CUDA and for widths that are no multiple of 8.
[[nodiscard]] std::unique_ptr<Engine> make_cuda_engine(const ModelConfig& config, const WeightSource& source,
                                                       const ModelOptions& options);

}  // namespace sluice::tools
