#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/audit.hpp"
#include "sluice/device.hpp"
#include "sluice/policy.hpp"
#include "sluice/prefill.hpp"
#include "sluice/step/page.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/llama/engine_session.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/prompt_cache.hpp"
#include "tools/llama/tasks.hpp"

namespace sluice::tools {

/// What the answer's tokens lost in one (layer, query head), over the prompts that a policy failed.
struct LostHead {
  std::uint32_t layer = 0;
  std::uint32_t head = 0;
  std::uint64_t steps = 0;  ///< audited steps in which the head wanted the answer's tokens
  double mass = 0.0;        ///< softmax mass on them, summed over those steps
  double kept = 0.0;        ///< the attended part of it
};

/// A policy's results over the prompts of one (task, length).
struct TaskScore {
  std::uint32_t prompts = 0;
  std::uint32_t solved = 0;
  PageLayout layout;             ///< of the engine that it ran in
  std::uint64_t far_budget = 0;  ///< tokens of a layer that the policy may attend far; 0: any number
  DecodeScore decoded;
  EngineStats prompt;                      ///< of the prompts' prefill
  double prefill_s = 0.0;                  ///< likewise, wall time
  std::vector<LostHead> lost;              ///< [layers, q_heads]; empty if nothing was failed or audited
  /// What it said to each prompt; of one without an answer, what came in the prompt itself and was to be predicted.
  std::vector<std::vector<int>> outputs;
  std::vector<std::vector<float>> logits;  ///< [steps, vocabulary] for each prompt; empty unless asked for
};

/// A task at a length, for all policies.
struct Cell {
  TaskKind kind{};
  std::uint32_t length = 0;
};

struct TaskEvalOptions {
  std::uint32_t count = 16;
  std::uint32_t decode_prompt = 24;  ///< last prompt tokens that are read under the policy
  std::uint32_t max_tokens = 0;      ///< 0: as many as the answer has
  std::uint64_t seed = 0;
  double near = 0.0;    ///< share of a sequence that device memory has room for
  bool logits = false;  ///< keeps those of every answer, see TaskScore; of what has no answer they are always kept
};

/// Policies on the testbed's tasks. Each prompt is prefilled once; each policy then starts from a fork of it, reads the
/// last tokens of the question and answers.
class TaskEvaluation {
 public:
  TaskEvaluation(const TaskEvalOptions& options, const EngineFlags& flags, const Model& model,
                 std::vector<PolicySpec> policies, std::shared_ptr<Device> device, std::string haystack);

  [[nodiscard]] std::vector<Task> tasks_of(const Cell& cell) const;
  /// @param option, what  for the message
  /// @throws Error{Errc::invalid_argument} if a prompt and its answer exceed the model's context, before anything runs.
  void check(std::span<const Task> tasks, const std::string& option, const std::string& what,
             std::uint32_t length) const;
  /// Every policy's, after prompts that were prefilled as `prefill` says. Interrupted, the scores of policies that have
  /// not answered all prompts have none. `what`: the tasks' name, for the bar.
  std::vector<TaskScore> run(std::span<const Task> tasks, const std::string& what, const PrefillSpec& prefill,
                             ProgressBar& bar);
  /// From here on these policies, as many as before.
  void replace_policies(std::vector<PolicySpec> policies) { policies_ = std::move(policies); }

 private:
  /// Of the longest prompt with its answer.
  [[nodiscard]] std::size_t tokens_of(std::span<const Task> tasks) const;
  void run(std::span<const Task> tasks, const PrefillSpec& prefill, std::span<TaskScore> scores,
           const std::function<void(std::size_t)>& told);
  struct Prefilled;
  /// The tasks' prompts, but for what is read under the policy.
  [[nodiscard]] std::vector<Prefilled> prefilled(const PrefillSpec& prefill, std::span<const Task> tasks) const;
  /// The policies that one engine serves, on all tasks.
  void run(const EngineGroup& group, std::span<const Task> tasks, std::span<const Prefilled> prompts,
           std::span<TaskScore> scores, const std::function<void(std::size_t)>& told);
  /// What the question's tokens say of the next ones, for a task without an answer.
  void predict(EngineSession& session, std::span<const int> question, TaskScore& score) const;
  void answer(sluice::Engine& engine, const EngineSession& prompt, std::span<const int> question, const Task& task,
              const PolicySpec& policy, TaskScore& score);
  void add_lost(const AuditReport& report, TaskScore& score) const;
  [[nodiscard]] std::size_t answer_limit(const Task& task) const {
    return options_.max_tokens == 0 ? task.answer.size() : options_.max_tokens;
  }

  TaskEvalOptions options_;
  EngineFlags flags_;
  const Model& model_;
  std::vector<PolicySpec> policies_;
  std::shared_ptr<Device> device_;
  std::string haystack_;
};

}  // namespace sluice::tools
