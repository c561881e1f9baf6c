#pragma once

#include <initializer_list>
#include <utility>

#include "sluice/engine_options.hpp"

namespace sluice::test {

/// The same options, of an engine for these policies.
inline EngineOptions named(EngineOptions options, std::initializer_list<const char*> policies) {
  options.policies.clear();
  for (const char* const text : policies) options.policies.push_back(parse_policy(text));
  return options;
}

}  // namespace sluice::test
