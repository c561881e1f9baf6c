#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/llama/tasks.hpp"

namespace CLI {
class App;
}

namespace sluice::tools {

/// Text that is read on under every policy, to compare what each predicts.
struct PassageFlags {
  std::string text;  ///< file; empty: none
  std::string lengths = "8K";
  std::uint32_t tokens = 256;  ///< last ones of a passage that are read under the policy
};

void add_passage_flags(CLI::App& command, PassageFlags& flags);

/// Lengths of passages; none without a text.
/// @throws Error{Errc::invalid_argument} for lengths that leave nothing to read before what is compared.
[[nodiscard]] std::vector<std::uint32_t> passage_lengths(const PassageFlags& flags);

/// Passages of so many tokens, BOS and a byte for each other, that do not overlap and are evenly spread over the text:
/// tasks without an answer.
/// @throws Error{Errc::invalid_argument} if the text has no room for them.
[[nodiscard]] std::vector<Task> passages_of(std::string_view text, std::uint32_t length_tokens, std::uint32_t count);

}  // namespace sluice::tools
