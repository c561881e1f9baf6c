#include "tools/cli/eval_tasks.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "sluice/error.hpp"
#include "tools/cli/interrupt.hpp"
#include "tools/llama/sampler.hpp"
#include "tools/llama/session.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

constexpr std::size_t kBosTokens = 1;

/// A prompt and what it cost.
struct Prefilled {
  PromptCache cache;
  PromptStats stats;
  double seconds = 0.0;
};

Prefilled prefilled(const Model& model, Runtime& runtime, const PrefillSpec& prefill, std::span<const int> tokens) {
  Prefilled result;
  Session session(model, runtime, parse_policy("full"), prefill);
  const auto start = Clock::now();
  const auto stop = [&](std::uint32_t, std::uint32_t) {
    if (!interrupted()) return;
    runtime.synchronize();  // A GPU may still work on the session's tensors.
    throw Interrupted();
  };
  session.prefill(tokens, stop, &result.cache);
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  runtime.synchronize();
  result.stats = session.stats().prompt;
  return result;
}

/// Positions of the answer's tokens: a byte is a token, behind BOS.
std::vector<std::uint32_t> evidence_of(const Task& task) {
  std::vector<std::uint32_t> tokens(task.evidence_end - task.evidence_begin);
  std::iota(tokens.begin(), tokens.end(), static_cast<std::uint32_t>(kBosTokens + task.evidence_begin));
  return tokens;
}

}  // namespace

TaskEvaluation::TaskEvaluation(const TaskEvalOptions& options, const RuntimeFlags& flags, const Model& model,
                               std::vector<PolicySpec> policies, std::shared_ptr<Device> device, std::string haystack)
    : options_(options),
      flags_(flags),
      model_(model),
      policies_(std::move(policies)),
      device_(std::move(device)),
      haystack_(std::move(haystack)) {}

std::vector<Task> TaskEvaluation::tasks_of(const Cell& cell) const {
  std::vector<Task> tasks;
  for (std::uint32_t i = 0; i < options_.count; ++i) {
    tasks.push_back(make_task(cell.kind, cell.length, options_.seed + i, haystack_));
  }
  return tasks;
}

std::size_t TaskEvaluation::tokens_of(std::span<const Task> tasks) const {
  std::size_t most = 0;
  for (const Task& task : tasks) most = std::max(most, kBosTokens + task.prompt.size() + answer_limit(task));
  return most;
}

void TaskEvaluation::check(const Cell& cell) const {
  const std::size_t tokens = tokens_of(tasks_of(cell));
  const std::uint32_t most = model_.config().max_position_embeddings;
  if (tokens <= most) return;
  throw Error(Errc::invalid_argument, "--lengths: " + std::string(to_string(cell.kind)) + " of " +
                                          std::to_string(cell.length) + " tokens takes " + std::to_string(tokens) +
                                          " with its answer, and the model's context has " + std::to_string(most) +
                                          "; take at most " + std::to_string(cell.length - (tokens - most)));
}

std::vector<TaskScore> TaskEvaluation::run(const Cell& cell, const PrefillSpec& prefill, ProgressBar& bar) {
  const std::vector<Task> tasks = tasks_of(cell);
  std::vector<TaskScore> scores(policies_.size());
  try {
    run(cell, tasks, prefill, scores, bar);
  } catch (const Interrupted&) {
    for (TaskScore& score : scores) {
      if (score.prompts != tasks.size()) score = {};
    }
  }
  return scores;
}

void TaskEvaluation::run(const Cell& cell, std::span<const Task> tasks, const PrefillSpec& prefill,
                         std::span<TaskScore> scores, ProgressBar& bar) {
  const std::size_t tokens = tokens_of(tasks);
  std::vector<Prefilled> prompts;
  std::size_t done = 0;
  // One runtime for each page size, one after the other, so that only one holds memory.
  for (const auto& [page_tokens, group] : by_page_size(policies_, flags_)) {
    std::vector<PolicySpec> specs;
    for (const std::size_t p : group) specs.push_back(policies_[p]);
    RuntimeFlags flags = flags_;
    flags.options.page_tokens = page_tokens;
    Runtime runtime(sized(flags, model_.config().shape(), specs, static_cast<std::uint32_t>(tokens)), device_);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      const std::vector<int> prompt = ByteTokenizer::encode(tasks[i].prompt);
      const std::size_t tail = std::min<std::size_t>(options_.decode_prompt, prompt.size() - 1);
      if (i == prompts.size()) {
        prompts.push_back(prefilled(model_, runtime, prefill, std::span(prompt).first(prompt.size() - tail)));
      }
      for (const std::size_t p : group) {
        stop_if_interrupted();
        scores[p].page_tokens = page_tokens;
        scores[p].prompt.merge(prompts[i].stats);
        scores[p].prefill_s += prompts[i].seconds;
        answer(runtime, prompts[i].cache, std::span(prompt).last(tail), tasks[i], policies_[p], scores[p]);
        bar.update(++done, tasks.size() * policies_.size(),
                   std::string(to_string(cell.kind)) + ' ' + std::to_string(cell.length) + ' ' + policies_[p].name);
      }
    }
  }
}

void TaskEvaluation::answer(Runtime& runtime, const PromptCache& cache, std::span<const int> question, const Task& task,
                            const PolicySpec& policy, TaskScore& score) {
  Session session(model_, runtime, policy);
  session.import_prompt(cache);
  runtime.watch(session.sequence(), evidence_of(task));
  const Stats before = session.stats();
  for (const int token : question) session.decode(token);
  const std::size_t limit = answer_limit(task);
  std::vector<int> output;
  while (output.size() < limit) {
    stop_if_interrupted();
    const int token = argmax(output.empty() && question.empty() ? cache.logits() : session.logits());
    if (model_.config().is_eos(token)) break;
    output.push_back(token);
    if (output.size() < limit) session.decode(token);
  }
  const Stats after = session.stats();
  const bool right = solved(task, ByteTokenizer::decode(output));
  ++score.prompts;
  score.solved += right ? 1 : 0;
  score.link_bytes += after.h2d_bytes - before.h2d_bytes + after.d2h_bytes - before.d2h_bytes;
  score.stats.merge(after);
  if (!right) add_lost(runtime.audit(session.sequence()), score);
}

void TaskEvaluation::add_lost(const AuditReport& report, TaskScore& score) const {
  score.lost.resize(report.heads.size());
  for (std::size_t i = 0; i < report.heads.size(); ++i) {
    const HeadAudit& audit = report.heads[i];
    LostHead& lost = score.lost[i];
    const auto steps = static_cast<double>(audit.watched_steps);
    lost.layer = static_cast<std::uint32_t>(i) / report.q_heads;
    lost.head = static_cast<std::uint32_t>(i) % report.q_heads;
    lost.steps += audit.watched_steps;
    lost.mass += audit.watched_mass * steps;
    lost.kept += audit.watched_mass * audit.watched_kept * steps;
  }
}

}  // namespace sluice::tools
