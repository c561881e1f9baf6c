// `--trace`: files that a browser draws, read back, and what the tables say of them.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

const std::string kRun =
    "run " + sluice::test::testbed_model() + "--threads 2 --prompt 'The grass is green. The sky is' --max-tokens 6 ";

/// Spans by the name of their process.
using Spans = std::map<std::string, std::vector<json>>;

Spans spans_of(const json& file) {
  std::map<int, std::string> names;
  Spans spans;
  for (const json& event : file.at("traceEvents")) {
    if (event.at("name") == "process_name") names[event.at("pid")] = event.at("args").at("name");
    if (event.at("ph") == "X") spans[names.at(event.at("pid"))].push_back(event);
  }
  return spans;
}

/// Ends do not come before begins, and on a row nothing overlaps. Times are of nanoseconds.
void require_sound(const Spans& spans) {
  for (const auto& [process, all] : spans) {
    std::map<int, std::vector<std::pair<double, double>>> rows;
    for (const json& span : all) {
      const double begin = span.at("ts"), length = span.at("dur");
      REQUIRE(length >= 0.0);
      rows[span.at("tid")].emplace_back(begin, begin + length);
    }
    if (process == "plan") continue;  // What is planned of one forward may reach into the next.
    for (auto& [row, times] : rows) {
      std::ranges::sort(times);
      CAPTURE(process, row);
      for (std::size_t i = 1; i < times.size(); ++i) REQUIRE(times[i].first >= times[i - 1].second - 1e-3);
    }
  }
}

/// Stages of a forward and layer, of these processes.
using Stages = std::map<std::pair<int, int>, std::set<std::string>>;
Stages stages_of(const Spans& spans, std::initializer_list<const char*> processes) {
  Stages stages;
  for (const char* const process : processes) {
    if (!spans.contains(process)) continue;
    for (const json& span : spans.at(process))
      stages[{span.at("args").at("forward"), span.at("args").at("layer")}].insert(span.at("name"));
  }
  return stages;
}

}  // namespace

TEST_CASE("run writes a trace in which every layer of every forward has its stages", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string path = scratch.file("trace.json");
  const Outcome outcome =
      sluice::test::sluice(kRun + "--policy 'exact | int4 | top_k=8 | near=0' --trace '" + path + "' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json report = json::parse(outcome.out);
  const auto layers = report.at("config").at("engine").at("layers").get<std::size_t>();
  const Spans spans = spans_of(json::parse(read_file(path)));
  require_sound(spans);
  REQUIRE(spans.at("forwards").size() == 6);  // The prompt, and a token each but for the last.
  const Stages stages = stages_of(spans, {"device", "link"});
  REQUIRE(stages.size() == 6 * layers);
  std::size_t prompts = 0;
  for (const auto& [at, names] : stages) {
    if (names == std::set<std::string>{"append", "prefill"}) {
      ++prompts;
      continue;
    }
    for (const char* const name : {"append", "score", "choose", "split", "attend", "merge"})
      REQUIRE(names.contains(name));
  }
  REQUIRE(prompts == layers);
  for (const json& forward : spans.at("forwards")) {
    REQUIRE(forward.at("args").at("done") == true);
    REQUIRE(forward.at("args").at("clock_error_us") == 0.0);
  }
  // The plan is there for all that was measured on the device.
  Stages planned = stages_of(spans, {"plan"});
  REQUIRE(planned.size() == stages.size());
  const json& table = report.at("results").at("trace_stages");
  std::set<std::pair<std::string, std::string>> rows;
  for (const json& row : table) {
    rows.emplace(row.at("forward").get<std::string>(), row.at("stage").get<std::string>());
    REQUIRE(row.at("us").get<double>() >= 0.0);
  }
  for (const char* const stage : {"append", "score", "attend", "merge"}) REQUIRE(rows.contains({"decode", stage}));
  REQUIRE(rows.contains({"prompt", "prefill"}));
  REQUIRE(report.at("results").contains("trace_stalls"));
}

TEST_CASE("a trace that its file does not take leaves the result as it is", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string out = scratch.file("out");
  // Nothing that is not empty can be written, but to a pipe.
  (void)sluice::test::shell("{ (ulimit -f 0; '" + sluice::test::cli_path() + "' " + kRun +
                            "--policy topk --near 0 --trace '" + scratch.file("trace.json") +
                            "' -o json 2>/dev/null; echo \"code $?\"); } | cat >'" + out + "'");
  const std::string printed = sluice::test::read_file(out);
  CAPTURE(printed);
  REQUIRE(printed.ends_with("code 1\n"));
  const json report = json::parse(printed.substr(0, printed.rfind("code 1")));
  CHECK(report.at("results").contains("trace_stages"));
}

TEST_CASE("run without a trace says nothing of stages", "[cli]") {
  const Outcome outcome = sluice::test::sluice(kRun + "-o json");
  REQUIRE(outcome.code == 0);
  REQUIRE(!json::parse(outcome.out).at("results").contains("trace_stages"));
}

TEST_CASE("a trace shows what the threads of the CPU do, and for how long the device waits", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string path = scratch.file("trace.json");
  const Outcome outcome = sluice::test::sluice(kRun + "--policy topk --near 0 --trace '" + path + "' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const Spans spans = spans_of(json::parse(read_file(path)));
  require_sound(spans);
  std::set<std::string> names;
  for (const json& span : spans.at("cpu")) {
    names.insert(span.at("name"));
    if (span.at("name") != "look") REQUIRE(span.at("tid").get<int>() < 2);
  }
  REQUIRE(names.contains("choose_far"));
  REQUIRE(names.contains("look"));
  const std::map<std::string, std::string> waited_for{
      {"unseen", "workers"}, {"choosing", "workers"}, {"attending", "workers"}, {"looking", "workers"},
      {"arriving", "link"},  {"computing", "device"}, {"enqueuing", "host"}};
  for (const json& stall : spans.at("stalls")) REQUIRE(stall.at("args").at("for") == waited_for.at(stall.at("name")));
  // The table adds up what is drawn: by who waits, for whom, and why.
  double us = 0.0;
  for (const json& stall : spans.at("stalls")) us += stall.at("dur").get<double>();
  std::map<std::string, std::size_t> forwards;
  for (const json& forward : spans.at("forwards")) ++forwards[forward.at("name")];
  std::set<std::string> waiting;
  const json report = json::parse(outcome.out);
  for (const json& row : report.at("results").at("trace_stalls")) {
    us -= row.at("us_per_forward").get<double>() * static_cast<double>(forwards.at(row.at("forward")));
    REQUIRE(row.at("waited_for") == waited_for.at(row.at("cause")));
    REQUIRE(row.at("actor") != row.at("waited_for"));
    waiting.insert(row.at("actor"));
  }
  REQUIRE(us == Approx(0.0).margin(0.1));
  REQUIRE(waiting == std::set<std::string>{"device", "workers", "host"});
}

TEST_CASE("a trace that cannot be written is said before any work", "[cli]") {
  const TemporaryDirectory scratch;
  REQUIRE(is_one_error(sluice::test::sluice(kRun + "--trace '" + scratch.file("no/such/dir.json") + "'")));
  const std::string same = scratch.file("same.json");
  const Outcome outcome = sluice::test::sluice(kRun + "-o json --output '" + same + "' --trace '" + same + "'");
  REQUIRE(is_one_error(outcome));
  REQUIRE(contains(outcome.err, "--trace"));
  REQUIRE(is_one_error(sluice::test::sluice("bench gpu --device host --sections kernels --trace '" + same + "'")));
}

TEST_CASE("bench gpu traces each of its cases", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string path = scratch.file("trace.json");
  const Outcome outcome = sluice::test::sluice(
      "bench gpu --device host --shape testbed --length 300 --layers 2 --steps 2 --warm-up 2 --threads 2 --near 0.2 "
      "--policies 'sluice;topk' --placements hybrid,stream --sections attention --trace '" +
      path + "' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const Spans spans = spans_of(json::parse(read_file(path)));
  require_sound(spans);
  REQUIRE(spans.at("forwards").size() == 4 * 2);
  for (const auto& [at, names] : stages_of(spans, {"device", "link"})) {
    for (const char* const name : {"append", "split", "attend", "promote", "merge"}) REQUIRE(names.contains(name));
  }
  std::set<std::string> kinds;
  for (const json& forward : spans.at("forwards")) kinds.insert(forward.at("name"));
  REQUIRE(kinds.size() == 4);
}
