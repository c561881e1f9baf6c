#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sluice/device.hpp"
#include "tools/llama/cuda/kernels.hpp"
#include "tools/llama/weights.hpp"

namespace sluice::tools::cuda {

/// A stack of matrices in device memory, bf16.
struct DeviceMatrix {
  std::uint32_t outs = 0;
  std::uint32_t inner = 0;
  std::unique_ptr<Buffer> memory;  ///< [outs, inner]

  [[nodiscard]] const Bf16* values() const noexcept { return reinterpret_cast<const Bf16*>(memory->data()); }
};

/// The gain of a norm in device memory, float32.
struct DeviceGain {
  std::unique_ptr<Buffer> memory;  ///< [hidden]

  [[nodiscard]] const float* values() const noexcept { return reinterpret_cast<const float*>(memory->data()); }
};

struct DeviceLayer {
  DeviceGain attention_norm;
  DeviceMatrix qkv;
  DeviceMatrix output;
  DeviceGain mlp_norm;
  DeviceMatrix gate_up;
  DeviceMatrix down;
};

struct DeviceWeights {
  DeviceMatrix embeddings;
  std::vector<DeviceLayer> layers;
  DeviceGain final_norm;
  DeviceMatrix own_head;                ///< without memory if tied to the embeddings
  std::unique_ptr<Buffer> frequencies;  ///< of RoPE: [head_dim / 2] double
  std::uint64_t parameters = 0;

  [[nodiscard]] const DeviceMatrix& head() const noexcept { return own_head.memory ? own_head : embeddings; }
};

/// Rounds a checkpoint to bf16 and copies it, or draws weights on the device. Returns when they are there.
/// The device must be the current one.
/// @throws Error as require_match, require_memory, Checkpoint::read and Device::allocate.
[[nodiscard]] DeviceWeights load_device_weights(const WeightSource& source, const ModelConfig& config, Device& device);

}  // namespace sluice::tools::cuda
