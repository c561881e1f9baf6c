#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "sluice/error.hpp"

/// What every fuzz target has: one file that defines this function. It returns 0 for every input, accepted or refused;
/// it does not return if a property does not hold or if anything but sluice::Error escapes.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace sluice::test {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return size == 0 ? std::string_view() : std::string_view(reinterpret_cast<const char*>(data), size);
}

/// True if the call returned, false if it threw Error with a message. Other exceptions escape, and end the process.
template <class Call>
[[nodiscard]] bool accepts(Call&& call) {
  try {
    call();
    return true;
  } catch (const Error& error) {
    if (std::string_view(error.what()).empty()) std::abort();
    return false;
  }
}

inline void require_that(bool holds, const char* property, const char* file, int line) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: property does not hold: %s\n", file, line, property);
  std::abort();
}

}  // namespace sluice::test

/// Ends the process, with the property's text, unless it holds. `abort` is what libFuzzer and our driver both notice.
#define FUZZ_REQUIRE(...) ::sluice::test::require_that(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
