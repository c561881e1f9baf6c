// What every command has in common, and the first of each: run, doctor, policies and the benchmark of the CPU.
#include <algorithm>
#include <string>

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

const std::string kRun = "run " + sluice::test::testbed_model() + "--threads 2 ";

std::size_t count_lines(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

}  // namespace

TEST_CASE("help and version go to standard output and succeed", "[cli]") {
  for (const char* arguments :
       {"--help", "run --help", "eval --help", "bench cpu --help", "bench prefill --help", "doctor --help", "--version"}) {
    const Outcome outcome = sluice::test::sluice(arguments);
    CAPTURE(arguments, outcome.err);
    CHECK(outcome.code == 0);
    CHECK_FALSE(outcome.out.empty());
    CHECK(outcome.err.empty());
  }
}

TEST_CASE("doctor calls a machine that runs the tests usable, and recommends options that run takes", "[cli]") {
  const Outcome doctor = sluice::test::sluice("doctor -o json");
  CAPTURE(doctor.err);
  REQUIRE(doctor.code == 0);
  CHECK(doctor.err.empty());
  const json report = report_of(doctor.out, "doctor");
  CHECK(report.at("usable") == true);
  const json rows = report.at("results").at("recommended");
  REQUIRE(rows.size() == 3);
  std::string options;
  for (const json& row : rows) {
    const std::string option = row.at("run").get<std::string>();
    CHECK_FALSE(row.at("why").get<std::string>().empty());
    CHECK(row.at("serve").get<std::string>().rfind("--", 0) == 0);
    // Tests beside this one need the memory, too.
    options += (option.rfind("--host-size ", 0) == 0 ? "--host-size 64M" : option) + " ";
  }
  const Outcome outcome =
      sluice::test::sluice("run " + sluice::test::testbed_model() + options + "--prompt 'The sky is' --max-tokens 2");
  CAPTURE(options, outcome.err);
  REQUIRE(outcome.code == 0);
}

TEST_CASE("the presets are the same in every format", "[cli]") {
  const json rows = report_of(sluice::test::sluice("policies -o json").out, "policies").at("results").at("policies");
  REQUIRE(rows.size() >= 5);
  CHECK(rows.front().at("policy") == "full");
  CHECK(count_lines(sluice::test::sluice("policies -o csv").out) == rows.size() + 1);
  CHECK(count_lines(sluice::test::sluice("policies -o md").out) == rows.size() + 2);
}

TEST_CASE("run writes text alone to standard output", "[cli]") {
  const Outcome outcome = sluice::test::sluice(kRun + "--prompt 'The grass is green. The sky is' --max-tokens 8");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(outcome.out.size() <= 8 + 1);  // One byte per token, and the newline.
  CHECK_FALSE(contains(outcome.out, "|"));
  CHECK(contains(outcome.err, "time to first token"));
  CHECK_FALSE(contains(outcome.err, "\r"));  // Standard error is no terminal here: no progress bar.
}

TEST_CASE("run as JSON holds text, ids, timing and configuration in one object", "[cli]") {
  const std::string arguments = kRun + "--prompt 'Here we go. There and' --max-tokens 6 --audit 1 ";
  const Outcome outcome = sluice::test::sluice(arguments + "-o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK_FALSE(contains(outcome.err, "|"));  // No table; a slow machine may be told of progress.
  const json report = report_of(outcome.out, "run");
  const json row = report.at("results").at("run").at(0);
  CHECK(report.at("tokens").size() == row.at("generated_tokens"));
  CHECK(report.at("config").at("seed") == 0);
  CHECK(row.at("ttft_ms") > 0.0);
  CHECK(row.at("coverage_mean") > 0.0);
  // The same text as without JSON.
  CHECK(sluice::test::sluice(arguments).out == report.at("text").get<std::string>() + "\n");
}

TEST_CASE("sampling follows its seed", "[cli]") {
  const auto text = [](const std::string& seed) {
    return sluice::test::sluice(kRun + "--prompt 'The sun is yellow. ' --max-tokens 24 --temperature 1.5 --seed " +
                                seed)
        .out;
  };
  const std::string first = text("3");
  CHECK(first.size() > 1);
  CHECK(text("3") == first);
  CHECK(text("4") != first);
}

TEST_CASE("a report written to a file appears whole", "[cli]") {
  const TemporaryDirectory scratch;
  const Outcome outcome = sluice::test::sluice(
      kRun + "--prompt 'The sky is blue. The' --max-tokens 3 -o json --output '" + scratch.file("result.json") + "'");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(scratch.entries() == 1);
  report_of(read_file(scratch.file("result.json")), "run");
}

TEST_CASE("token ids from a file give what their bytes give", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string ids = scratch.write("ids", "[256, 72, 101, 114, 101, 32, 119, 101]");
  CHECK(sluice::test::sluice(kRun + "--max-tokens 4 --prompt-tokens '" + ids + "'").out ==
        sluice::test::sluice(kRun + "--max-tokens 4 --prompt 'Here we'").out);
}

TEST_CASE("bench cpu bypasses heads whose sinks hold nearly all, and counts only what it attended", "[cli]") {
  const Outcome outcome = sluice::test::sluice(
      "bench cpu --shape testbed --length 4K --steps 2 --threads 1 --sections attention --pattern uniform --sinks 0,0.999 "
      "--policies 'lfps:bypass=0;lfps:bypass=0.5' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json rows = report_of(outcome.out, "bench cpu").at("results").at("attention");
  REQUIRE(rows.size() == 3);
  CHECK(rows[1].at("bypassed_share") == 0.0);
  CHECK(rows[2].at("bypassed_share") == 0.5);
  // A bypassed head has attended its sinks. What it puts in the others' place is an estimate and covers nothing.
  CHECK(rows[2].at("coverage_mean") < rows[1].at("coverage_mean"));
}

TEST_CASE("bench cpu measures policies that keep a share of the mass", "[cli]") {
  const Outcome outcome = sluice::test::sluice(
      "bench cpu --shape testbed --length 2K --steps 2 --threads 1 --sections attention "
      "--policies 'exact | int4 | top_p=0.9 | near=0;history | top_p=0.9 | near=0' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json rows = report_of(outcome.out, "bench cpu").at("results").at("attention");
  REQUIRE(rows.size() == 3);
  for (std::size_t i = 1; i < rows.size(); ++i) CHECK(rows[i].at("attended_share") < 1.0);
}

TEST_CASE("bench cpu checks itself and reports phases and ratios", "[cli]") {
  const Outcome outcome = sluice::test::sluice(
      "bench cpu --shape testbed --length 2K,4K --steps 3 --threads 1 --sections attention -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json rows = report_of(outcome.out, "bench cpu").at("results").at("attention");
  REQUIRE(rows.size() == 2 * 3);
  for (const json& row : rows) {
    CAPTURE(row.dump());
    CHECK(row.at("time_us") > 0.0);
    if (row.at("method") == "topk") {
      CHECK(row.at("topk_overlap") == 1.0);
      CHECK(row.at("scored_share") > 0.9);
    }
    if (row.at("method") == "lfps") {
      CHECK(row.at("topk_overlap") > 0.3);
      CHECK(row.at("scored_share") < 0.9);
      CHECK(row.at("coverage_mean") <= 1.001);
    }
  }
}

TEST_CASE("bench cpu holds a batch against dense attention of the batch, which is what each sequence gives alone",
          "[cli]") {
  const Outcome outcome = sluice::test::sluice(
      "bench cpu --shape testbed --length 2K --batch 1,3 --ragged 300 --steps 2 --threads 2 --sections attention "
      "--policies 'topk;lfps' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json report = report_of(outcome.out, "bench cpu");
  CHECK(report.at("config").at("rows") == json({1, 3}));
  CHECK(report.at("config").at("ragged") == 300);
  const json rows = report.at("results").at("attention");
  REQUIRE(rows.size() == 2 * 3);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(rows[i].dump());
    CHECK(rows[i].at("rows") == (i < 3 ? 1 : 3));
    CHECK(rows[i].at("length_tokens") == 2048);
    CHECK(rows[i].at("attended_share") <= 1.0);
    CHECK(rows[i].at("coverage_mean") <= 1.001);
    if (rows[i].at("method") == "topk") {
      CHECK(rows[i].at("topk_overlap") == 1.0);
      CHECK(rows[i].at("scored_share") > 0.85);  // The near tokens of a short sequence are many.
      CHECK(rows[i].at("scored_share") <= 1.0);
    }
  }
}
