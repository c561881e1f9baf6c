#pragma once

#include <concepts>
#include <cstdint>
#include <vector>

namespace sluice::scheduler {

/// Of the heap, that an object holds beside itself.
template <class T>
concept HoldsHeap = requires(const T& object) {
  { object.heap_bytes() } -> std::same_as<std::uint64_t>;
};

/// The same of a vector, and of what it holds.
template <class T>
[[nodiscard]] std::uint64_t heap_bytes(const std::vector<T>& vector) noexcept {
  std::uint64_t bytes = vector.capacity() * sizeof(T);
  if constexpr (HoldsHeap<T>) {
    for (const T& each : vector) bytes += each.heap_bytes();
  } else if constexpr (requires(const T& each) { heap_bytes(each); }) {
    for (const T& each : vector) bytes += heap_bytes(each);
  }
  return bytes;
}

template <class First, class... Others>
[[nodiscard]] std::uint64_t heap_bytes(const std::vector<First>& first, const Others&... others) noexcept
    requires(sizeof...(Others) > 0) {
  return heap_bytes(first) + (heap_bytes(others) + ...);
}

}  // namespace sluice::scheduler
