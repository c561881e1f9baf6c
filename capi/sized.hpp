#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "capi/guard.hpp"

/// Structs whose size the caller says. No struct of sluice.h has padding at its end: what a newer one has there would
/// be filled with what an older caller left in it.
namespace sluice::capi {

/// A larger one was never set: it is what lay in the memory.
inline constexpr std::uint32_t kMostStructBytes = 4096;

/// Checks the size that a struct of `name` in sluice.h says it has, of which this library knows `known` bytes.
inline void require_size(std::uint32_t size, std::size_t known, const char* name) {
  if (size >= sizeof size && size % sizeof size == 0 && size <= kMostStructBytes) return;
  throw Error(Errc::invalid_argument, std::string(name) + ".struct_size is " + std::to_string(size) +
                                          "; set it to sizeof(" + name + "), which is " + std::to_string(known) +
                                          " here");
}

/// What lies at `from`, which says to have `size` bytes: fields that it has not are those of `defaults`.
template <class T>
[[nodiscard]] T read_bytes(const void* from, std::uint32_t size, const char* name, const T& defaults) {
  static_assert(std::is_trivially_copyable_v<T>);
  require_size(size, sizeof(T), name);
  const auto* const bytes = static_cast<const unsigned char*>(from);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0)
      throw Error(Errc::unsupported, std::string(name) + " has a field behind its first " + std::to_string(sizeof(T)) +
                                         " bytes, which this library (sluice_abi_version() " +
                                         std::to_string(SLUICE_ABI_VERSION) +
                                         ") does not know; load a newer one, or leave the field 0");
  }
  T value = defaults;
  std::memcpy(&value, bytes, std::min<std::size_t>(size, sizeof(T)));
  return value;
}

template <class T>
[[nodiscard]] T read_sized(const T* from, const char* name, const T& defaults = {}) {
  require_pointer(from, name);
  return read_bytes(from, from->struct_size, name, defaults);
}

/// Element `i` of an array whose first one says how far it is from the next.
template <class T>
[[nodiscard]] T* element(T* first, std::size_t i) noexcept {
  using Byte = std::conditional_t<std::is_const_v<T>, const unsigned char, unsigned char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(first) + i * first->struct_size);
}

/// Checks that all elements of an array have the size of the first one.
template <class T>
void require_array(const T* first, std::size_t count, const char* name) {
  if (count == 0) return;
  require_pointer(first, name);
  require_size(first->struct_size, sizeof(T), name);
  for (std::size_t i = 1; i < count; ++i) {
    const std::uint32_t size = element(first, i)->struct_size;
    require(size == first->struct_size, std::string(name) + " " + std::to_string(i) + " has struct_size " +
                                            std::to_string(size) + ", and the first one " +
                                            std::to_string(first->struct_size) +
                                            "; set it to the same in all of an array");
  }
}

/// Whether results can be written there; to be asked before anything is done.
template <class T>
void require_sized(const T* to, const char* name) {
  require_pointer(to, name);
  require_size(to->struct_size, sizeof(T), name);
}

/// As much of `value` as there is room for; what the caller has behind it becomes 0. Its size stays as it is.
template <class T>
void write_sized(const T& value, T* to, const char* name) {
  static_assert(std::is_trivially_copyable_v<T>);
  require_sized(to, name);
  const std::uint32_t size = to->struct_size;
  auto* const bytes = reinterpret_cast<unsigned char*>(to);
  const std::size_t known = std::min<std::size_t>(size, sizeof(T));
  std::memcpy(bytes + sizeof size, reinterpret_cast<const unsigned char*>(&value) + sizeof size, known - sizeof size);
  std::memset(bytes + known, 0, size - known);
}

/// A struct whose size the caller gives apart, as its fields are still to be set: becomes `defaults`.
template <class T>
void init_sized(T* to, std::size_t struct_size, const T& defaults, const char* name) {
  require_pointer(to, "options");
  require(struct_size <= kMostStructBytes,
          "struct_size is " + std::to_string(struct_size) + "; give it sizeof(" + name + ")");
  const auto size = static_cast<std::uint32_t>(struct_size);
  require_size(size, sizeof(T), name);
  to->struct_size = size;
  write_sized(defaults, to, name);
}

}  // namespace sluice::capi
