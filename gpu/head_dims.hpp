#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

/// The head dims that kernels are compiled for: what is dispatched, loaded and named in messages follows these lists.
namespace sluice::gpu {

template <std::uint32_t kFirst, std::uint32_t... kOthers>
struct HeadDims {
  [[nodiscard]] static constexpr bool has(std::uint32_t head_dim) noexcept {
    return head_dim == kFirst || ((head_dim == kOthers) || ...);
  }
  /// use(std::integral_constant) of this head_dim, which must be one of the list.
  template <class Use>
  static void with(std::uint32_t head_dim, const Use& use) {
    if (head_dim == kFirst) return use(std::integral_constant<std::uint32_t, kFirst>{});
    if constexpr (sizeof...(kOthers) > 0) HeadDims<kOthers...>::with(head_dim, use);
  }
  /// use(head_dim) of all.
  template <class Use>
  static void each(const Use& use) {
    use(kFirst);
    (use(kOthers), ...);
  }
  /// "64, 128"
  [[nodiscard]] static std::string list() {
    std::string all = std::to_string(kFirst);
    ((all += ", " + std::to_string(kOthers)), ...);
    return all;
  }
};

/// Of decoding, dense prompts, copies of keys, digests.
using KernelHeadDims = HeadDims<64, 96, 128, 192, 256>;
/// Of FlexPrefill, clusters and prefill by warpgroups.
using TunedHeadDims = HeadDims<64, 128>;

}  // namespace sluice::gpu
