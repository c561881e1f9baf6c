// `sluice bench decode --structure`, on the CPU.
#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;

namespace {

Outcome bench_decode(const std::string& arguments) {
  return sluice::test::sluice("bench decode --device host --random-weights tiny --threads 2 " + arguments);
}

/// Rows of the first table by their method.
std::map<std::string, json> rows_of(const std::string& arguments) {
  const Outcome outcome = bench_decode(arguments + " -o json");
  CAPTURE(arguments, outcome.err);
  REQUIRE(outcome.code == 0);
  std::map<std::string, json> rows;
  const json report = json::parse(outcome.out);
  for (const json& row : report.at("results").at("decode")) rows[row.at("method").get<std::string>()] = row;
  return rows;
}

double number(const json& row, const char* key) { return row.at(key).get<double>(); }

}  // namespace

TEST_CASE("bench decode: every method attends the same synthetic rows, of which few hold most of the softmax",
          "[cli]") {
  const auto rows = rows_of(
      "--structure narrow_slash --length 8K --batch 2 --steps 8 --warm-up 32 --audit 2 "
      "--methods 'dense;near/full;hybrid/full;stream/full;near/sluice;hybrid/sluice'");
  for (const char* method : {"dense", "near/full", "hybrid/full", "stream/full"}) {
    CAPTURE(method);
    CHECK(number(rows.at(method), "same_tokens_share") == 1.0);
  }
  CHECK(rows.at("dense").at("coverage_mean").is_null());
  CHECK(number(rows.at("hybrid/full"), "coverage_mean") > 0.999);
  const json &near = rows.at("near/sluice"), &hybrid = rows.at("hybrid/sluice");
  CHECK(number(near, "attended_share") < 0.1);
  CHECK(number(near, "coverage_mean") > 0.9);
  CHECK(number(near, "near_hit_share") == 1.0);
  // Where rows lie changes no choice. What is wanted is wanted again.
  CHECK(number(hybrid, "coverage_mean") == Approx(number(near, "coverage_mean")).epsilon(1e-4));
  CHECK(number(hybrid, "attended_share") == number(near, "attended_share"));
  CHECK(number(hybrid, "near_hit_share") > 0.4);

  const auto uniform =
      rows_of("--structure uniform --length 8K --steps 8 --warm-up 32 --audit 2 --methods hybrid/sluice");
  CHECK(number(uniform.at("hybrid/sluice"), "coverage_mean") < 0.3);
  CHECK(number(uniform.at("hybrid/sluice"), "near_hit_share") < 0.6);
}

TEST_CASE("bench decode: each sequence of a batch has clusters of its own", "[cli]") {
  const auto rows = rows_of(
      "--structure narrow_slash --length 1K --batch 3 --steps 2 --warm-up 1 --audit 1 --methods "
      "'dense;near/tactic | int4'");
  const json& tactic = rows.at("near/tactic | int4");
  CHECK(tactic.at("at_once") == 3);
  CHECK(number(tactic, "attended_share") < 0.9);
  CHECK(number(tactic, "coverage_mean") > 0.8);
}

TEST_CASE("bench decode: drafts of synthetic rows are those that come one by one", "[cli]") {
  const auto rows = rows_of(
      "--structure vertical_slash --length 2K --steps 4 --warm-up 4 --audit 1 --drafts 3 --methods "
      "'dense;hybrid/full;near/sluice'");
  for (const auto& [method, row] : rows) {
    CAPTURE(method);
    if (contains(method, "full")) CHECK(number(row, "same_tokens_share") == 1.0);
    if (contains(method, "full")) CHECK(number(row, "coverage_mean") > 0.999);
    if (contains(method, "sluice")) CHECK(number(row, "coverage_mean") > 0.65);
  }
  CHECK(rows.size() == 7);
}

TEST_CASE("bench decode goes on with the model's own tokens and rows unless a structure is named", "[cli]") {
  const auto rows = rows_of("--length 512 --steps 2 --warm-up 1 --methods 'dense;hybrid/sluice'");
  CHECK(rows.at("hybrid/sluice").at("same_tokens_share").is_null());
  CHECK(rows.at("hybrid/sluice").at("coverage_mean").is_null());
  for (const char* method : {"dense", "hybrid/sluice"}) CHECK(rows.at(method).at("launched") == "enqueued");
  const Outcome on = bench_decode("--graphs on --length 512 --steps 2 --warm-up 1 --methods hybrid/sluice");
  CHECK(on.code == 3);
  CHECK(contains(on.err, "runs on the CPU"));
  const Outcome odd = bench_decode("--structure odd");
  CHECK(odd.code == 2);
  CHECK(is_one_error(odd));
  CHECK(contains(odd.err, "--structure: 'odd'"));
  CHECK(contains(odd.err, "vertical_slash, narrow_slash, query_aware, uniform"));
  const Outcome seeded = bench_decode("--seed 3 --length 512");
  CHECK(seeded.code == 2);
  CHECK(contains(seeded.err, "--structure"));
}
