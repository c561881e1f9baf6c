// The command's `eval`.
#include <cstdlib>
#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"
#include "tests/tools/cli_report.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::short_tasks;
using sluice::test::tasks_of;
using sluice::test::TemporaryDirectory;

namespace {

const std::string kEval = "eval " + sluice::test::testbed_model() + "--threads 2 ";

/// The key `tasks` of its report.
json found_by(const std::string& arguments) { return sluice::test::json_of(kEval + arguments).at("tasks"); }

/// The last of the short tasks, kv, whose answer is in the middle of its prompt.
std::string one_task() {
  const std::string tasks = short_tasks();
  return tasks.substr(tasks.rfind('\n', tasks.size() - 2) + 1);
}

}  // namespace

TEST_CASE("eval holds every policy against dense attention on every task, which solves them", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string policies = "--policies 'topk:budget=64,sinks=4;full | page=32;streaming:recent=8;full' ";
  const json report = sluice::test::json_of(kEval + tasks_of(scratch, short_tasks()) + policies);
  CHECK(report.at("config").at("policies").size() == 4);
  CHECK_FALSE(report.contains("results"));  // They are in `tasks`, as those of the package are.
  const json& tasks = report.at("tasks");
  CHECK_FALSE(tasks.contains("failed"));  // What fails ends the run.
  const json& rows = tasks.at("results");
  REQUIRE(rows.size() == (3 + 1) * 4);  // With all tasks of the length; dense attention is the first of each.
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const json& row = rows[i];
    CAPTURE(row.dump());
    const std::string policy = row.at("policy");
    CHECK((policy == "full") == (i % 4 == 0));
    CHECK(row.at("task") == (i < 4 ? "niah" : i < 8 ? "multikey" : i < 12 ? "kv" : "all"));
    CHECK(row.at("length") == 512);
    CHECK(row.at("prompts") == (i < 12 ? 1 : 3));
    CHECK(row.at("attended").get<double>() <= 1.0);
    if (policy.starts_with("full")) {
      CHECK(row.at("accuracy") == 1.0);
      CHECK(row.at("same_answer") == 1.0);
      CHECK(row.at("whole") == true);
      CHECK(row.at("coverage") > 0.999);
    } else if (policy == "streaming:recent=8") {
      CHECK(row.at("right") == 0);
      CHECK(row.at("only_dense") == row.at("prompts"));
      CHECK(row.at("coverage") < 0.9);
    } else {
      CHECK(row.at("whole") == false);
    }
  }
  for (const json& item : tasks.at("items")) {
    const json& outputs = item.at("outputs");
    CHECK(outputs.at("full").at("first_other").is_null());
    CHECK(outputs.at("full").at("ids").size() == item.at("answer").size());
    CHECK(outputs.at("streaming:recent=8").at("first_other") < item.at("answer").size());
  }
  // Nothing here depends on time, but for which of the machine's kernels win their race, nor on what else is asked,
  // which may have taken the near memory.
  ::setenv("SLUICE_CPU_ISA", report.at("host").at("isa").get<std::string>().c_str(), 1);
  const json again = found_by(tasks_of(scratch, one_task()) + policies).at("items").at(0).at("outputs");
  ::unsetenv("SLUICE_CPU_ISA");
  for (const auto& [policy, output] : tasks.at("items").at(2).at("outputs").items()) {
    CAPTURE(policy);
    for (const char* const key : {"ids", "attended"}) CHECK(again.at(policy).at(key) == output.at(key));
    CHECK(again.at(policy).at("coverage") == Approx(output.at("coverage").get<double>()).epsilon(1e-5));
  }
}

TEST_CASE("eval takes tasks that are texts, and says what came of them as text", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string prompt =
      "The grass is green. The sky is blue. \\nOne of the special magic values for vivid-otter is: 4815162.\\n"
      "The sun is yellow. Here we go. There and back again. \\nQ: What is the special magic value for "
      "vivid-otter?\\nA:";
  const std::string text = "{\"prompt\": \"" + prompt + "\", \"answer\": \"4815162\"}\n";
  const std::string arguments = tasks_of(scratch, text + "\n" + text) + "--policies full --audit 0 ";
  const json tasks = found_by(arguments);
  CHECK(tasks.at("results").size() == 1);
  CHECK(tasks.at("results")[0].at("task") == "task");
  CHECK(tasks.at("results")[0].at("length") == 256);
  CHECK(tasks.at("results")[0].at("right") == 2);
  CHECK_FALSE(tasks.at("results")[0].contains("coverage"));
  CHECK(tasks.at("items")[1].at("line") == 3);
  CHECK(tasks.at("items")[1].at("answer") == "4815162");
  CHECK(tasks.at("items")[1].at("outputs").at("full").at("text").get<std::string>().starts_with(" 4815162"));
  const json cut = found_by(arguments + "--max-tokens 3");
  CHECK(cut.at("items")[0].at("outputs").at("full").at("ids") == json::array({' ', '4', '8'}));
  CHECK(cut.at("results")[0].at("right") == 0);
}

TEST_CASE("eval reads where its placement says, and all presets if it is asked", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string arguments = tasks_of(scratch, one_task()) + "--audit 0 --near 0 ";
  std::map<std::string, json> of;
  const json presets = found_by(arguments + "--decode-prompt 4 --max-tokens 2 --policies presets");
  for (const json& row : presets.at("results")) of[row.at("policy")] = row;
  for (const char* const preset : {"full", "sluice", "topk", "streaming", "twilight"}) CHECK(of.contains(preset));
  CHECK(of.at("full").at("link_bytes") == 0.0);
  CHECK(of.at("full").at("far_bytes") > 0.5);
  const json streamed = found_by(arguments + "--policies full --placement stream").at("results")[0];
  CHECK(streamed.at("right") == 1);
  CHECK(streamed.at("link_bytes") > 0.5);
  CHECK(streamed.at("far_bytes") == 0.0);
}

TEST_CASE("eval refuses tasks that the model has no room for, with their line", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string long_task = R"({"prompt": ")" + std::string(32'768, 'a') + R"(", "answer": "b"})";
  const Outcome outcome = sluice::test::sluice(kEval + tasks_of(scratch, one_task() + long_task));
  CAPTURE(outcome.err);
  CHECK(outcome.code == 2);
  CHECK(sluice::test::is_one_error(outcome));
  CHECK(contains(outcome.err, "line 2: prompt and answer take 32778 tokens of context, and the model has 32768"));
}

TEST_CASE("plot draws what eval found, and tells ways to read prompts apart", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string arguments = kEval + tasks_of(scratch, one_task()) + "--audit 0 --policies streaming:recent=8 ";
  std::string files;
  json of_dense;
  for (const char* const prefill : {"full", "flexprefill@0.5"}) {
    const std::string file = scratch.file(prefill);
    const Outcome outcome =
        sluice::test::sluice(arguments + "--min-budget 128 --prefill " + prefill + " -o json --output '" + file + "'");
    CAPTURE(outcome.err);
    REQUIRE(outcome.code == 0);
    const json tasks = json::parse(read_file(file)).at("tasks");
    const json& rows = tasks.at("results");
    const bool sparse = std::string(prefill) != "full";
    REQUIRE(rows.size() == (sparse ? 3 : 2));
    CHECK(rows[0].at("policy") == (sparse ? "dense" : "full"));
    CHECK(rows[0].at("prompt_blocks") == 1.0);
    CHECK(rows[0].at("same_answer") == 1.0);
    CHECK(rows[0].at("whole") == true);
    if (sparse) CHECK(rows[1].at("policy") == "full");
    const json said = tasks.at("items")[0].at("outputs").at(sparse ? "dense" : "full").at("ids");
    if (!sparse) of_dense = said;
    CHECK(said == of_dense);
    for (std::size_t i = 1; i < rows.size(); ++i) CHECK((rows[i].at("prompt_blocks") < 1.0) == sparse);
    files += "'" + file + "' ";
  }
  const std::string svg = sluice::test::sluice("plot " + files).out;
  CHECK(svg.starts_with("<svg"));
  CHECK(svg.ends_with("</svg>\n"));
  CHECK(contains(svg, ">streaming:recent=8, full</text>"));
  CHECK(contains(svg, ">full, flexprefill@0.5</text>"));
}
