#pragma once

#include <cstddef>
#include <vector>

#include "tools/llama/conversation.hpp"

namespace sluice::test {

/// The next `count` greedy tokens; the last of them is not decoded any more.
inline std::vector<int> decode_greedily(tools::Conversation& session, std::size_t count) {
  std::vector<int> tokens;
  while (tokens.size() < count) {
    tokens.push_back(session.best());
    if (tokens.size() < count) session.decode(tokens.back());
  }
  return tokens;
}

}  // namespace sluice::test
