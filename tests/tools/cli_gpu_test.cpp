// `bench gpu`, on machines without a GPU; where there is one it is hidden.
#include <algorithm>
#include <map>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::without_gpu;

TEST_CASE("bench gpu keeps to a budget of far tokens, which it prints", "[cli]") {
  for (const std::string far : {"256", "auto"}) {
    const Outcome outcome = without_gpu(
        "bench gpu --device host --length 1K --layers 1 --steps 2 --warm-up 0 --threads 1 --near 0 --policies "
        "'sluice:budget=20%' --sections attention -o json --far " +
        far);
    CAPTURE(far, outcome.err);
    REQUIRE(outcome.code == 0);
    const json row = json::parse(outcome.out).at("results").at("attention").at(1);
    CAPTURE(row.dump());
    const auto budget = row.at("far_budget_tokens").get<std::uint64_t>();
    CHECK(row.at("method") == "sluice:budget=20% | far=" + std::to_string(budget));
    if (far == "256") CHECK(budget == 256);
    // Of 8 KV heads with some 1,025 tokens each; 132 are sinks and recent ones.
    CHECK(row.at("far_share").get<double>() <= (8 * 132.0 + static_cast<double>(budget)) / (8 * 1024.0));
  }
}

TEST_CASE("bench gpu checks keys and values of 8 bits against dense attention over what they stand for", "[cli]") {
  const Outcome outcome = without_gpu(
      "bench gpu --device host --length 1K --layers 1 --steps 2 --warm-up 0 --threads 1 --near 0 --kv-dtype fp8_e4m3 "
      "--policies full --sections attention -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json row = json::parse(outcome.out).at("results").at("attention").at(1);
  CHECK(row.at("output_error") < 1e-2);
}

TEST_CASE("bench gpu runs on the embedded device and reports every method with its coverage", "[cli]") {
  const Outcome outcome = without_gpu(
      "bench gpu --device host --length 1K --layers 2 --steps 2 --warm-up 2 --rows 1,2 --threads 1 --near 0 "
      "--policies 'sluice;topk' --placements hybrid,stream --sections attention -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json report = json::parse(outcome.out);
  CHECK(report.at("command") == "bench gpu");
  CHECK(report.at("config").at("device") == "host");
  const json rows = report.at("results").at("attention");
  REQUIRE(rows.size() == 2 + 2 * 2 * 2);  // Nothing can be captured there.
  CHECK(rows.at(0).at("method") == "dense in HBM");
  std::set<std::string> methods;
  for (const json& row : rows) {
    CAPTURE(row.dump());
    CHECK(row.at("length_tokens") == 1024);
    CHECK(row.at("layer_us") > 0.0);
    CHECK(row.at("coverage_mean") > 0.0);
    CHECK(row.at("coverage_mean") < 1.001);
    if (row.at("method") == "dense in HBM") continue;
    methods.insert(row.at("method"));
    CHECK(row.at("mode") == "enqueued");
    CHECK(row.at("output_error") < 1.0);
    CHECK(row.at("near_share") == 0);
    const bool streams = row.at("placement") == "stream";
    CHECK((row.at("far_share") > 0.05) == !streams);
    CHECK((row.at("fetched_share") > 0.05) == streams);
    CHECK((row.at("answer_us") > 0.0) == (!streams || row.at("method") == "topk"));
    CHECK(row.at("layer_us").get<double>() >= row.at("waited_us").get<double>());
  }
  CHECK(methods == std::set<std::string>{"topk", "sluice"});
}

TEST_CASE("bench gpu with room for all tokens attends nothing far, and chooses what it does elsewhere", "[cli]") {
  const Outcome outcome = without_gpu(
      "bench gpu --device host --length 1K --layers 2 --steps 2 --warm-up 2 --rows 2 --threads 1 --near 0 "
      "--policies 'sluice;quest;twilight' --placements near,hybrid --sections attention -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json rows = json::parse(outcome.out).at("results").at("attention");
  REQUIRE(rows.size() == 2 + 3 * 2);  // Dense attention of one sequence, and of two.
  CHECK(rows.at(1).at("rows") == 2);
  for (std::size_t i = 2; i < rows.size(); i += 2) {
    const json& near = rows.at(i);
    const json& far = rows.at(i + 1);
    CAPTURE(near.dump(), far.dump());
    CHECK(near.at("placement") == "near");
    CHECK(near.at("far_share") == 0);
    CHECK(near.at("answer_us") == 0);
    CHECK(near.at("near_share").get<double>() == Approx(far.at("far_share").get<double>()));
    CHECK(near.at("coverage_mean").get<double>() == Approx(far.at("coverage_mean").get<double>()).epsilon(1e-3));
  }
}

TEST_CASE("bench gpu: what crosses the link depends on prefetch, what is attended does not", "[cli]") {
  const Outcome outcome = without_gpu(
      "bench gpu --device host --shape testbed --length 1K --layers 2 --steps 8 --warm-up 24 --threads 1 --near 0.3 "
      "--policies 'lfps;topk;psa:mass=0.8;pages | int4 | top_k=64' --sections pipeline -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json report = json::parse(outcome.out);
  const double gbps = report.at("config").at("gather_gbps");
  CHECK(gbps > 0.0);
  const json rows = report.at("results").at("pipeline");
  REQUIRE(rows.size() == 4 * 2);
  for (std::size_t i = 0; i < rows.size(); i += 2) {
    const json &on = rows.at(i), &off = rows.at(i + 1);
    CAPTURE(on.dump(), off.dump());
    CHECK(on.at("prefetch") == "on");
    CHECK(off.at("prefetch") == "off");
    CHECK(on.at("method") == off.at("method"));
    CHECK(on.at("attended_share") == off.at("attended_share"));
    CHECK(off.at("promoted") == 0.0);
    CHECK(on.at("near_hit_share") > off.at("near_hit_share"));
    CHECK(on.at("fetched_share") < off.at("fetched_share"));
    const bool on_device = on.at("method") == "pages | int4 | top_k=64";
    for (const json* const row : {&on, &off}) {
      CHECK(row->at("choice_us").is_null() == on_device);
      CHECK(row->at("goal_us").is_null() == on_device);
      if (on_device) continue;
      const double choice = row->at("choice_us"), bytes = row->at("exposed_bytes"), goal = row->at("goal_us");
      CHECK(choice > 0.0);
      CHECK(bytes <= row->at("link_bytes"));
      CHECK(goal == Approx(1.15 * (choice + bytes / (1e3 * gbps)) + 12.0));
      CHECK(row->at("layer_over_goal").get<double>() == Approx(row->at("layer_us").get<double>() / goal));
    }
  }
}

TEST_CASE("bench gpu: policies that choose on the CPU are not placed near", "[cli]") {
  const Outcome outcome = without_gpu("bench gpu --device host --placements near --policies tactic");
  CHECK(outcome.code == 3);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, "'tactic' chooses on the CPU"));
}

TEST_CASE("bench gpu --ragged has sequences between two lengths in a forward", "[cli]") {
  const auto attended = [](const std::string& ragged) {
    const Outcome outcome = without_gpu(
        "bench gpu --device host --length 1K --layers 1 --steps 2 --warm-up 0 --batch 3 --threads 1 --near 0 "
        "--policies full --sections attention -o json " +
        ragged);
    CAPTURE(outcome.err);
    REQUIRE(outcome.code == 0);
    const json results = json::parse(outcome.out).at("results");
    return results.at("attention").at(2);
  };
  const json ragged = attended("--ragged 64"), even = attended("");
  CAPTURE(ragged.dump(), even.dump());
  CHECK(ragged.at("output_error") < 0.01);
  // Of the tokens that there are at the first of two steps; at the second there is one more in each sequence.
  CHECK(even.at("far_share").get<double>() == Approx(1.0 + 3 * 0.5 / (3 * 1025)).epsilon(1e-6));
  CHECK(ragged.at("far_share").get<double>() == Approx(1.0 + 3 * 0.5 / (1025 + 257 + 65)).epsilon(1e-6));
}

TEST_CASE("bench gpu holds every kernel against its floor", "[cli]") {
  const Outcome outcome = without_gpu("bench gpu --device host --shape testbed --sections kernels -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  std::set<std::string> kernels;
  const json results = json::parse(outcome.out).at("results");
  for (const json& row : results.at("kernels")) {
    kernels.insert(row.at("kernel"));
    CHECK(row.at("time_us") > 0.0);
    CHECK(row.at("floor_us") > 0.0);
  }
  CHECK(kernels == std::set<std::string>{"copy", "score_pages", "top_k", "gather"});
}

TEST_CASE("bench gpu --costs takes what is read off a layer, at the rate of dense attention", "[cli]") {
  const Outcome outcome = without_gpu(
      "bench gpu --device host --length 2K,3K --layers 2 --steps 2 --warm-up 4 --rows 1,2 --threads 1 --near 0.5 "
      "--policies 'sluice;quest' --placements hybrid,stream --sections attention --costs -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json results = json::parse(outcome.out).at("results");
  double gbps = 0.0;
  std::map<std::string, json> timed;
  const auto key = [](const json& row) {
    return row.at("method").get<std::string>() + row.at("placement").get<std::string>() +
           std::to_string(row.at("length_tokens").get<int>()) + "x" + std::to_string(row.at("rows").get<int>());
  };
  for (const json& row : results.at("attention")) {
    const double rows = row.at("rows"), tokens = row.at("length_tokens");
    if (row.at("mode").is_null())
      gbps = std::max(gbps, 8 * 512 * rows * tokens / 1e3 / row.at("layer_us").get<double>());
    else
      timed[key(row)] = row;
  }
  REQUIRE(results.at("costs").size() == timed.size());
  // Dense attention is timed for each size of pages, of which one is shown.
  CHECK(results.at("costs")[0].at("device_gbps") >= Approx(gbps));
  gbps = results.at("costs")[0].at("device_gbps");
  for (const json& row : results.at("costs")) {
    CAPTURE(row.dump());
    const json& same = timed.at(key(row));
    const auto us = [&](const char* name) { return row.at(name).get<double>(); };
    CHECK(us("device_gbps") == Approx(gbps));
    CHECK(us("layer_us") == same.at("layer_us"));
    CHECK(us("far_us") == same.at("answer_us"));
    CHECK(us("calling_us") == same.at("calling_us"));
    CHECK(row.at("graph_nodes").is_null());
    // Forwards of the middle of those that were timed.
    const double tokens = us("rows") * (us("length_tokens") + 4 + 0.5 * 2);
    CHECK(us("near_us") == Approx(8 * 512 * tokens * same.at("near_share").get<double>() / 1e3 / gbps));
    const bool streams = row.at("placement") == "stream", ranks_pages = row.at("method") == "quest";
    if (!ranks_pages) CHECK(us("scan_us") == Approx(8 * 68 * tokens / 1e3 / gbps).epsilon(0.01));
    if (ranks_pages) CHECK(us("scan_us") == Approx(8 * 512 * tokens / 16 / 1e3 / gbps).epsilon(0.1));
    // append, rank or score and choose, split, attend, promote, merge; and fetch.
    CHECK(row.at("verbs") == (ranks_pages ? 6 : 7) + (streams ? 1 : 0));
    CHECK(row.at("fixed_us").is_null() == streams);
    if (!streams)
      CHECK(us("fixed_us") == Approx(us("layer_us") - us("scan_us") - std::max(us("near_us"), us("far_us"))));
  }
  for (const char* const wrong : {"--sections kernels", "--dense-only"})
    CHECK(is_one_error(without_gpu("bench gpu --device host --shape testbed --costs " + std::string(wrong))));
}
