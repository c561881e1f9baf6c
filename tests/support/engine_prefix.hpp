#pragma once

#include <cstdint>
#include <vector>

#include "tests/support/engine_policies.hpp"

/// What cases of prefixes share.
namespace sluice::test::prefixes {

using Ids = std::vector<std::int32_t>;

/// Names of a story's tokens; `first` of them are those that story 0 has.
inline Ids ids_of(std::uint32_t tokens, std::uint32_t story = 0, std::uint32_t first = 0) {
  Ids ids;
  for (std::uint32_t i = 0; i < tokens; ++i)
    ids.push_back(static_cast<std::int32_t>(i + (i < first ? 0 : 100'000 * story)));
  return ids;
}

/// A sequence of a story that begins with what is known of these tokens.
inline Teller begin_named(Engine& engine, const Story& story, const char* policy, const Ids& prompt,
                          std::uint64_t salt = 0) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy), prompt, salt)};
  teller.at = engine.tokens(teller.id);
  return teller;
}

inline constexpr const char* kFull = "full:near=0";

}  // namespace sluice::test::prefixes
