#pragma once

#include <span>
#include <string>
#include <vector>

#include "tools/cli/eval/answers.hpp"
#include "tools/cli/text/report.hpp"
#include "tools/llama/tasks.hpp"

namespace sluice::tools {

/// The name of all tasks of a length.
inline constexpr const char* kAllTasks = "all";

/// What came of the tasks, as `python -m sluice eval --json` has it: {"tasks": {"results": [...], "items": [...]}}.
/// There is no "failed": a policy that fails ends the run. Results: by task and length, in the tasks' order, every
/// policy's share of right answers beside those of the first policy, which is dense attention; and over all tasks of a
/// length, if it has several. Items: every task with every policy's answer.
/// @param answers  of the first tasks, every policy's
[[nodiscard]] Json tasks_json(std::span<const Task> tasks, const std::vector<std::vector<Answer>>& answers,
                              const std::vector<NamedPolicy>& policies);

/// The results of it as a table for people.
[[nodiscard]] Table tasks_table(const Json& results);

}  // namespace sluice::tools
