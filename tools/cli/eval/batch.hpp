#pragma once

#include <cstddef>
#include <span>

#include "sluice/shape.hpp"
#include "tools/llama/tasks.hpp"

namespace sluice::tools {

/// How many of the tasks, from the first, are read before any is answered: 16 at most, whose prompts take 1 GiB of host
/// memory together (see PromptCache), or one that takes more. 0 of none.
[[nodiscard]] std::size_t batch_of(std::span<const Task> tasks, const AttentionShape& shape) noexcept;

}  // namespace sluice::tools
