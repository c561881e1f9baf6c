// What `sluice run` makes of a prompt: where it ends and why, where ids come from, what the table and the trace show.
#include <filesystem>
#include <map>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/tools/cli_process.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::ScratchDirectory;

namespace {

namespace fs = std::filesystem;

/// The testbed with some keys of its config.json changed. Weights are links.
std::string model_with(const ScratchDirectory& scratch, const json& changes) {
  const fs::path from = fs::path(sluice::test::test_data()) / "testbed";
  const std::string directory = scratch.file("model");
  fs::create_directory(directory);
  for (const auto& entry : fs::directory_iterator(from)) {
    fs::create_symlink(entry.path(), fs::path(directory) / entry.path().filename());
  }
  json config = json::parse(read_file((from / "config.json").string()));
  config.update(changes);
  fs::remove(fs::path(directory) / "config.json");
  (void)scratch.write("model/config.json", config.dump());
  return "run --model '" + directory + "' --threads 2 ";
}

const std::string kRun = std::string("run --model '") + sluice::test::test_data() + "/testbed' --threads 2 ";
const std::string kPrompt = "--prompt 'The grass is green. The sky is' ";  // 31 tokens with BOS
constexpr int kPromptTokens = 31;

json report_of(const std::string& arguments) {
  const Outcome outcome = sluice::test::sluice(arguments + " -o json");
  CAPTURE(arguments, outcome.err);
  REQUIRE(outcome.code == 0);
  return json::parse(outcome.out);
}

json row_of(const json& report) { return report.at("results").at("run").at(0); }

}  // namespace

TEST_CASE("run ends at the model's context and says so", "[cli]") {
  const ScratchDirectory scratch;
  const std::string run = model_with(scratch, {{"max_position_embeddings", 40}}) + kPrompt;
  const json report = report_of(run + "--max-tokens 100");
  const json row = row_of(report);
  CHECK(row.at("finish_reason") == "context");
  CHECK(row.at("prompt_tokens") == kPromptTokens);
  CHECK(row.at("generated_tokens") == 40 - kPromptTokens + 1);  // The last one is chosen, and never read.
  CHECK(report.at("tokens").size() == row.at("generated_tokens"));
  // What comes before the end does not depend on where it is.
  const json shorter = report_of(run + "--max-tokens 4");
  CHECK(row_of(shorter).at("finish_reason") == "length");
  for (std::size_t i = 0; i < 4; ++i) CHECK(shorter.at("tokens")[i] == report.at("tokens")[i]);

  const Outcome table = sluice::test::sluice(run + "--max-tokens 100");
  CAPTURE(table.err);
  CHECK(table.code == 0);
  CHECK(contains(table.err, "context"));
}

TEST_CASE("a prompt that fills the context gets one token, a longer one is refused before it is read", "[cli]") {
  const ScratchDirectory scratch;
  const std::string full = model_with(scratch, {{"max_position_embeddings", kPromptTokens}}) + kPrompt;
  const json row = row_of(report_of(full));
  CHECK(row.at("generated_tokens") == 1);
  CHECK(row.at("finish_reason") == "context");
  const ScratchDirectory other;
  const Outcome over =
      sluice::test::sluice(model_with(other, {{"max_position_embeddings", kPromptTokens - 1}}) + kPrompt);
  CAPTURE(over.err);
  CHECK(over.code == 2);
  CHECK(is_one_error(over));
  CHECK(contains(over.err, "max_position_embeddings"));
}

TEST_CASE("run says whether the model stopped or the limit did", "[cli]") {
  const json free_run = report_of(kRun + kPrompt + "--max-tokens 6");
  CHECK(row_of(free_run).at("finish_reason") == "length");
  const json ids = free_run.at("tokens");
  REQUIRE(ids.size() == 6);
  const json eos = ids[3];
  std::size_t first = 0;
  while (ids[first] != eos) ++first;
  const ScratchDirectory scratch;
  const json stopped = report_of(model_with(scratch, {{"eos_token_id", eos}}) + kPrompt + "--max-tokens 6");
  CHECK(row_of(stopped).at("finish_reason") == "stop");
  CHECK(stopped.at("tokens").size() == first);
}

TEST_CASE("token ids come from standard input too", "[cli]") {
  const ScratchDirectory scratch;
  const std::string ids = scratch.write("ids", "[256, 72, 101, 114, 101, 32, 119, 101]");
  const Outcome piped = sluice::test::sluice(kRun + "--max-tokens 4 --prompt-tokens - <'" + ids + "'");
  CAPTURE(piped.err);
  CHECK(piped.code == 0);
  CHECK(piped.out == sluice::test::sluice(kRun + "--max-tokens 4 --prompt 'Here we'").out);
  const Outcome wrong = sluice::test::sluice(kRun + "--prompt-tokens - <'" + scratch.write("bad", "1 2 x") + "'");
  CAPTURE(wrong.err);
  CHECK(wrong.code == 2);
  CHECK(is_one_error(wrong));
  CHECK(contains(wrong.err, "standard input"));
  CHECK(contains(wrong.err, "'x'"));
}

TEST_CASE("standard input that cannot be read is no empty prompt", "[cli]") {
  const std::string source = GENERATE(std::string("--prompt-file - "), std::string("--prompt-tokens - "));
  for (const char* from : {"</", "<&-"}) {  // A directory; closed.
    const Outcome outcome = sluice::test::sluice(kRun + source + from);
    CAPTURE(source, from, outcome.err);
    CHECK(outcome.code == 1);
    CHECK(is_one_error(outcome));
    CHECK(contains(outcome.err, "standard input"));
  }
}

TEST_CASE("the trace holds the prompt, phase by phase and layer by layer", "[cli]") {
  const ScratchDirectory scratch;
  const std::string policy = GENERATE(values<std::string>({"full", "history+pages | int4 | top_k=64 | near=3%"}));
  const Outcome outcome = sluice::test::sluice(kRun + kPrompt + "--stepwise --max-tokens 3 --prefill-chunk 16 --policy '" +
                                               policy + "' --trace '" + scratch.file("trace.json") + "'");
  CAPTURE(policy, outcome.err);
  REQUIRE(outcome.code == 0);
  const json events = json::parse(read_file(scratch.file("trace.json"))).at("traceEvents");
  std::map<std::string, std::set<int>> layers;
  std::map<std::string, int> count;
  double prompt_end = 0.0;
  double step_begin = 1e300;
  for (const json& event : events) {
    if (event.at("ph") != "X") continue;
    const std::string name = event.at("name");
    CHECK(event.at("dur") >= 0.0);
    layers[name].insert(event.at("args").at("layer").get<int>());
    ++count[name];
    const double begin = event.at("ts");
    if (name == "prompt attention") prompt_end = std::max(prompt_end, begin + event.at("dur").get<double>());
    if (name == "attend_near") step_begin = std::min(step_begin, begin);
  }
  for (const char* phase : {"prompt append", "prompt attention", "prompt write-through"}) {
    CAPTURE(phase);
    CHECK(layers[phase].size() == 8);
    CHECK(count[phase] == 8 * 2);  // Chunks of 16 and 15 tokens.
  }
  CHECK(layers["begin policy"].size() == 8);
  CHECK((count["prompt digests"] > 0) == (policy != "full"));
  CHECK((count["prompt 4-bit copies"] > 0) == (policy != "full"));
  CHECK(prompt_end <= step_begin);
}

TEST_CASE("the table has no row for what did not happen", "[cli]") {
  const Outcome whole = sluice::test::sluice(kRun + kPrompt + "--stepwise --max-tokens 4 --policy full --placement near");
  CAPTURE(whole.err);
  REQUIRE(whole.code == 0);
  for (const char* row : {"far bytes", "near bytes", "near hits", "candidates", "coverage", "estimated", "scored",
                          "bytes to the", "- choice of blocks", "- waiting for keys", "hash and score", "page digests",
                          "4-bit copies", "clusters", "blocks computed", "chunks with a choice"}) {
    CAPTURE(row);
    CHECK_FALSE(contains(whole.err, std::string("\n| ") + row));
  }
  CHECK_FALSE(contains(whole.err, " - |\n"));
  for (const char* row : {"policy", "prompt tokens", "generated tokens", "time to first token", "attention, ms"}) {
    CAPTURE(row);
    CHECK(contains(whole.err, row));
  }
  // One token: no time per token.
  const Outcome one = sluice::test::sluice(kRun + kPrompt + "--stepwise --max-tokens 1 --policy full");
  CHECK_FALSE(contains(one.err, "\n| time per token"));
  CHECK_FALSE(contains(one.err, "\n| us/layer"));
  // What happened is shown.
  const Outcome sparse = sluice::test::sluice(kRun + kPrompt + "--max-tokens 4 --policy topk:budget=8 --audit 1");
  CAPTURE(sparse.err);
  for (const char* row : {"far bytes", "scored", "coverage", "of dense"})
    CHECK(contains(sparse.err, std::string("\n| ") + row));
}

TEST_CASE("planned forwards give the text that steps give, wherever keys and values are", "[cli]") {
  const std::string near = GENERATE("", " --near 30%", " --near 100%");
  const std::string arguments = kRun + kPrompt + "--max-tokens 16 --policy full";
  const json steps = report_of(arguments + " --stepwise");
  const json planned = report_of(arguments + near);
  CHECK(planned.at("text") == steps.at("text"));
  CHECK(planned.at("tokens").size() == 16);
  const json row = row_of(planned);
  CHECK(row.at("attended_share") == 1.0);
  CHECK((row.at("far_bytes_share") == 0.0) == (near == " --near 100%"));
}

TEST_CASE("planned forwards choose on the CPU what steps choose", "[cli]") {
  // Each of them leaves tokens out of a prompt as short as this.
  const std::string policy =
      GENERATE("lfps:budget=8", "topk:budget=8", "magicpig:recent_prompt=2,recent=2,tables=8,bits=6",
               "'clusters:least=8,size=4,candidates=12 | "
               "top_k=6 | near=0,sinks=2,recent=4'",
               "'pages:pages=1 | top_k=6 | near=0,sinks=2,recent=4 | page=8'",
               "'history+pages:pages=1 | int4 | top_k=6 | near=0,sinks=2,recent=4 | page=8'");
  const std::string arguments = kRun + kPrompt + "--max-tokens 16 --policy " + policy;
  const json steps = report_of(arguments + " --stepwise");
  const json planned = report_of(arguments);
  CAPTURE(policy);
  CHECK(planned.at("text") == steps.at("text"));
  CHECK(planned.at("tokens").size() == 16);
  CHECK(row_of(planned).at("attended_share") < 1.0);
}

TEST_CASE("what planned forwards do not serve is named, and steps do", "[cli]") {
  const ScratchDirectory scratch;
  for (const std::string& only :
       {std::string("--policy 'history | top_k=9 | near=10%'"), "--trace '" + scratch.file("t.json") + "'",
        std::string("--placement stream"), std::string("--promote-pages 3")}) {
    const Outcome outcome = sluice::test::sluice(kRun + kPrompt + "--max-tokens 2 " + only);
    CAPTURE(only, outcome.err);
    CHECK(outcome.code != 0);
    CHECK(is_one_error(outcome));
    CHECK((contains(outcome.err, "stepwise") || contains(outcome.err, "near=0")));
    CHECK(sluice::test::sluice(kRun + kPrompt + "--stepwise --max-tokens 2 " + only).code == 0);
  }
}
