// What `sluice run` makes of a prompt: where it ends and why, where ids come from, what the table and the trace show.
#include <map>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/tools/cli_process.hpp"
#include "tests/tools/cli_report.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::json_of;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;

namespace {

/// The testbed with some keys of its config.json changed.
std::string model_with(const TemporaryDirectory& scratch, const json& changes) {
  json config = json::parse(read_file(std::string(sluice::test::test_data()) + "/testbed/config.json"));
  config.update(changes);
  return "run --model '" + sluice::test::testbed_with(scratch, config.dump()) + "' --threads 2 ";
}

const std::string kRun = "run " + sluice::test::testbed_model() + "--threads 2 ";
const std::string kPrompt = "--prompt 'The grass is green. The sky is' ";  // 31 tokens with BOS
constexpr int kPromptTokens = 31;

json row_of(const json& report) { return report.at("results").at("run").at(0); }

}  // namespace

TEST_CASE("run ends at the model's context and says so", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string run = model_with(scratch, {{"max_position_embeddings", 40}}) + kPrompt;
  const json report = json_of(run + "--max-tokens 100");
  const json row = row_of(report);
  CHECK(row.at("finish_reason") == "context");
  CHECK(row.at("prompt_tokens") == kPromptTokens);
  CHECK(row.at("generated_tokens") == 40 - kPromptTokens + 1);  // The last one is chosen, and never read.
  CHECK(report.at("tokens").size() == row.at("generated_tokens"));
  // What comes before the end does not depend on where it is.
  const json shorter = json_of(run + "--max-tokens 4");
  CHECK(row_of(shorter).at("finish_reason") == "length");
  for (std::size_t i = 0; i < 4; ++i) CHECK(shorter.at("tokens")[i] == report.at("tokens")[i]);

  const Outcome table = sluice::test::sluice(run + "--max-tokens 100");
  CAPTURE(table.err);
  CHECK(table.code == 0);
  CHECK(contains(table.err, "context"));
}

TEST_CASE("a prompt that fills the context gets one token, a longer one is refused before it is read", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string full = model_with(scratch, {{"max_position_embeddings", kPromptTokens}}) + kPrompt;
  const json row = row_of(json_of(full));
  CHECK(row.at("generated_tokens") == 1);
  CHECK(row.at("finish_reason") == "context");
  const TemporaryDirectory other;
  const Outcome over =
      sluice::test::sluice(model_with(other, {{"max_position_embeddings", kPromptTokens - 1}}) + kPrompt);
  CAPTURE(over.err);
  CHECK(over.code == 2);
  CHECK(is_one_error(over));
  CHECK(contains(over.err, "max_position_embeddings"));
}

TEST_CASE("run says whether the model stopped or the limit did", "[cli]") {
  const json free_run = json_of(kRun + kPrompt + "--max-tokens 6");
  CHECK(row_of(free_run).at("finish_reason") == "length");
  const json ids = free_run.at("tokens");
  REQUIRE(ids.size() == 6);
  const json eos = ids[3];
  std::size_t first = 0;
  while (ids[first] != eos) ++first;
  const TemporaryDirectory scratch;
  const json stopped = json_of(model_with(scratch, {{"eos_token_id", eos}}) + kPrompt + "--max-tokens 6");
  CHECK(row_of(stopped).at("finish_reason") == "stop");
  CHECK(stopped.at("tokens").size() == first);
}

TEST_CASE("text for a model with a vocabulary of its own is refused, with what reads it", "[cli]") {
  const TemporaryDirectory scratch;
  const Outcome outcome = sluice::test::sluice(model_with(scratch, {{"bos_token_id", 1}}) + kPrompt);
  CAPTURE(outcome.err);
  CHECK(outcome.code == 2);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, "python -m sluice run --model DIR --file FILE"));
}

TEST_CASE("token ids come from standard input too", "[cli]") {
  const TemporaryDirectory scratch;
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

TEST_CASE("graphs are off on the CPU, whoever does not insist", "[cli]") {
  const std::string run = kRun + kPrompt + "--max-tokens 4 ";
  const json usual = json_of(run), off = json_of(run + "--graphs off");
  CHECK(usual.at("tokens") == off.at("tokens"));
  CHECK(usual.at("graph_replays") == 0);
  CHECK(usual.at("config").at("graphs") == "auto");
  const Outcome on = sluice::test::sluice(run + "--graphs on");
  CHECK(on.code == 3);
  CHECK(is_one_error(on));
  CHECK(contains(on.err, "runs on the CPU"));
  const Outcome odd = sluice::test::sluice(run + "--graphs yes");
  CHECK(odd.code == 2);
  CHECK(is_one_error(odd));
  CHECK(contains(odd.err, "--graphs: 'yes'"));
}

TEST_CASE("the table has no row for what did not happen", "[cli]") {
  const Outcome whole = sluice::test::sluice(kRun + kPrompt + "--max-tokens 4 --policy full --near 100%");
  CAPTURE(whole.err);
  REQUIRE(whole.code == 0);
  for (const char* row : {"link bytes", "coverage", "scored", "blocks computed", "chunks with a choice"}) {
    CAPTURE(row);
    CHECK_FALSE(contains(whole.err, std::string("\n| ") + row));
  }
  CHECK_FALSE(contains(whole.err, " - |\n"));
  for (const char* row : {"policy", "prompt tokens", "generated tokens", "time to first token"}) {
    CAPTURE(row);
    CHECK(contains(whole.err, row));
  }
  // One token: no time per token.
  const Outcome one = sluice::test::sluice(kRun + kPrompt + "--max-tokens 1 --policy full");
  CHECK_FALSE(contains(one.err, "\n| time per token"));
  // What happened is shown.
  const Outcome sparse = sluice::test::sluice(kRun + kPrompt + "--max-tokens 4 --policy topk:budget=8 --audit 1");
  CAPTURE(sparse.err);
  for (const char* row : {"far bytes", "scored", "coverage", "of dense"})
    CHECK(contains(sparse.err, std::string("\n| ") + row));
  const Outcome streamed = sluice::test::sluice(kRun + kPrompt + "--max-tokens 4 --near 0% --placement stream");
  CAPTURE(streamed.err);
  CHECK(contains(streamed.err, "\n| link bytes"));
}

TEST_CASE("a text is the same wherever keys and values are", "[cli]") {
  const std::string place = GENERATE(" --near 0%", " --near 30%", " --near 100%", " --near 0% --placement stream");
  const std::string arguments = kRun + kPrompt + "--max-tokens 16 --policy full";
  const json want = json_of(arguments);
  const json got = json_of(arguments + place);
  CAPTURE(place);
  CHECK(got.at("text") == want.at("text"));
  CHECK(got.at("tokens").size() == 16);
  const json row = row_of(got);
  CHECK(row.at("attended_share") == 1.0);
  const bool streams = contains(place, "stream");
  CHECK((row.at("far_bytes_share") == 0.0) == (streams || place == " --near 100%"));
  CHECK((row.at("link_bytes_share") == 0.0) == !streams);
}

TEST_CASE("policies choose the same wherever what they chose is attended", "[cli]") {
  // Each of them leaves tokens out of a prompt as short as this.
  const std::string policy =
      GENERATE("lfps:budget=8", "topk:budget=8", "magicpig:recent_prompt=2,recent=2,tables=8,bits=6",
               "'clusters:least=8,size=4,candidates=12 | "
               "top_k=6 | near=0,sinks=2,recent=4'",
               "'pages:pages=1 | top_k=6 | near=0,sinks=2,recent=4 | page=8'",
               "'history+pages:pages=1 | int4 | top_k=6 | near=0,sinks=2,recent=4 | page=8'");
  const std::string arguments = kRun + kPrompt + "--max-tokens 16 --policy " + policy;
  const json in_place = json_of(arguments + " --near 0%");
  const json streamed = json_of(arguments + " --near 50% --placement stream");
  CAPTURE(policy);
  CHECK(streamed.at("text") == in_place.at("text"));
  CHECK(streamed.at("tokens").size() == 16);
  CHECK(row_of(streamed).at("attended_share") == row_of(in_place).at("attended_share"));
  CHECK(row_of(streamed).at("attended_share") < 1.0);
}

TEST_CASE("run writes a budget of far tokens behind its policy and says so", "[cli]") {
  const std::string run = kRun + kPrompt + "--max-tokens 2 --policy topk:budget=20 ";
  const json report = json_of(run + "--far 40");
  CHECK(report.at("config").at("policy") == "topk:budget=20 | far=40");
  CHECK(contains(report.at("config").at("composition").get<std::string>(), "| far=40 |"));
  CHECK(json_of(run + "--far all").at("tokens") == json_of(run).at("tokens"));
  const Outcome outcome = sluice::test::sluice(run + "--far auto");
  CAPTURE(outcome.err);
  CHECK(outcome.code == 0);
  CHECK(contains(outcome.err, "the policy is topk:budget=20"));
}

TEST_CASE("a session keeps the prompt from one run to the next", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string file = scratch.file("session");
  const std::string policy = GENERATE("sluice", "lfps:budget=8", "full");
  const auto under = [&](const std::string& of, const std::string& prompt) {
    return kRun + "--prompt '" + prompt + "' --max-tokens 12 --policy " + of + " --near 0%";
  };
  const auto with = [&](const std::string& prompt) { return under(policy, prompt); };
  const std::string first = "The grass is green. The sky is";
  const std::string more = first + " blue. The sun is";
  const std::string session = " --session " + file;
  struct Turn {
    std::string prompt;
    int resumed;
  };
  // The last token is read again, as what comes next is not kept.
  for (const auto& [prompt, resumed] : {Turn{first, 0}, Turn{first, kPromptTokens - 1}, Turn{more, kPromptTokens},
                                        Turn{first, kPromptTokens - 1}, Turn{more, kPromptTokens}}) {
    CAPTURE(policy, prompt, resumed);
    const json want = json_of(with(prompt));
    const json got = json_of(with(prompt) + session);
    CHECK(got.at("tokens") == want.at("tokens"));
    CHECK(got.at("resumed_tokens") == resumed);
    CHECK(row_of(got).at("prompt_tokens") == row_of(want).at("prompt_tokens"));
    CHECK(scratch.entries() == 1);
  }
  for (const std::string& other : {with("The grass was green. The sky is"), under("topk", first),
                                   with(first) + " --prefill flexprefill"}) {
    const Outcome outcome = sluice::test::sluice(other + session);
    CAPTURE(other, outcome.err);
    CHECK(outcome.code != 0);
    CHECK(is_one_error(outcome));
    CHECK(contains(outcome.err, file));
  }
  const Outcome advised = sluice::test::sluice(with(first) + session + " --far auto");
  CHECK(advised.code == 2);
  CHECK(contains(advised.err, "--far auto"));
  const std::string bytes = read_file(file);
  (void)scratch.write("session", bytes.substr(0, bytes.size() / 2));
  CHECK(contains(sluice::test::sluice(with(first) + session).err, "damaged"));
}

TEST_CASE("a session of a model of which one byte differs is refused", "[cli]") {
  const TemporaryDirectory scratch;
  namespace fs = std::filesystem;
  fs::copy(sluice::test::test_data() + "/testbed", scratch.file("model"));
  const std::string weights = scratch.file("model/model-00001-of-00002.safetensors");
  const std::string run = "run --model '" + scratch.file("model") + "' --threads 2 --prompt 'The sky is' --max-tokens 1 " +
                          "-o json --session '" + scratch.file("session") + "'";
  const auto asked = [&] { return sluice::test::shell("XDG_CACHE_HOME='" + scratch.file("cache") + "' '" +
                                                      sluice::test::cli_path() + "' " + run); };
  CHECK(json::parse(asked().out).at("resumed_tokens") == 0);
  CHECK(json::parse(asked().out).at("resumed_tokens") == 10);
  // In the middle, with size and time of modification as they were.
  const auto time = fs::last_write_time(weights);
  {
    std::fstream file(weights, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(7'000'000);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(7'000'000);
    file.put(byte);
  }
  fs::last_write_time(weights, time);
  const Outcome other = asked();
  CAPTURE(other.err);
  CHECK(other.code == 2);
  CHECK(is_one_error(other));
  CHECK(contains(other.err, "model-00001-of-00002.safetensors"));
}

TEST_CASE("a session that cannot be kept is refused before the prompt is read", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string nowhere = scratch.file("no/such/session");
  const Outcome outcome = sluice::test::sluice(kRun + kPrompt + "--max-tokens 2 --session '" + nowhere + "'");
  CAPTURE(outcome.err);
  CHECK(outcome.code == 1);
  CHECK(is_one_error(outcome));  // And no word of a prefill.
  CHECK(contains(outcome.err, "--session " + nowhere));
  CHECK(contains(outcome.err, "existing directory"));
}

TEST_CASE("a prompt that cannot be kept after all is answered, and the exit code tells", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string out = scratch.file("out"), file = scratch.file("session");
  const std::string asked = kRun + kPrompt + "--max-tokens 5 --policy full ";
  // Nothing that is not empty can be written, but to a pipe.
  (void)sluice::test::shell("{ (ulimit -f 0; '" + sluice::test::cli_path() + "' " + asked + "-o json --session '" +
                            file + "' 2>&1; echo \"code $?\"); } | cat >'" + out + "'");
  const std::string printed = sluice::test::read_file(out);
  CAPTURE(printed);
  REQUIRE(printed.ends_with("code 1\n"));
  CHECK(contains(printed, "error: --session " + file + " was not written: "));
  const std::string report = printed.substr(printed.find("\n{") + 1);
  CHECK(json::parse(report.substr(0, report.rfind("code 1"))).at("tokens") == json_of(asked).at("tokens"));
  CHECK(scratch.entries() == 1);
}

TEST_CASE("run says up to how many tokens all are attended, whatever the policy", "[cli]") {
  CHECK(row_of(json_of(kRun + kPrompt + "--max-tokens 2")).at("dense_tokens") > 0);
  CHECK_FALSE(row_of(json_of(kRun + kPrompt + "--max-tokens 2 --dense-tokens 0")).contains("dense_tokens"));
  CHECK_FALSE(row_of(json_of(kRun + kPrompt + "--max-tokens 2 --policy topk")).contains("dense_tokens"));
}

TEST_CASE("run says in words that a policy chose nothing", "[cli]") {
  const std::string two = kRun + kPrompt + "--max-tokens 2 ";
  CHECK(row_of(json_of(two)).at("attended_whole") == "nothing: every token was attended");
  CHECK_FALSE(row_of(json_of(two + "--policy full")).contains("attended_whole"));
  const std::string narrow = two + "--policy 'streaming:sinks=1,recent=4 | page=8'";
  CHECK_FALSE(row_of(json_of(narrow)).contains("attended_whole"));
}

TEST_CASE("a policy that keeps pages near is refused with what to say instead", "[cli]") {
  const Outcome outcome =
      sluice::test::sluice(kRun + kPrompt + "--max-tokens 2 --policy 'history | top_k=9 | near=10%'");
  CAPTURE(outcome.err);
  CHECK(outcome.code != 0);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, "near=0"));
}
