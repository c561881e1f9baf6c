#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "sluice/error.hpp"

namespace sluice::test {

/// The Error that a call ended with; nothing if it returned.
struct Failure {
  std::optional<Errc> code;
  std::string message;
};

template <class Call>
Failure failure_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {};
}

/// Whether a message names all of these.
inline bool mentions(std::string_view message, std::initializer_list<std::string_view> words) {
  for (const std::string_view word : words) {
    if (message.find(word) == std::string_view::npos) return false;
  }
  return true;
}

}  // namespace sluice::test
