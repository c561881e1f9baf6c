// How prompts are prefilled: the flags, what run and eval say of it, and the benchmark.
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
using sluice::test::Outcome;
using sluice::test::tasks_of;
using sluice::test::TemporaryDirectory;

namespace {

const std::string kModel = sluice::test::testbed_model() + "--threads 2 ";
const std::string kFlex = "--prefill flexprefill@0.9 --min-budget 128 ";

json results_of(const std::string& arguments) { return sluice::test::json_of(arguments).at("results"); }
json config_of(const std::string& arguments) { return sluice::test::json_of(arguments).at("config"); }

/// Some 2,000 tokens of text.
std::string long_prompt() {
  std::string text;
  for (int i = 0; i < 80; ++i) text += "The grass is green. The ";
  return "--prompt '" + text + "' ";
}

}  // namespace

TEST_CASE("a wrong way to prefill is refused by name, before anything runs", "[cli]") {
  struct Case {
    std::string arguments;
    std::string named;
  };
  const std::string run = "run " + kModel + "--prompt a ";
  const std::string eval = "eval " + kModel + "--tasks none ";
  const auto wrong = GENERATE_COPY(values<Case>({
      {run + "--prefill sparse", "full, flexprefill, auto"},
      {run + "--prefill full,auto", "full, flexprefill, auto"},
      {run + "--prefill ''", "--prefill"},
      {run + "--prefill flexprefill@x", "'flexprefill@x'"},
      {run + "--prefill flexprefill@", "'flexprefill@'"},
      {run + "--prefill full@0.9", "'full@0.9'"},
      {run + "--prefill flexprefill@nan", "gamma"},
      {run + "--gamma 0", "gamma"},
      {run + "--gamma 1.01", "gamma"},
      {run + "--tau 2", "tau"},
      {run + "--min-budget -1", "--min-budget"},
      {eval + "--prefill flexprefill@1.5", "gamma"},
      {"bench prefill --gammas 0.9,x", "--gammas: 'x'"},
      {"bench prefill --structures ''", "--structures"},
      {"bench prefill --structures odd",
       "--structures: 'odd' is no structure; have vertical_slash, narrow_slash, query_aware, uniform"},
      {"bench prefill --gammas 0.9,2", "gamma"},
      {"bench prefill --others full", "name streaming or minference"},
      {"bench prefill --others minference@slash", "vertical_slash, a_shape, block_sparse, best"},
      {"bench prefill --others minference@a_shape:4", "has 1 sizes, and there are 2"},
      {"bench prefill --others streaming@0+0", "window is 0 tokens"},
      {"bench prefill --others streaming@x+1", "streaming@x+1"},
      {"bench prefill --length 0", "--length"},
      {"bench prefill --q-heads 7", "q_heads"},
      {"bench prefill --chunk 0", "--chunk"},
      {"bench prefill --rows 0", "--rows"},
      {"bench prefill --ragged x", "--ragged"},
  }));
  const Outcome outcome = sluice::test::sluice(wrong.arguments);
  CAPTURE(wrong.arguments, outcome.out, outcome.err);
  CHECK(outcome.code == 2);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, wrong.named));
}

TEST_CASE("reports name the way to prefill and the chunk that it takes", "[cli]") {
  struct Case {
    std::string arguments;
    json prefill;
    int chunk;
  };
  const auto wanted = GENERATE(values<Case>({
      {"--prefill full", {{"mode", "full"}}, 512},
      {"--prefill auto",
       {{"mode", "auto"},
        {"gamma", 0.95f},
        {"tau", 0.1f},
        {"min_budget", 1024},
        {"max_budget", 0},
        {"lines", false},
        {"flattened", false}},
       4096},
      {"--prefill flexprefill@0.5 --gamma 0.25 --tau 1 --min-budget 0 --max-budget 2K --lines",
       {{"mode", "flexprefill"},
        {"gamma", 0.5f},
        {"tau", 1.f},
        {"min_budget", 0},
        {"max_budget", 2048},
        {"lines", true},
        {"flattened", false}},
       4096},
      {"--prefill streaming@100+200", {{"mode", "streaming"}, {"sizes", "streaming@100+200"}}, 4096},
      {"--prefill minference", {{"mode", "minference"}, {"sizes", "minference@vertical_slash:1000+6096"}}, 4096},
      {"--prefill minference@best:1+2+3+4+5 --prefill-chunk 256",
       {{"mode", "minference"}, {"sizes", "minference@best:1+2+3+4+5"}},
       256},
      {"--prefill flexprefill --gamma 0.25 --flattened --prefill-chunk 256",
       {{"mode", "flexprefill"},
        {"gamma", 0.25f},
        {"tau", 0.1f},
        {"min_budget", 1024},
        {"max_budget", 0},
        {"lines", false},
        {"flattened", true}},
       256},
  }));
  CAPTURE(wanted.arguments);
  const json run = config_of("run " + kModel + wanted.arguments + " --prompt a --max-tokens 1");
  CHECK(run.at("prefill") == wanted.prefill);
  CHECK(run.at("prefill_chunk") == wanted.chunk);
  const TemporaryDirectory scratch;
  json eval = config_of("eval " + kModel + wanted.arguments + " --audit 0 --policies full --max-tokens 1 " +
                        tasks_of(scratch, R"({"prompt": "a", "answer": "b"})"));
  CHECK(eval.at("prefill").erase("name") == 1);
  CHECK(eval.at("prefill") == wanted.prefill);
  CHECK(eval.at("prefill_chunk") == wanted.chunk);
}

TEST_CASE("run says which share of a prompt's blocks was computed", "[cli]") {
  const std::string prefill = GENERATE(std::string("--prefill full "), kFlex);
  const json row = results_of("run " + kModel + prefill + long_prompt() + "--max-tokens 2").at("run").at(0);
  CAPTURE(prefill, row.dump());
  CHECK((row.at("blocks_share") < 1.0) == (prefill == kFlex));
  CHECK(row.at("sparse_chunks_share") == (prefill == kFlex ? 1.0 : 0.0));
}

TEST_CASE("bench prefill checks and reports every method at every structure and chunk", "[cli]") {
  const json rows = results_of("bench prefill --shape testbed --length 1K --chunk 512 --gammas 0.9 --min-budget 128 "
                               "--threads 2 --repeat 1").at("prefill");
  REQUIRE(rows.size() == 3 * 2 * 3);  // Structures, chunks, methods.
  std::set<std::string> methods;
  for (const json& row : rows) {
    CAPTURE(row.dump());
    methods.insert(row.at("method"));
    const double coverage = row.at("coverage_mean");
    const double blocks = row.at("blocks_share");
    CHECK(row.at("total_ms") > 0.0);
    CHECK(coverage <= 1.0);
    CHECK(coverage > 0.0);
    if (row.at("method") == "flexprefill@0.9") {
      CHECK(row.at("select_ms") > 0.0);
      if (row.at("structure") != "uniform") {
        CHECK(blocks < 1.0);
        CHECK(coverage > blocks);
      }
      if (row.at("structure") == "query_aware") CHECK(row.at("query_aware_share") > 0.5);
      if (row.at("structure") == "vertical_slash") CHECK(row.at("query_aware_share") < 0.5);
    } else if (row.at("method") == "dense") {
      CHECK(blocks == 1.0);
      CHECK(coverage == 1.0);
      CHECK(row.at("output_error") == 0.0);
    } else {  // Put together from the other two.
      CHECK(blocks > 0.0);
      CHECK(blocks <= 1.0);
      CHECK(row.at("output_error").is_null());
    }
  }
  CHECK(methods == std::set<std::string>{"dense", "flexprefill@0.9", "auto@0.9"});
}

TEST_CASE("bench prefill holds other ways to choose blocks against FlexPrefill", "[cli]") {
  const std::string named = "streaming@100+200,minference@vertical_slash:128+256,minference@best:128+256+1+129+256";
  const json rows = results_of(
                        "bench prefill --shape testbed --length 2K --gammas 0.9 --min-budget 128 --structures "
                        "query_aware --threads 2 --repeat 1 --others " +
                        named)
                        .at("prefill");
  REQUIRE(rows.size() == 6);  // Dense, flexprefill and auto, and the others, which have no auto.
  std::set<std::string> methods;
  for (const json& row : rows) {
    CAPTURE(row.dump());
    methods.insert(row.at("method"));
    CHECK(row.at("coverage_mean") > 0.0);
    if (std::string(row.at("method")).starts_with("minference") || row.at("method") == "streaming@100+200")
      CHECK(row.at("blocks_share") < 0.6);
    if (std::string(row.at("method")).starts_with("minference@best")) CHECK(row.at("query_aware_share") > 0.5);
  }
  CHECK(methods.size() == 6);
}

TEST_CASE("bench prefill checks every prompt of a batch, whose chunks are attended together", "[cli]") {
  const json rows = results_of(
                        "bench prefill --shape testbed --length 1K --chunk 512 --gammas 0.9 --min-budget 128 "
                        "--structures query_aware --rows 1,3 --ragged 200 --threads 2 --repeat 1")
                        .at("prefill");
  REQUIRE(rows.size() == 2 * 2 * 3);  // Batches, chunks, methods.
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CAPTURE(rows[i].dump());
    CHECK(rows[i].at("rows") == (i < 6 ? 1 : 3));
    CHECK(rows[i].at("length_tokens") == 1024);
    CHECK(rows[i].at("total_ms") > 0.0);
    const double blocks = rows[i].at("blocks_share");
    const double coverage = rows[i].at("coverage_mean");
    CHECK(blocks <= 1.0);
    CHECK(coverage <= 1.0);
    if (rows[i].at("method") == "dense") CHECK(rows[i].at("output_error") == 0.0);
    if (rows[i].at("method") == "flexprefill@0.9") {
      CHECK(blocks < 1.0);
      CHECK(coverage > blocks);
    }
  }
}

TEST_CASE("bench prefill times k-means of a prompt's keys beside its dense attention", "[cli]") {
  const std::string bench =
      "bench prefill --shape testbed --length 1K --chunk 512 --gammas '' --structures uniform "
      "--batch 1,2 --threads 2 --repeat 1 ";
  CHECK(!results_of(bench).contains("clusters"));
  const json rows = results_of(bench + "--clusters 32").at("clusters");
  REQUIRE(rows.size() == 2);
  for (const json& row : rows) {
    CAPTURE(row.dump());
    CHECK(row.at("clusters") == 32);
    CHECK(row.at("cluster_ms") > 0.0);
    CHECK(row.at("of_dense_share").get<double>() ==
          Approx(row.at("cluster_ms").get<double>() / row.at("dense_ms").get<double>()));
  }
}
