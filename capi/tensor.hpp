#pragma once

#include "sluice.h"
#include "sluice/tensor.hpp"

namespace sluice::capi {

/// Where an engine computes.
struct Place {
  std::int32_t device_type = SLUICE_DEVICE_CPU;  ///< CPU or CUDA
  std::int32_t device_id = 0;
};

/// `tensor` as the engine takes it, which compares its shape with what a call needs. `name` is the argument's.
/// @throws Error{Errc::invalid_argument} naming what is wrong, what it should be, and what to do about it.
[[nodiscard]] TensorView readable(const sluice_tensor* tensor, const char* name, const Place& place);
/// Likewise `v` of a call: none if it is null and values are `latent`, parts of keys.
[[nodiscard]] TensorView values(const sluice_tensor* v, bool latent, const Place& place);
/// Likewise one that is written: its rows must not overlap.
[[nodiscard]] MutableTensorView writable(const sluice_tensor* tensor, const char* name, const Place& place);
/// Log-sums [rows, q_heads], compact f32; null if `tensor` is.
[[nodiscard]] float* log_sums(const sluice_tensor* tensor, std::uint32_t rows, std::uint32_t q_heads,
                              const Place& place);

}  // namespace sluice::capi
