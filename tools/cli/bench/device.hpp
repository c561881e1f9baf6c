#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/device.hpp"
#include "tools/cli/synthetic/synthetic.hpp"

namespace sluice::tools {

/// Rows [begin, begin + count) of all KV heads as [count, kv_heads, head_dim] in the layout's dtype.
void gather_rows(const SyntheticLayer& layer, std::uint32_t begin, std::uint32_t count, bool values, std::byte* out);

/// The decode steps of a synthetic layer as tensors in device memory.
class DeviceSteps {
 public:
  DeviceSteps(const SyntheticLayer& layer, Device& device);
  [[nodiscard]] TensorView q(std::uint32_t step) const noexcept;
  [[nodiscard]] TensorView k(std::uint32_t step) const noexcept;
  [[nodiscard]] TensorView v(std::uint32_t step) const noexcept;

 private:
  const SyntheticOptions& options_;
  std::unique_ptr<Buffer> q_, k_, v_;
};

/// Dense attention with all keys and values in device memory, in pages of its own: the yardstick. One kernel per layer
/// and step for a batch of sequences, which have the layer's first tokens, on as many copies of the layer as it takes
/// for each sequence to have one of its own, and to outgrow the device's caches.
class DenseOnDevice {
 public:
  /// @param lengths  tokens of each sequence before the step, at most the layer's
  /// @throws Error{Errc::out_of_capacity} if the device cannot hold it.
  DenseOnDevice(const SyntheticLayer& layer, const DeviceSteps& steps, Device& device, std::uint32_t page_tokens,
                std::vector<std::uint32_t> lengths);
  ~DenseOnDevice();
  /// Output of one step of the first sequence: [q_heads, head_dim].
  [[nodiscard]] std::vector<float> attend(std::uint32_t step);
  /// Microseconds per layer, each sample the mean over a burst of kernels.
  [[nodiscard]] std::vector<double> time(std::uint32_t samples);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::tools
