// The command's `eval`.
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/tools/cli_process.hpp"
#include "tests/tools/cli_report.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::report_of;
using sluice::test::TemporaryDirectory;

namespace {

const std::string kEval = "eval " + sluice::test::testbed_model() + "--threads 2 ";

}  // namespace

TEST_CASE("eval reports every policy at every task and length, and dense solves the needle", "[cli]") {
  const std::string policies = "--policies full,topk:budget=64,sinks=4,streaming --count 1 --seed 5 ";
  const Outcome outcome = sluice::test::sluice(kEval + "--tasks niah,kv --lengths 512,1K " + policies + "-o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK_FALSE(contains(outcome.err, "|"));  // No table; a slow machine may be told of progress.
  const json report = report_of(outcome.out, "eval");
  CHECK(report.at("config").at("seed") == 5);
  const json rows = report.at("results").at("eval");
  REQUIRE(rows.size() == 2 * 2 * 3);
  for (const json& row : rows) {
    CAPTURE(row.dump());
    if (row.at("policy") == "full") {
      CHECK(row.at("attended_share") == 1.0);
      CHECK(row.at("coverage_mean") > 0.999);
      if (row.at("task") == "niah") CHECK(row.at("accuracy") == 1.0);
    }
    if (row.at("policy") == "topk:budget=64,sinks=4") CHECK(row.at("attended_share") < 1.0);
  }
  // The same seed, the same rows, whatever else is asked: nothing measured here depends on time, but for the time
  // itself, and which of the machine's kernels win their race.
  const auto timeless = [](const json& results) {
    json kept = json::array();
    for (json row : results.at("eval")) {
      if (row.at("length_tokens") != 512) continue;
      row.erase("layer_us");
      row.erase("prefill_ms");
      kept.push_back(row);
    }
    return kept;
  };
  ::setenv("SLUICE_CPU_ISA", report.at("host").at("isa").get<std::string>().c_str(), 1);
  const Outcome again = sluice::test::sluice(kEval + "--tasks niah,kv --lengths 512 " + policies + "-o json");
  ::unsetenv("SLUICE_CPU_ISA");
  REQUIRE(timeless(report.at("results")).size() == 2 * 3);
  CHECK(timeless(json::parse(again.out).at("results")) == timeless(report.at("results")));
}

TEST_CASE("eval compares with dense attention prompt by prompt, under the far tokens that another shape has", "[cli]") {
  const std::string arguments = kEval + "--tasks niah --lengths 2K --count 2 ";
  const Outcome outcome = sluice::test::sluice(arguments +
                                               "--policies 'full;sluice;sluice | far=256;streaming:recent=8' --paired "
                                               "--far 1024 --far-shape llama-3.1-8b -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json results = report_of(outcome.out, "eval").at("results");
  const json rows = results.at("pairs");
  REQUIRE(rows.size() == 3);  // Dense attention is what they are compared with.
  for (const json& row : rows) {
    CAPTURE(row.dump());
    CHECK(row.at("prompts") == 2);
    CHECK(row.at("dense_accuracy") == 1.0);
    if (row.at("policy") == "streaming:recent=8") {
      CHECK(row.at("divergence_nats") > 0.1);
      CHECK(row.at("same_at_least") < 0.9);
      continue;
    }
    CHECK(row.at("same_answers") == 2);
    CHECK(row.at("same_at_least") == Approx(std::sqrt(0.05)).epsilon(1e-4));
    CHECK(row.at("divergence_nats") < 0.05);
    // 32 of each of 32 query heads are 32 of each of 8; a policy's own budget stays.
    CHECK(row.at("far_budget_tokens") == 256);
  }
  double whole = 0.0, cut = 0.0;
  const auto attended = [](const json& row) { return row.at("attended_share").get<double>(); };
  for (const json& row : results.at("eval")) {
    if (row.at("policy") == "sluice") cut += attended(row);
  }
  const json uncut = report_of(sluice::test::sluice(arguments + "--policies sluice -o json").out, "eval").at("results");
  CHECK_FALSE(uncut.contains("pairs"));
  for (const json& row : uncut.at("eval")) whole += attended(row);
  CHECK(cut < 0.8 * whole);

  CHECK(contains(sluice::test::sluice(kEval + "--policies sluice --paired").err, "name full among --policies"));
  CHECK(contains(sluice::test::sluice(kEval + "--far-shape llama-3.1-8b").err, "give --far auto"));
  CHECK(contains(sluice::test::sluice(kEval + "--far 64 --far-shape llama-9").err, "llama-3.1-8b"));
  CHECK(sluice::test::sluice(kEval + "--far many").code != 0);
}

TEST_CASE("eval reads texts on and compares what is predicted", "[cli]") {
  const std::string text = kEval + "--tasks '' --text '" + sluice::test::test_data() + "/testbed/README.md' ";
  const std::string arguments = text + "--text-lengths 512,1K --text-tokens 40 --count 2 ";
  const Outcome outcome = sluice::test::sluice(arguments + "--policies 'full;topk;streaming:recent=8' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json results = report_of(outcome.out, "eval").at("results");
  CHECK_FALSE(results.contains("eval"));
  const json rows = results.at("text");
  REQUIRE(rows.size() == 2 * 3);
  for (const json& row : rows) {
    CAPTURE(row.dump());
    CHECK(row.at("passages") == 2);
    CHECK(row.at("predicted_tokens") == 2 * 39);  // What comes behind the last one is not known.
    const double ratio = row.at("perplexity_over_dense");
    // Far from a guess among 320 bytes, and far from certain.
    CHECK(row.at("perplexity") > 2.0);
    CHECK(row.at("perplexity") < 20.0);
    if (row.at("policy") == "full") {
      CHECK(ratio == 1.0);
      CHECK(row.at("divergence_worst_nats") == 0.0);
      CHECK(row.at("same_prediction_share") == 1.0);
    } else if (row.at("policy") == "topk") {
      CHECK(ratio == Approx(1.0).epsilon(0.1));
      CHECK(row.at("divergence_nats") > 0.0);
    } else {
      CHECK(ratio > 1.02);
      CHECK(row.at("divergence_nats") > 0.05);
      CHECK(row.at("same_prediction_share") < 1.0);
    }
  }
  const json alone = report_of(sluice::test::sluice(arguments + "--policies topk -o json").out, "eval").at("results");
  CHECK(alone.at("text").at(0).at("divergence_nats").is_null());

  const auto complaint = [&](const std::string& words) {
    return sluice::test::sluice(text + "--policies full " + words).err;
  };
  CHECK(contains(complaint("--text-lengths 512 --text-tokens 8 --count 40"), "give more text"));
  CHECK(contains(complaint("--text-lengths 64K --text-tokens 8 --count 1"), "room for 0"));
  CHECK(contains(complaint("--text-lengths 512 --text-tokens 600"), "lower --text-tokens"));
}

TEST_CASE("eval writes its prompts for other programs", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string text = scratch.write("haystack", "caf\xe9 au lait.\n");
  const Outcome outcome = sluice::test::sluice("eval --tasks kv,niah --lengths 512,1K --count 2 --seed 9 --haystack '" +
                                               text + "' --write-prompts '" + scratch.file("prompts") + "'");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  std::istringstream lines(read_file(scratch.file("prompts")));
  std::vector<json> prompts;
  for (std::string line; std::getline(lines, line);) prompts.push_back(json::parse(line));
  REQUIRE(prompts.size() == 2 * 2 * 2);
  CHECK(prompts[1].at("task") == "kv");
  CHECK(prompts[1].at("seed") == 10);
  CHECK(prompts[7].at("length_tokens") == 1024);
  CHECK(contains(prompts[7].at("prompt").get<std::string>(), "caf\u00e9 au lait."));
  CHECK(prompts[7].at("answer").get<std::string>().ends_with("\n"));
}

TEST_CASE("eval names the heads that lost an answer, and draws accuracy against bytes", "[cli]") {
  const TemporaryDirectory scratch;
  const Outcome outcome = sluice::test::sluice(
      kEval + "--tasks kv --lengths 1K --policies 'streaming:recent=8;full | page=32' --count 2 --plot '" +
      scratch.file("plot.svg") + "' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json results = report_of(outcome.out, "eval").at("results");
  const json& rows = results.at("eval");
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].at("accuracy") == 0.0);
  CHECK(rows[0].at("answer_coverage") < 0.5);  // One answer stands near the question.
  CHECK(rows[1].at("policy") == "full | page=32");
  CHECK(rows[1].at("page_tokens") == 32);
  CHECK(rows[1].at("answer_coverage") > 0.99);
  REQUIRE_FALSE(results.at("lost").empty());
  for (const json& row : results.at("lost")) {
    CHECK(row.at("policy") == "streaming:recent=8");
    CHECK(row.at("wanted_mass") >= 0.01);
    CHECK(row.at("kept_share") < 0.5);
  }
  const std::string svg = read_file(scratch.file("plot.svg"));
  CHECK(svg.starts_with("<svg"));
  CHECK(svg.ends_with("</svg>\n"));
  CHECK(svg.find("streaming:recent=8") != std::string::npos);
}

TEST_CASE("eval plants needles that dense attention finds and a window does not", "[cli]") {
  const Outcome outcome = sluice::test::sluice(
      "eval --tasks '' --needles 1,4 --needle-tokens 2K --needle-steps 2 --threads 2 "
      "--policies 'full;topk;streaming:recent=8' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json rows = report_of(outcome.out, "eval").at("results").at("needles");
  REQUIRE(rows.size() == 6);
  for (const json& row : rows) {
    CAPTURE(row.dump());
    if (row.at("policy") == "streaming:recent=8") {
      CHECK(row.at("found") == 0.0);
    } else {
      CHECK(row.at("found") == 1.0);
    }
  }
}

TEST_CASE("needles are found where eval's placement says, and what is streamed crosses the link", "[cli]") {
  const std::string words =
      "eval --tasks '' --needles 1 --needle-tokens 2K --needle-steps 2 --threads 2 --policies full -o json";
  const auto found = [&](const std::string& placement) {
    const Outcome outcome = sluice::test::sluice(words + placement);
    CAPTURE(outcome.err);
    REQUIRE(outcome.code == 0);
    const json report = report_of(outcome.out, "eval");
    CHECK(report.at("config").at("placement") == (placement.empty() ? "hybrid" : "stream"));
    return report.at("results").at("needles").at(0);
  };
  const json hybrid = found(""), stream = found(" --placement stream");
  CHECK(hybrid.at("found") == 1.0);
  CHECK(stream.at("found") == 1.0);
  CAPTURE(hybrid.dump(), stream.dump());
  CHECK(hybrid.at("link_bytes_share") == 0.0);
  CHECK(stream.at("link_bytes_share") > 0.5);
}
