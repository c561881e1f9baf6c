#include "tools/cli/eval/report.hpp"

#include <algorithm>
#include <utility>

#include "tools/cli/eval/statistics.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

/// From this share on everything was attended.
constexpr double kWhole = 1.0 - 1e-6;

void append_read(const Answer& answer, Json& to) {
  const ReadShares& read = answer.read;
  to["attended"] = read.attended;
  to["whole"] = read.attended >= kWhole;
  to["bytes"] = read.bytes();
  to["near_bytes"] = read.near;
  to["far_bytes"] = read.far;
  to["link_bytes"] = read.link;
  to["choice_bytes"] = read.choice;
  to["prompt_blocks"] = answer.prompt_blocks;
  if (answer.coverage) {
    to["bypassed"] = answer.bypassed;
    to["coverage"] = *answer.coverage;
  }
}

/// What was read for these, as the mean.
Answer mean_of(const std::vector<const Answer*>& answers) {
  Answer mean;
  const auto over = [&](const auto& value) {
    double sum = 0.0;
    for (const Answer* const answer : answers) sum += value(*answer);
    return sum / static_cast<double>(answers.size());
  };
  mean.read = {.attended = over([](const Answer& a) { return a.read.attended; }),
               .near = over([](const Answer& a) { return a.read.near; }),
               .far = over([](const Answer& a) { return a.read.far; }),
               .link = over([](const Answer& a) { return a.read.link; }),
               .choice = over([](const Answer& a) { return a.read.choice; })};
  mean.prompt_blocks = over([](const Answer& a) { return a.prompt_blocks; });
  if (std::ranges::all_of(answers, [](const Answer* answer) { return answer->coverage.has_value(); })) {
    mean.coverage = over([](const Answer& a) { return *a.coverage; });
    mean.bypassed = over([](const Answer& a) { return a.bypassed; });
  }
  return mean;
}

Json summary(const std::string& task, std::uint32_t length, const std::string& policy,
             const std::vector<const Answer*>& given, const std::vector<const Answer*>& dense) {
  std::uint64_t right = 0, only_dense = 0, only_policy = 0, same = 0;
  for (std::size_t i = 0; i < given.size(); ++i) {
    right += given[i]->right ? 1 : 0;
    only_dense += dense[i]->right && !given[i]->right ? 1 : 0;
    only_policy += given[i]->right && !dense[i]->right ? 1 : 0;
    same += given[i]->output == dense[i]->output ? 1 : 0;
  }
  const auto count = static_cast<double>(given.size());
  const Interval interval = wilson(right, given.size());
  Json row = {{"task", task},
              {"length", length},
              {"policy", policy},
              {"prompts", given.size()},
              {"right", right},
              {"accuracy", static_cast<double>(right) / count},
              {"accuracy_95", {interval.low, interval.high}},
              {"only_dense", only_dense},
              {"only_policy", only_policy},
              {"p_value", mcnemar(only_dense, only_policy)},
              {"same_answer", static_cast<double>(same) / count}};
  append_read(mean_of(given), row);
  return row;
}

/// Where two answers part; null: they do not.
Json first_other(const std::vector<int>& one, const std::vector<int>& other) {
  if (one == other) return nullptr;
  return std::ranges::mismatch(one, other).in1 - one.begin();
}

Json item(const Task& task, const std::vector<Answer>& answers, const std::vector<NamedPolicy>& policies) {
  const auto said = [&](const std::vector<int>& ids) {
    return task.text ? Json(ByteTokenizer::decode(ids)) : Json(ids);
  };
  Json outputs = Json::object();
  for (std::size_t p = 0; p < answers.size(); ++p) {
    const Answer& answer = answers[p];
    Json output = {{"ids", answer.output}};
    if (task.text) output["text"] = said(answer.output);
    output["right"] = answer.right;
    append_read(answer, output);
    output["first_other"] = first_other(answer.output, answers.front().output);
    outputs[policies[p].name] = std::move(output);
  }
  return {{"line", task.line},           {"task", task.name},
          {"length", task.length},       {"prompt_tokens", task.prompt.size()},
          {"answer", said(task.answer)}, {"outputs", std::move(outputs)}};
}

/// Indices of the tasks of each row of results.
struct Cell {
  std::string task;
  std::uint32_t length = 0;
  std::vector<std::size_t> tasks;
};

std::vector<Cell> cells_of(std::span<const Task> tasks) {
  std::vector<Cell> cells;
  std::vector<Cell> whole;
  const auto add = [](std::vector<Cell>& to, const std::string& name, std::uint32_t length, std::size_t index) {
    const auto same = [&](const Cell& cell) { return cell.task == name && cell.length == length; };
    const auto known = std::ranges::find_if(to, same);
    (known != to.end() ? *known : to.emplace_back(Cell{name, length, {}})).tasks.push_back(index);
  };
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    add(cells, tasks[i].name, tasks[i].length, i);
    add(whole, kAllTasks, tasks[i].length, i);
  }
  for (Cell& all : whole) {
    const auto of_length = [&](const Cell& cell) { return cell.length == all.length; };
    if (std::ranges::count_if(cells, of_length) > 1) cells.push_back(std::move(all));
  }
  return cells;
}

}  // namespace

Json tasks_json(std::span<const Task> tasks, const std::vector<std::vector<Answer>>& answers,
                const std::vector<NamedPolicy>& policies) {
  const std::span<const Task> answered = tasks.first(answers.size());
  Json results = Json::array();
  for (const Cell& cell : cells_of(answered)) {
    const auto given = [&](std::size_t policy) {
      std::vector<const Answer*> found;
      for (const std::size_t task : cell.tasks) found.push_back(&answers[task][policy]);
      return found;
    };
    for (std::size_t p = 0; p < policies.size(); ++p)
      results.push_back(summary(cell.task, cell.length, policies[p].name, given(p), given(0)));
  }
  Json items = Json::array();
  for (std::size_t i = 0; i < answered.size(); ++i) items.push_back(item(tasks[i], answers[i], policies));
  return {{"results", std::move(results)}, {"items", std::move(items)}};
}

Table tasks_table(const Json& results) {
  using Show = Column::Show;
  Table table{.key = "tasks",
              .title =
                  "Greedy answers. same: token by token as dense attention's; from, to: Wilson's 95%; only dense, only "
                  "policy: answers that one of the two alone has right; p: exact McNemar test of these; attended, "
                  "bytes read: tokens, and keys, values and what was read to choose, as shares of dense attention's",
              .columns = {{"task", "task"},
                          {"length", "length"},
                          {"policy", "policy"},
                          {"prompts", "prompts"},
                          {"accuracy", "accuracy", 2},
                          {"accuracy_from", "from", 2},
                          {"accuracy_to", "to", 2},
                          {"only_dense", "only dense"},
                          {"only_policy", "only policy"},
                          {"p_value", "p", 2},
                          {"same_answer", "same", 1, Show::percent},
                          {"attended", "attended", 1, Show::percent},
                          {"bytes", "bytes read", 1, Show::percent},
                          {"coverage", "coverage", 4}},
              .in_json = false};
  for (const Json& result : results) {
    std::vector<Json> row;
    for (const Column& column : table.columns) row.push_back(result.value(column.key, Json()));
    row[5] = result["accuracy_95"][0];
    row[6] = result["accuracy_95"][1];
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace sluice::tools
