#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace sluice {

/// Element type of keys, values, queries and outputs. fp8_e4m3 is one of keys and values in host memory alone, with a
/// scale for each row, see E4m3.
enum class DType : std::uint8_t { f32, f16, bf16, fp8_e4m3 };

/// False for a value that names no element type, as a caller of another language may pass.
[[nodiscard]] constexpr bool is_valid(DType type) noexcept { return type <= DType::fp8_e4m3; }
/// What tensors may have: rows with scales have no place in them.
[[nodiscard]] constexpr bool is_tensor_type(DType type) noexcept { return type <= DType::bf16; }

[[nodiscard]] constexpr std::uint32_t bytes_of(DType type) noexcept {
  return type == DType::f32 ? 4 : type == DType::fp8_e4m3 ? 1 : 2;
}

[[nodiscard]] constexpr const char* to_string(DType type) noexcept {
  switch (type) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::fp8_e4m3: return "fp8_e4m3";
  }
  return "unknown";
}

/// A borrowed rank-3 tensor [tokens, heads, head_dim] in memory of the engine's device (ordinary memory with
/// the embedded host device). Head rows are dense; the two outer strides are free, in elements.
/// `data` may be null only if `tokens` is 0.
template <class Byte>
struct BasicTensorView {
  Byte* data = nullptr;
  DType dtype = DType::f32;
  std::uint32_t tokens = 0;
  std::uint32_t heads = 0;
  std::uint32_t head_dim = 0;
  std::uint64_t token_stride = 0;  ///< elements from one token to the next
  std::uint64_t head_stride = 0;   ///< elements from one head to the next

  [[nodiscard]] constexpr Byte* row(std::uint64_t token, std::uint64_t head) const noexcept {
    return data + (token * token_stride + head * head_stride) * bytes_of(dtype);
  }
  /// What may be written can be read: a MutableTensorView is taken where a TensorView is wanted.
  template <class Read>
  requires(!std::is_const_v<Byte> && std::is_same_v<Read, const Byte>) [[nodiscard]] constexpr
  operator BasicTensorView<Read>() const noexcept {
    return {.data = data,
            .dtype = dtype,
            .tokens = tokens,
            .heads = heads,
            .head_dim = head_dim,
            .token_stride = token_stride,
            .head_stride = head_stride};
  }
};

using TensorView = BasicTensorView<const std::byte>;
using MutableTensorView = BasicTensorView<std::byte>;

/// A dense [tokens, heads, head_dim] view over `data`: a MutableTensorView, or of const elements a TensorView.
template <class T>
[[nodiscard]] auto dense_view(T* data, DType dtype, std::uint32_t tokens, std::uint32_t heads, std::uint32_t head_dim) noexcept {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return BasicTensorView<Byte>{.data = reinterpret_cast<Byte*>(data),
                               .dtype = dtype,
                               .tokens = tokens,
                               .heads = heads,
                               .head_dim = head_dim,
                               .token_stride = std::uint64_t{heads} * head_dim,
                               .head_stride = head_dim};
}

}  // namespace sluice
