#pragma once

#include <optional>
#include <string>

#include "sluice/error.hpp"
#include "tests/soak/model.hpp"

namespace sluice::test {

/// @throws Failure unless it holds
inline void require(bool holds, const std::string& what) {
  if (!holds) throw Failure(what);
}

/// What a call ends with; nothing if it does not fail.
template <class Call>
[[nodiscard]] std::optional<Errc> error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return std::nullopt;
}

}  // namespace sluice::test
