#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/policy.hpp"
#include "sluice/prefill.hpp"
#include "tools/cli/engine_columns.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/llama/engine_session.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/prompt_cache.hpp"
#include "tools/llama/tasks.hpp"

namespace sluice::tools {

/// A policy as the user wrote it, for tables.
struct NamedPolicy {
  std::string name;
  PolicySpec spec;
};

/// What a policy said to one task.
struct Answer {
  std::vector<int> output;
  bool right = false;
  ReadShares read;                 ///< over question and answer
  double prompt_blocks = 1.0;      ///< of dense attention's blocks, the share that the prompt computed
  std::optional<double> coverage;  ///< mean share of exact softmax mass that was attended; none: not audited
  double bypassed = 0.0;           ///< share of query heads, where it was
};

struct AnswerOptions {
  std::uint32_t decode_prompt = 24;  ///< last prompt tokens, the question, that are read under the policy
  std::uint32_t max_tokens = 0;      ///< see answer_limit
  double near = 0.0;                 ///< share of a sequence that device memory has room for
  PrefillSpec prefill;
};

/// Policies on tasks. Each prompt is prefilled once; each policy then starts from a fork of it, reads the question and
/// answers greedily. The first policy is the one that others are held against: where prompts are attended sparsely, it
/// has dense ones of its own.
class Answers {
 public:
  Answers(const AnswerOptions& options, const EngineFlags& flags, const Model& model, std::vector<NamedPolicy> policies,
          std::shared_ptr<Device> device);

  /// @throws Error{Errc::invalid_argument} naming the line if a prompt and its answer exceed the model's context,
  /// before anything runs.
  void check(std::span<const Task> tasks, const std::string& file) const;
  /// By task every policy's, in the tasks' order. Interrupted, those of the tasks before the first that not every
  /// policy has answered.
  [[nodiscard]] std::vector<std::vector<Answer>> run(std::span<const Task> tasks, ProgressBar& bar) const;

 private:
  struct Prompt;
  /// Of the longest task, with its answer.
  [[nodiscard]] std::uint32_t tokens_of(std::span<const Task> tasks) const;
  using Reads = std::function<void(const Task&)>;
  /// The tasks' prompts, but for their questions. Calls `reads` with every chunk.
  [[nodiscard]] std::vector<Prompt> prefilled(std::span<const Task> tasks, const PrefillSpec& prefill,
                                              const Reads& reads) const;
  using Told = std::function<void(const Task&, const NamedPolicy&)>;
  /// Under policies [first, last).
  void answer_all(std::size_t first, std::size_t last, std::span<const Task> tasks, std::span<const Prompt> prompts,
                  std::span<std::vector<Answer>> answers, const Told& told) const;
  /// Under these policies, which one engine serves.
  void answer_all(std::span<const std::size_t> policies, std::uint32_t page_tokens, std::span<const Task> tasks,
                  std::span<const Prompt> prompts, std::span<std::vector<Answer>> answers, const Told& told) const;
  [[nodiscard]] Answer answer(sluice::Engine& engine, const EngineSession& prompt, std::span<const int> question,
                              const Task& task, const PolicySpec& policy) const;

  AnswerOptions options_;
  EngineFlags flags_;
  const Model& model_;
  std::vector<NamedPolicy> policies_;
  std::vector<PolicySpec> specs_;
  std::shared_ptr<Device> device_;
};

}  // namespace sluice::tools
