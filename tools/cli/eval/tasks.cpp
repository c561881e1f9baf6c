#include "tools/cli/eval/tasks.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/llama/sampler.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

constexpr std::size_t kBosTokens = 1;
/// Prompts that are kept between their prefill and their answers: of 32K tokens of the testbed 256 MiB each.
constexpr std::size_t kPromptsAtOnce = 16;

/// Positions of the answer's tokens: a byte is a token, behind BOS.
std::vector<std::uint32_t> evidence_of(const Task& task) {
  std::vector<std::uint32_t> tokens;
  for (const Evidence& place : task.evidence) {
    for (std::size_t byte = place.begin; byte < place.end; ++byte)
      tokens.push_back(static_cast<std::uint32_t>(kBosTokens + byte));
  }
  return tokens;
}

}  // namespace

/// A prompt and what it cost.
struct TaskEvaluation::Prefilled {
  PromptCache cache;
  std::size_t question = 0;  ///< tokens behind it that are read under the policy
  EngineStats stats;
  double seconds = 0.0;
};

TaskEvaluation::TaskEvaluation(const TaskEvalOptions& options, const EngineFlags& flags, const Model& model,
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

void TaskEvaluation::check(std::span<const Task> tasks, const std::string& option, const std::string& what,
                           std::uint32_t length) const {
  const std::size_t tokens = tokens_of(tasks);
  const std::uint32_t most = model_.config().max_position_embeddings;
  if (tokens <= most) return;
  throw Error(Errc::invalid_argument, option + ": " + what + " of " + std::to_string(length) + " tokens takes " +
                                          std::to_string(tokens) + " with its answer, and the model's context has " +
                                          std::to_string(most) + "; take at most " +
                                          std::to_string(length - (tokens - most)));
}

std::vector<TaskScore> TaskEvaluation::run(std::span<const Task> tasks, const std::string& what,
                                           const PrefillSpec& prefill, ProgressBar& bar) {
  std::vector<TaskScore> scores(policies_.size());
  std::size_t done = 0;
  const auto told = [&](std::size_t policy) {
    bar.update(++done, tasks.size() * policies_.size(), what + ' ' + policies_[policy].name);
  };
  try {
    for (std::size_t first = 0; first < tasks.size(); first += kPromptsAtOnce) {
      const std::size_t count = std::min(kPromptsAtOnce, tasks.size() - first);
      run(tasks.subspan(first, count), prefill, scores, told);
    }
  } catch (const Interrupted&) {
    for (TaskScore& score : scores) {
      if (score.prompts != tasks.size()) score = {};
    }
  }
  return scores;
}

std::vector<TaskEvaluation::Prefilled> TaskEvaluation::prefilled(const PrefillSpec& prefill,
                                                                 std::span<const Task> tasks) const {
  const PolicySpec dense = parse_policy("full");
  EngineFlags flags = flags_;
  flags.audit_every = 0;
  sluice::Engine engine(sized(flags, model_.config().shape(), {&dense, 1},
                              {.page_tokens = page_tokens_for(dense, flags),
                               .tokens = static_cast<std::uint32_t>(tokens_of(tasks)),
                               .prefill = prefill}),
                        device_);
  const auto runner = std::make_shared<Runner>(model_, engine, device_, flags.graphs);
  std::vector<Prefilled> prompts;
  for (const Task& task : tasks) {
    const std::vector<int> tokens = ByteTokenizer::encode(task.prompt);
    Prefilled& prompt = prompts.emplace_back();
    prompt.question = std::min<std::size_t>(options_.decode_prompt, tokens.size() - 1);
    const EngineStats before = engine.stats();
    EngineSession session(runner, dense);
    const auto start = Clock::now();
    session.prefill(
        std::span(tokens).first(tokens.size() - prompt.question),
        [](std::uint32_t, std::uint32_t) { stop_if_interrupted(); }, &prompt.cache);
    prompt.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    prompt.stats = since(before, engine.stats());
  }
  return prompts;
}

void TaskEvaluation::run(std::span<const Task> tasks, const PrefillSpec& prefill, std::span<TaskScore> scores,
                         const std::function<void(std::size_t)>& told) {
  // One engine after the other, so that only one holds memory.
  const std::vector<Prefilled> prompts = prefilled(prefill, tasks);
  for (const EngineGroup& group : by_engine(policies_, flags_)) run(group, tasks, prompts, scores, told);
}

void TaskEvaluation::run(const EngineGroup& group, std::span<const Task> tasks, std::span<const Prefilled> prompts,
                         std::span<TaskScore> scores, const std::function<void(std::size_t)>& told) {
  const std::size_t longest = tokens_of(tasks);
  std::vector<PolicySpec> specs;
  for (const std::size_t p : group.policies) specs.push_back(policies_[p]);
  std::size_t apart = 0;
  for (const Task& task : tasks) apart = std::max(apart, options_.decode_prompt + answer_limit(task));
  sluice::Engine engine(sized(flags_, model_.config().shape(), specs,
                              {.page_tokens = group.page_tokens,
                               .tokens = static_cast<std::uint32_t>(longest),
                               .apart = static_cast<std::uint32_t>(apart),
                               .near = options_.near}),
                        device_);
  const auto runner = std::make_shared<Runner>(model_, engine, device_, flags_.graphs);
  // Queries of the prompt are there for its forks if it is under a policy that begins with them.
  const PolicySpec& begins = *std::ranges::max_element(specs, {}, scheduler::prompt_queries);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const std::vector<int> tokens = ByteTokenizer::encode(tasks[i].prompt);
    EngineSession prompt(runner, begins);
    prompt.import_prompt(prompts[i].cache);
    for (const std::size_t p : group.policies) {
      stop_if_interrupted();
      TaskScore& score = scores[p];
      score.layout = {.page_tokens = group.page_tokens,
                      .head_dim = engine.options().shape.head_dim,
                      .dtype = engine.options().kv_dtype};
      if (!policies_[p].far.all()) {
        score.far_budget = scheduler::far_tokens(policies_[p].far, static_cast<std::uint32_t>(longest),
                                                 scheduler::row_shape(engine.options().shape, group.page_tokens));
      }
      add(prompts[i].stats, score.prompt);
      score.prefill_s += prompts[i].seconds;
      answer(engine, prompt, std::span(tokens).last(prompts[i].question), tasks[i], policies_[p], score);
      told(p);
    }
  }
}

void TaskEvaluation::answer(sluice::Engine& engine, const EngineSession& prompt, std::span<const int> question,
                            const Task& task, const PolicySpec& policy, TaskScore& score) {
  EngineSession session(prompt, policy);
  session.audit_every(flags_.audit_every);
  engine.watch(session.sequence(), evidence_of(task));
  const EngineStats before = engine.stats();
  if (task.answer.empty()) {
    predict(session, question, score);
  } else {
    for (const int token : question) session.decode(token);
  }
  const std::size_t limit = answer_limit(task);
  std::vector<int> output;
  std::vector<float> logits;
  while (output.size() < limit) {
    stop_if_interrupted();
    if (options_.logits) logits.insert(logits.end(), session.logits().begin(), session.logits().end());
    const int token = session.best();
    if (model_.config().is_eos(token)) break;
    output.push_back(token);
    if (output.size() < limit) session.decode(token);
  }
  const AuditReport report = engine.audit(session.sequence());
  DecodeScore run{.tokens = session.decoded(),
                  .dense_tokens = session.visible(),
                  .stats = since(before, engine.stats()),
                  .audited = {},
                  .code_bits = engine.options().code_bits};
  run.audited.merge_totals(report);
  score.decoded.merge(run);
  ++score.prompts;
  if (task.answer.empty()) return;
  const bool right = solved(task, ByteTokenizer::decode(output));
  score.solved += right ? 1 : 0;
  if (!right) add_lost(report, score);
  score.outputs.push_back(std::move(output));
  if (options_.logits) score.logits.push_back(std::move(logits));
}

void TaskEvaluation::predict(EngineSession& session, std::span<const int> question, TaskScore& score) const {
  std::vector<float> logits;
  for (std::size_t i = 0; i < question.size(); ++i) {
    stop_if_interrupted();
    session.decode(question[i]);
    // What comes behind the last one is not known.
    if (i + 1 < question.size()) logits.insert(logits.end(), session.logits().begin(), session.logits().end());
  }
  score.outputs.emplace_back(question.begin() + 1, question.end());
  score.logits.push_back(std::move(logits));
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
