#pragma once

#include <span>
#include <string>
#include <string_view>

#include "tools/cli/eval/tasks.hpp"

namespace sluice::tools {

/// The prompts of these cells as JSON lines, for other programs to answer: task, length_tokens, seed, prompt and
/// answer. A code point is a byte.
/// @throws Error{Errc::invalid_argument} for a length that a task cannot have
[[nodiscard]] std::string prompts_of(std::span<const Cell> cells, const TaskEvalOptions& options,
                                     std::string_view haystack);

}  // namespace sluice::tools
