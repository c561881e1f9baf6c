// The comparison of record in parts, and what is made of those that there are.
#include <cstdlib>
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
using sluice::test::TemporaryDirectory;

namespace {

const std::string kData = sluice::test::test_data();

/// tools/record.sh with everything as small as it may be.
Outcome record(const std::string& arguments) {
  return sluice::test::shell("SLUICE='" + sluice::test::cli_path() + "' MODEL='" + kData +
                             "/testbed' RECORD_SHORT=512 RECORD_LONG=600 RECORD_COUNT=1 "
                             "RECORD_TEXT_LENGTHS=512 RECORD_TEXT_TOKENS=20 RECORD_TEXTS=1 "
                             "RECORD_POLICIES='full;streaming:recent=8' sh '" +
                             kData + "/../../tools/record.sh' " + arguments);
}

}  // namespace

TEST_CASE("the record is measured in parts and merged from those that there are", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string directory = "'" + scratch.file("") + "' host ";
  const Outcome list = record("--list host");
  REQUIRE(list.code == 0);
  CHECK(contains(list.out, "5 tasks-kv-short\n6 tasks-kv-long\n"));
  for (const char* part : {"5", "tasks-kv-long", "text-512"}) {
    const Outcome outcome = record(directory + "--part " + part);
    CAPTURE(part, outcome.err);
    REQUIRE(outcome.code == 0);
  }
  CHECK(scratch.entries() == 4);  // With the text.
  CHECK(json::parse(read_file(scratch.file("tasks-kv-short.json"))).at("results").at("eval").size() == 2);
  if (std::system("python3 -c '' 2>/dev/null") != 0) {
    WARN("skipped: python3 makes the tables, and there is none");
    return;
  }
  const Outcome merged = record(directory + "--merge");
  CAPTURE(merged.err);
  REQUIRE(merged.code == 0);
  const std::string tables = read_file(scratch.file("tables.md"));
  CHECK(tables == merged.out);
  CHECK(tables.starts_with("Missing: `tasks-niah-short`"));
  CHECK_FALSE(contains(tables, "`tasks-kv-short`"));
  CHECK(contains(tables, "| `full` | 1.00 | 1.00 |"));  // Both lengths in one table.
  CHECK(contains(tables, "| `streaming:recent=8` | 0.00 |"));
  CHECK(contains(tables, "| `full` | 512 | 19 |"));  // Predictions, of which the last is not known.
  const std::string svg = read_file(scratch.file("accuracy.svg"));
  CHECK(svg.starts_with("<svg"));
  CHECK(contains(svg, "streaming:recent=8"));
}

TEST_CASE("a part that there is not is refused", "[cli]") {
  const Outcome outcome = record("/nonexistent host --part 99");
  CHECK(outcome.code != 0);
}

TEST_CASE("plot draws several reports as one, and refuses what is none", "[cli]") {
  const TemporaryDirectory scratch;
  const auto report = [&](const std::string& name, const std::string& policy, const std::string& prefill) {
    const json row = {{"policy", policy}, {"prefill", prefill}, {"accuracy", 0.5}, {"near_bytes_share", 0.1}, {"far_bytes_share", 0.3}};
    return "'" + scratch.write(name, json{{"results", {{"eval", {row}}}}}.dump()) + "' ";
  };
  const std::string a = report("a", "first", "full");
  const Outcome two = sluice::test::sluice("plot " + a + report("b", "second", "full"));
  REQUIRE(two.code == 0);
  CHECK(contains(two.out, ">first</text>"));
  CHECK(contains(two.out, ">second</text>"));
  const Outcome ways = sluice::test::sluice("plot " + a + report("c", "first", "auto"));
  CHECK(contains(ways.out, ">first, full</text>"));
  CHECK(contains(ways.out, ">first, auto</text>"));
  for (const char* text : {"", "{}", "[1]", R"({"results": {"eval": {}}})", R"({"results": {"eval": [{"policy": "x"}]}})",
                           R"({"results": {"eval": [{"policy": 1, "prefill": "full", "accuracy": 1, "near_bytes_share": 1, "far_bytes_share": 1}]}})"}) {
    const Outcome outcome = sluice::test::sluice("plot " + a + "'" + scratch.write("bad", text) + "'");
    CAPTURE(text, outcome.err);
    CHECK(outcome.code == 2);
    CHECK(is_one_error(outcome));
  }
}
