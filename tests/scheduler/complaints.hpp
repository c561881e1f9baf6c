#pragma once

#include <initializer_list>
#include <string>

#include "sluice/error.hpp"
#include "sluice/policy.hpp"
#include "tests/support/catch.hpp"

namespace sluice::scheduler::test {

/// What is said of a call that is refused as an argument is wrong; empty if it is not.
template <class Call>
std::string complaint_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::invalid_argument);
    return error.what();
  }
  return "";
}

/// What is said of a policy that is refused; empty if it is not.
inline std::string complaint(const std::string& text) {
  return complaint_of([&] { (void)parse_policy(text); });
}

/// Every part occurs in the message.
inline void expect(const std::string& message, std::initializer_list<const char*> parts) {
  for (const std::string part : parts) {
    CAPTURE(message, part);
    REQUIRE(message.find(part) != std::string::npos);
  }
}

}  // namespace sluice::scheduler::test
