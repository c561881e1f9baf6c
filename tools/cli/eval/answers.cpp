#include "tools/cli/eval/answers.hpp"

#include <algorithm>
#include <utility>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tools/cli/eval/batch.hpp"
#include "tools/cli/text/interrupt.hpp"

namespace sluice::tools {
namespace {

double blocks_of(const EngineStats& prompt) {
  return prompt.causal_blocks == 0
             ? 1.0
             : static_cast<double>(prompt.kept_blocks) / static_cast<double>(prompt.causal_blocks);
}

}  // namespace

struct Answers::Prompt {
  PromptCache cache;
  std::span<const int> question;
  double blocks = 1.0;
};

Answers::Answers(const AnswerOptions& options, const EngineFlags& flags, const Model& model,
                 std::vector<NamedPolicy> policies, std::shared_ptr<Device> device)
    : options_(options), flags_(flags), model_(model), policies_(std::move(policies)), device_(std::move(device)) {
  for (const NamedPolicy& policy : policies_) specs_.push_back(policy.spec);
}

std::uint32_t Answers::tokens_of(std::span<const Task> tasks) const {
  std::size_t most = 0;
  for (const Task& task : tasks) most = std::max(most, task.prompt.size() + answer_limit(task, options_.max_tokens));
  return static_cast<std::uint32_t>(most);
}

void Answers::check(std::span<const Task> tasks, const std::string& file) const {
  const std::uint32_t most = model_.config().max_position_embeddings;
  for (const Task& task : tasks) {
    const std::uint32_t tokens = tokens_of({&task, 1});
    if (tokens <= most) continue;
    throw Error(Errc::invalid_argument, file + ", line " + std::to_string(task.line) + ": prompt and answer take " +
                                            std::to_string(tokens) + " tokens of context, and the model has " +
                                            std::to_string(most) + "; shorten it");
  }
}

std::vector<std::vector<Answer>> Answers::run(std::span<const Task> tasks, ProgressBar& bar) const {
  std::vector<std::vector<Answer>> answers(tasks.size());
  for (std::vector<Answer>& of_task : answers) of_task.resize(policies_.size());
  std::vector<std::size_t> given(tasks.size());
  std::size_t done = 0;
  const auto show = [&](const std::string& note) { bar.update(done, tasks.size() * policies_.size(), note); };
  const auto reads = [&](const Task& task) { show("reads " + task.name + ' ' + std::to_string(task.length)); };
  const auto told = [&](const Task& task, const NamedPolicy& policy) {
    ++given[static_cast<std::size_t>(&task - tasks.data())];
    ++done;
    show(task.name + ' ' + std::to_string(task.length) + ' ' + policy.name);
  };
  try {
    std::size_t count = 0;
    for (std::size_t first = 0; first < tasks.size(); first += count) {
      count = batch_of(tasks.subspan(first), model_.config().shape());
      const std::span<const Task> batch = tasks.subspan(first, count);
      const auto answer = [&](std::size_t from, std::size_t to, const PrefillSpec& prefill) {
        const std::vector<Prompt> prompts = prefilled(batch, prefill, reads);
        answer_all(from, to, batch, prompts, std::span(answers).subspan(first, count), told);
      };
      const std::size_t with_dense_prompts = options_.prefill.mode == PrefillMode::full ? 0 : 1;
      if (with_dense_prompts != 0) answer(0, with_dense_prompts, {});
      answer(with_dense_prompts, policies_.size(), options_.prefill);
    }
  } catch (const Interrupted&) {
    const auto open = [&](std::size_t count) { return count < policies_.size(); };
    answers.resize(static_cast<std::size_t>(std::ranges::find_if(given, open) - given.begin()));
  }
  return answers;
}

std::vector<Answers::Prompt> Answers::prefilled(std::span<const Task> tasks, const PrefillSpec& prefill,
                                                const Reads& reads) const {
  const PolicySpec dense = parse_policy("full");
  EngineFlags flags = flags_;
  flags.audit_every = 0;
  sluice::Engine engine(
      sized(flags, model_.config().shape(), {&dense, 1},
            {.page_tokens = page_tokens_for(dense, flags), .tokens = tokens_of(tasks), .prefill = prefill}),
      device_);
  const auto runner = std::make_shared<Runner>(model_, engine, device_, flags_.graphs);
  std::vector<Prompt> prompts;
  for (const Task& task : tasks) {
    const std::span<const int> tokens = task.prompt;
    reads(task);
    Prompt& prompt = prompts.emplace_back();
    prompt.question = tokens.last(std::min<std::size_t>(options_.decode_prompt, tokens.size() - 1));
    const EngineStats before = engine.stats();
    EngineSession session(runner, dense);
    session.prefill(
        tokens.first(tokens.size() - prompt.question.size()),
        [&](std::uint32_t, std::uint32_t) {
          stop_if_interrupted();
          reads(task);
        },
        &prompt.cache);
    prompt.blocks = blocks_of(since(before, engine.stats()));
  }
  return prompts;
}

void Answers::answer_all(std::size_t first, std::size_t last, std::span<const Task> tasks,
                         std::span<const Prompt> prompts, std::span<std::vector<Answer>> answers,
                         const Told& told) const {
  // One engine after the other, so that only one holds memory.
  for (EngineGroup& group : by_engine(std::span(specs_).subspan(first, last - first), flags_)) {
    for (std::size_t& policy : group.policies) policy += first;
    answer_all(group.policies, group.page_tokens, tasks, prompts, answers, told);
  }
}

void Answers::answer_all(std::span<const std::size_t> policies, std::uint32_t page_tokens, std::span<const Task> tasks,
                         std::span<const Prompt> prompts, std::span<std::vector<Answer>> answers,
                         const Told& told) const {
  std::vector<PolicySpec> specs;
  for (const std::size_t p : policies) specs.push_back(specs_[p]);
  std::uint32_t longest = 0;
  for (const Task& task : tasks) longest = std::max(longest, answer_limit(task, options_.max_tokens));
  sluice::Engine engine(sized(flags_, model_.config().shape(), specs,
                              {.page_tokens = page_tokens,
                               .tokens = tokens_of(tasks),
                               .apart = options_.decode_prompt + longest,
                               .near = options_.near}),
                        device_);
  const auto runner = std::make_shared<Runner>(model_, engine, device_, flags_.graphs);
  // Queries of the prompt are there for its forks if it is under a policy that begins with them.
  const PolicySpec& begins = *std::ranges::max_element(specs, {}, scheduler::prompt_queries);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    EngineSession prompt(runner, begins);
    prompt.import_prompt(prompts[i].cache);
    for (const std::size_t p : policies) {
      stop_if_interrupted();
      answers[i][p] = answer(engine, prompt, prompts[i].question, tasks[i], specs_[p]);
      answers[i][p].prompt_blocks = prompts[i].blocks;
      told(tasks[i], policies_[p]);
    }
  }
}

Answer Answers::answer(sluice::Engine& engine, const EngineSession& prompt, std::span<const int> question,
                       const Task& task, const PolicySpec& policy) const {
  EngineSession session(prompt, policy);
  session.audit_every(flags_.audit_every);
  const EngineStats before = engine.stats();
  for (const int token : question) session.decode(token);
  const std::uint32_t limit = answer_limit(task, options_.max_tokens);
  Answer answer;
  while (answer.output.size() < limit) {
    stop_if_interrupted();
    const int token = session.best();
    if (model_.config().is_eos(token)) break;
    answer.output.push_back(token);
    if (answer.output.size() < limit) session.decode(token);
  }
  answer.right = is_right(task, answer.output);
  const EngineOptions& made = engine.options();
  const DecodeScore score{.tokens = session.decoded(),
                          .dense_tokens = session.visible(),
                          .stats = since(before, engine.stats()),
                          .audited = engine.audit(session.sequence()),
                          .code_bits = engine.sizes().code_bits};
  answer.read = read_shares(score, made.shape,
                            {.page_tokens = made.page_tokens, .head_dim = made.shape.head_dim, .dtype = made.kv_dtype});
  if (score.audited.coverage.count() != 0) {
    answer.coverage = score.audited.coverage.mean();
    answer.bypassed = static_cast<double>(score.audited.bypassed_heads) /
                      (static_cast<double>(score.audited.tokens) * made.shape.layers * made.shape.q_heads);
  }
  return answer;
}

}  // namespace sluice::tools
