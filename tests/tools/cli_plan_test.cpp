// `sluice plan`: figures that can be worked out by hand, machines in files, and what fits.
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;

namespace {

json machine() {
  return {{"kind", "machine"},          {"schema_version", 1},      {"name", "by hand"},  {"device_gbps", 1000.0},
          {"link_gbps", 50.0},          {"cpu_gbps", 100.0},        {"launch_us", 0.001}, {"hand_over_us", 0.001},
          {"device_bytes", 8ull << 30}, {"host_bytes", 64ull << 30}};
}

class Planner {
 public:
  /// Rows of the table.
  json rows(const std::string& flags, const json& on = machine()) {
    const Outcome outcome = run(flags, on);
    INFO(outcome.err);
    REQUIRE(outcome.code == 0);
    return json::parse(outcome.out).at("results").at("plan");
  }
  Outcome run(const std::string& flags, const json& on = machine()) {
    const std::string path = scratch_.write("machine.json", on.dump());
    return sluice::test::sluice("plan -o json --machine '" + path + "' " + flags);
  }

 private:
  TemporaryDirectory scratch_;
};

}  // namespace

TEST_CASE("plan: dense attention takes what its bytes take on the lanes that it uses") {
  Planner planner;
  // 8 KV heads * 32,768 tokens * 512 bytes: 134 MB per layer. Half is near, at 1,000 GB/s; half far, at 100.
  const json row = planner.rows("--policies full --length 32K --near-hits 0.5 --layers 2")[0];
  REQUIRE(row.at("bottleneck") == "cpu");
  const double bytes = 8.0 * 32768 * 512;
  REQUIRE(row.at("cpu_us").get<double>() == Approx(0.5 * bytes / 100e3).epsilon(0.01));
  REQUIRE(row.at("layer_us").get<double>() == Approx(0.5 * bytes / 100e3).epsilon(0.05));
  REQUIRE(row.at("token_ms").get<double>() == Approx(2e-3 * row.at("layer_us").get<double>()));
  // Against everything in device memory.
  REQUIRE(row.at("speedup_over_dense").get<double>() ==
          Approx(bytes / 1000e3 / row.at("layer_us").get<double>()).epsilon(0.001));
  const json near = planner.rows("--policies full --length 32K --near-hits 1 --layers 2")[0];
  REQUIRE(near.at("bottleneck") == "device");
  REQUIRE(near.at("layer_us").get<double>() < 0.25 * row.at("layer_us").get<double>());
  const json stream = planner.rows("--policies full --length 32K --layers 2 --placements stream")[0];
  REQUIRE(stream.at("bottleneck") == "link");
  REQUIRE(stream.at("cpu_us") == 0.0);
}

TEST_CASE("plan: a budget of far tokens is written behind policies, printed, and bounds what the CPU reads") {
  Planner planner;
  const std::string flags = "--policies 'sluice | top_k=1%;twilight | dense=0' --length 32K --layers 2 --near-hits 0";
  const json free = planner.rows(flags);
  const json far = planner.rows(flags + " --far 4096");
  REQUIRE(free.size() == 2);
  for (std::size_t i = 0; i < free.size(); ++i) {
    CAPTURE(i);
    REQUIRE(free[i].at("far_budget_tokens").is_null());
    REQUIRE(far[i].at("far_budget_tokens") == 4096);
    REQUIRE(far[i].at("policy") == free[i].at("policy").get<std::string>() + " | far=4096");
    // Of 4,096 tokens, and of sinks and recent ones.
    REQUIRE(far[i].at("cpu_us").get<double>() < (4096 + 8 * 140) * 512 / 100e3 + 1.0);
    REQUIRE(far[i].at("cpu_us").get<double>() < free[i].at("cpu_us").get<double>());
  }
  REQUIRE(planner.rows(flags + " --far 'max(64, 1%)'")[0].at("far_budget_tokens") == 2621);
  const json advised = planner.rows(flags + " --far auto");
  REQUIRE(advised[0].at("policy") ==
          "sluice | top_k=1% | far=" + std::to_string(advised[0].at("far_budget_tokens").get<std::uint64_t>()));
  const json none = planner.rows("--policies 'full;magicpig;none' --length 8K --layers 1 --far auto");
  for (const json& row : none) REQUIRE(row.at("far_budget_tokens").is_null());
  for (const char* const wrong : {"--policies full --far 9", "--far 0", "--far some", "--far 101%"}) {
    const Outcome outcome = planner.run(wrong);
    CAPTURE(wrong, outcome.err);
    REQUIRE(outcome.code == 2);
    REQUIRE(is_one_error(outcome));
  }
}

TEST_CASE("plan: kernels cost what the machine says") {
  Planner planner;
  json slow = machine();
  const char* const flags = "--policies sluice --length 8K --near-hits 1 --layers 4";
  const double before = planner.rows(flags, slow)[0].at("layer_us").get<double>();
  slow["stages"] = {{"score", {{"fixed_us", 50.0}, {"share", 1.0}}}};
  slow["forward_us"] = 40.0;
  REQUIRE(planner.rows(flags, slow)[0].at("layer_us").get<double>() == Approx(before + 50.0 + 40.0 / 4).epsilon(0.01));
  slow["stages"]["score"]["share"] = 0.5;  // 8 KV heads * 8,192 keys * 68 bytes, at 500 GB/s instead of 1,000.
  REQUIRE(planner.rows(flags, slow)[0].at("layer_us").get<double>() ==
          Approx(before + 60.0 + 8.0 * 8192 * 68 / 1000e3).epsilon(0.01));
}

TEST_CASE("plan: batches cost what the machine says of them, and dense attention of one is one launch") {
  Planner planner;
  json on = machine();
  on["stages"] = {{"score", {{"fixed_us", 50.0}, {"share", 1.0}}}};
  on["dense"] = {{"fixed_us", 1000.0}, {"share", 1.0}};
  const std::string flags = "--policies sluice --length 8K --near-hits 1 --layers 4 --rows ";
  const auto layer_us = [&](const char* rows) {
    return planner.rows(flags + rows, on)[0].at("layer_us").get<double>();
  };
  const double alone = layer_us("1"), together = layer_us("4");
  on["batch"] = {{"rows", 4}, {"stages", {{"score", {{"fixed_us", 90.0}, {"share", 1.0}}}}}};
  REQUIRE(layer_us("1") == Approx(alone));
  REQUIRE(layer_us("4") == Approx(together + 40.0).epsilon(0.001));
  REQUIRE(layer_us("8") > layer_us("4"));
  const auto dense_us = [&](const char* rows) {
    const json row = planner.rows(flags + rows, on)[0];
    return row.at("speedup_over_dense").get<double>() * row.at("layer_us").get<double>();
  };
  REQUIRE(dense_us("4") == Approx(1000.0 + 4 * 8.0 * 8192 * 512 / 1000e3).epsilon(0.001));
}

TEST_CASE("plan: policies cost what the machine says of those that choose alike") {
  Planner planner;
  json on = machine();
  const auto layer_us = [&](const std::string& policy, const char* more = "") {
    return planner.rows("--policies '" + policy + "' --length 8K --near-hits 1 --layers 4 " + more, on)[0]
        .at("layer_us")
        .get<double>();
  };
  const std::string pages = "quest:budget=2048 | dense=0", tokens = "sluice";
  const double pages_before = layer_us(pages), tokens_before = layer_us(tokens), four = layer_us(pages, "--rows 4");
  const json rank{{"rank", {{"fixed_us", 50.0}, {"share", 1.0}}}};
  on["policies"] = {{{"policy", "quest"}, {"stages", rank}}};
  REQUIRE(layer_us(pages) > pages_before + 49.0);
  REQUIRE(layer_us(tokens) == Approx(tokens_before));
  on["batch"] = {{"rows", 4}, {"stages", json::object()}};
  on["policies"][0]["batch"] = {{"stages", {{"rank", {{"fixed_us", 80.0}, {"share", 1.0}}}}}};
  REQUIRE(layer_us(pages, "--rows 4") > four + 79.0);
  // What the CPU reads to choose: 8 KV heads * 8,192 keys * 256 bytes, at 100 GB/s, of which a fourth.
  on["policies"] = {{{"policy", "topk"}, {"stages", json::object()}, {"scored", 0.0}}};
  const double unread = layer_us("topk");
  on["policies"][0]["scored"] = 0.25;
  REQUIRE(layer_us("topk") == Approx(unread + 0.25 * 8 * 8192 * 256 / 100e3).epsilon(0.001));
}

TEST_CASE("plan: with all tokens near nothing is far, and device memory has them") {
  Planner planner;
  const json rows = planner.rows("--policies sluice --length 8K --layers 2 --placements hybrid,near");
  REQUIRE(rows[1].at("placement") == "near");
  REQUIRE(rows[1].at("cpu_us") == 0.0);
  REQUIRE(rows[1].at("device_bytes").get<double>() > 2.0 * 8192 * 8 * 512);
  REQUIRE(rows[0].at("device_bytes").get<double>() < 0.5 * rows[1].at("device_bytes").get<double>());
  const Outcome refused = planner.run("--policies 'sluice;psa' --placements near");
  REQUIRE(refused.code == 3);
  REQUIRE(is_one_error(refused));
  REQUIRE(contains(refused.err, "psa"));
}

TEST_CASE("plan: what the options change") {
  Planner planner;
  const std::string base = "--policies 'exact | int4 | top_p=0.9 | near=0' --length 32K ";
  const double slow = planner.rows(base + "--cpu-gbps 10")[0].at("token_ms");
  const double fast = planner.rows(base + "--cpu-gbps 1000")[0].at("token_ms");
  REQUIRE(slow > 5 * fast);
  const double few = planner.rows(base + "--attended 2%")[0].at("cpu_us");
  const double many = planner.rows(base + "--attended 4%")[0].at("cpu_us");
  REQUIRE(many == Approx(2 * few).epsilon(0.05));
  const json batches = planner.rows(base + "--rows 1,4 --placements hybrid,stream");
  REQUIRE(batches.size() == 4);
  REQUIRE(batches[1].at("host_bytes").get<double>() > 3.9 * batches[0].at("host_bytes").get<double>());
}

TEST_CASE("plan: the most that fits does, and one more does not") {
  Planner planner;
  for (const std::string policy : {"sluice", "quest", "lfps"}) {
    CAPTURE(policy);
    const std::string base = "--policies " + policy + " --weights 2G ";
    const json row = planner.rows(base + "--length 16K")[0];
    const unsigned rows = row.at("most_rows"), tokens = row.at("most_tokens");
    REQUIRE(rows > 1);
    const auto fits = [&](unsigned count, unsigned length) {
      return planner.rows(base + "--rows " + std::to_string(count) + " --length " + std::to_string(length))[0]
          .at("fits")
          .get<bool>();
    };
    REQUIRE(fits(rows, 16384));
    REQUIRE_FALSE(fits(rows + 1, 16384));
    REQUIRE(fits(1, tokens));
    REQUIRE_FALSE(fits(1, tokens + 64));
  }
  json tiny = machine();
  tiny["device_bytes"] = 1 << 20;
  const json none = planner.rows("--length 16K", tiny)[0];
  REQUIRE(none.at("fits") == false);
  REQUIRE(none.at("most_rows") == 0);
}

TEST_CASE("plan: memory by component is that of the engine, and of its policy") {
  Planner planner;
  const Outcome outcome = planner.run("--policies 'sluice;quest;lfps' --length 8K --rows 2 --near 10%");
  REQUIRE(outcome.code == 0);
  const json results = json::parse(outcome.out).at("results");
  for (std::size_t i = 0; i < 3; ++i) {
    const json& whole = results.at("plan")[i];
    const json& parts = results.at("memory")[i];
    CAPTURE(parts.dump());
    const double kv = parts.at("kv_bytes");
    REQUIRE(kv == 2.0 * 8192 * 131'072);
    const auto share = [&](const char* key) { return parts.at(key).get<double>(); };
    REQUIRE(kv * (share("near_share") + share("codes_share") + share("digests_share") + share("buffers_share")) ==
            Approx(whole.at("device_bytes").get<double>()));
    REQUIRE(kv * (1.0 + share("pinned_share") + share("policies_share")) ==
            Approx(whole.at("host_bytes").get<double>()));
    REQUIRE(share("near_share") == Approx(0.1).epsilon(0.03));  // Whole pages.
    REQUIRE((share("digests_share") > 0.0) == (i != 2));        // Of keys, or of values for the rest.
    REQUIRE((share("policies_share") > 0.0) == (i == 2));
  }
}

TEST_CASE("plan: machines that are none are refused with the file and the field") {
  Planner planner;
  const auto refused = [&](const char* field, const json& value, const char* says) {
    json changed = machine();
    changed[field] = value;
    const Outcome outcome = planner.run("", changed);
    CAPTURE(field, outcome.err);
    REQUIRE(outcome.code == 2);
    REQUIRE(is_one_error(outcome));
    REQUIRE(contains(outcome.err, says));
    REQUIRE(contains(outcome.err, "machine.json"));
    REQUIRE(contains(outcome.err, "doctor --machine"));
  };
  refused("link_gbps", 0.0, "link_gbps");
  refused("link_gbps", -5, "link_gbps");
  refused("cpu_gbps", "fast", "cpu_gbps");
  refused("host_bytes", 1.5, "host_bytes");
  refused("schema_version", 2, "schema_version");
  refused("kind", "transfer_profile", "no machine");
  refused("gpus", 2, "fields");
  refused("stages", 2, "object");
  refused("stages", {{"think", {{"fixed_us", 1.0}, {"share", 1.0}}}}, "think");
  refused("stages", {{"score", {{"fixed_us", -1.0}, {"share", 1.0}}}}, "fixed_us");
  refused("stages", {{"score", {{"fixed_us", 1.0}, {"share", 0.0}}}}, "share");
  refused("stages", {{"score", {{"fixed_us", 1.0}}}}, "share");
  refused("batch", 4, "object");
  refused("batch", {{"rows", 1}, {"stages", json::object()}}, "rows");
  refused("batch", {{"rows", 4}, {"stages", {{"think", {{"fixed_us", 1.0}, {"share", 1.0}}}}}}, "think");
  refused("policies", 2, "array");
  refused("policies", {2}, "objects");
  refused("policies", {{{"stages", json::object()}}}, "policy");
  refused("policies", {{{"policy", "nonsense"}}}, "nonsense");
  refused("policies", {{{"policy", "quest"}, {"stages", {{"think", 1}}}}}, "think");
  refused("policies", {{{"policy", "quest"}, {"batch", 1}}}, "batch");
  refused("policies", {{{"policy", "topk"}, {"scored", -1.0}}}, "scored");
  refused("forward_us", "long", "forward_us");
  refused("name", 7, "type");
  json lacking = machine();
  lacking.erase("cpu_gbps");
  REQUIRE(contains(planner.run("", lacking).err, "cpu_gbps"));
  REQUIRE(contains(sluice::test::sluice("plan --machine /nowhere.json").err, "/nowhere.json"));
  REQUIRE(planner.run("--shape llama-9").code == 2);
  REQUIRE(planner.run("--policies 'none | top_k=3 | nonsense'").code == 2);
}

TEST_CASE("doctor writes a machine that plan reads") {
  const TemporaryDirectory scratch;
  const std::string path = scratch.file("machine.json");
  REQUIRE(sluice::test::sluice("doctor --machine '" + path + "'").code != 2);
  const json written = json::parse(read_file(path));
  REQUIRE(written.at("cpu_gbps").get<double>() > 0.1);
  REQUIRE(written.at("host_bytes").get<std::uint64_t>() > (1u << 20));
  REQUIRE(written.at("batch").at("stages").contains("split"));
  std::set<std::string> policies;
  for (const json& each : written.at("policies")) policies.insert(each.at("policy"));
  for (const char* const policy : {"full", "quest", "twilight", "lfps", "topk", "psa"})
    REQUIRE(policies.contains(policy));
  const Outcome outcome = sluice::test::sluice("plan -o json --length 8K --machine '" + path + "'");
  REQUIRE(outcome.code == 0);
  REQUIRE(json::parse(outcome.out).at("config").at("machine") == written);
}

namespace {

/// A report of `sluice bench gpu` over dense attention, whose times follow from its bytes.
json measured_report() {
  const auto row = [](const char* mode, double us) {
    return json{{"length_tokens", 32768}, {"method", "full"},     {"placement", "hybrid"}, {"rows", 1},
                {"mode", mode},           {"layer_us", us},       {"dense_us", 130.0},     {"near_share", 0.5},
                {"far_share", 0.5},       {"fetched_share", 0.0}, {"promoted", 0.0}};
  };
  const json dense{{"length_tokens", 32768}, {"method", "dense in HBM"}, {"placement", nullptr}, {"rows", 1},
                   {"mode", nullptr},        {"layer_us", 130.0},        {"dense_us", 130.0}};
  return {
      {"config",
       {{"shape", "llama-3.1-8b"}, {"layers", 2}, {"kv_dtype", "bf16"}, {"warm_up", 0}, {"steps", 0}, {"near", 0.05}}},
      {"results", {{"attention", {dense, row("enqueued", 9999.0), row("graph", 650.0)}}}}};
}

}  // namespace

TEST_CASE("plan: what was measured is planned with its shares and held against its times") {
  Planner planner;
  const TemporaryDirectory scratch;
  const auto compared = [&](const json& report) {
    const Outcome outcome = planner.run("--measured '" + scratch.write("report.json", report.dump()) + "'");
    INFO(outcome.err);
    REQUIRE(outcome.code == 0);
    return json::parse(outcome.out).at("results").at("compared");
  };
  // 134 MB a layer, half of it far, at 100 GB/s: 671 us.
  const double far_us = 0.5 * 8 * 32768 * 512 / 100e3;
  const json rows = compared(measured_report());
  REQUIRE(rows.size() == 1);  // The graph's: dense attention and the other mode are no configurations of their own.
  REQUIRE(rows[0].at("measured_us") == 650.0);
  REQUIRE(rows[0].at("planned_us").get<double>() == Approx(far_us).epsilon(0.05));
  REQUIRE(rows[0].at("ratio").get<double>() == Approx(far_us / 650.0).epsilon(0.05));
  REQUIRE(rows[0].at("within_20_percent") == true);
  REQUIRE(rows[0].at("dense_ratio").get<double>() == Approx(8.0 * 32768 * 512 / 1000e3 / 130.0).epsilon(0.01));
  json slower = measured_report();
  slower["results"]["attention"][2]["layer_us"] = 900.0;
  REQUIRE(compared(slower)[0].at("within_20_percent") == false);
  json near = measured_report();
  near["results"]["attention"][2]["near_share"] = 1.0;
  near["results"]["attention"][2]["far_share"] = 0.0;
  REQUIRE(compared(near)[0].at("bottleneck") == "device");
  near["results"]["attention"][2]["placement"] = "near";
  REQUIRE(compared(near)[0].at("placement") == "near");
  for (const char* const lacking : {"layer_us", "near_share", "method", "placement"}) {
    json report = measured_report();
    report["results"]["attention"][2].erase(lacking);
    const Outcome outcome = planner.run("--measured '" + scratch.write("report.json", report.dump()) + "'");
    CAPTURE(lacking, outcome.err);
    REQUIRE(outcome.code == 2);
    REQUIRE(is_one_error(outcome));
    REQUIRE(contains(outcome.err, lacking));
    REQUIRE(contains(outcome.err, "report.json"));
    REQUIRE(contains(outcome.err, "bench gpu"));
  }
  REQUIRE(planner.run("--measured /nowhere.json").code == 2);
}

TEST_CASE("plan: GPUs share the heads and the host, and a picture shows every curve") {
  Planner planner;
  const TemporaryDirectory scratch;
  const std::string flags = "--policies full --length 8K,32K --layers 2 --near-hits 0.5 ";
  const json one = planner.rows(flags), two = planner.rows(flags + "--gpus 2");
  // Half of the heads, by half of the host: what is far takes as long, what is near half of that.
  REQUIRE(two[1].at("cpu_us").get<double>() == Approx(one[1].at("cpu_us").get<double>()).epsilon(0.01));
  REQUIRE(two[1].at("device_us").get<double>() < 0.6 * one[1].at("device_us").get<double>());
  REQUIRE(two[1].at("device_bytes").get<double>() < 0.7 * one[1].at("device_bytes").get<double>());
  const Outcome uneven = planner.run("--gpus 3");
  REQUIRE(uneven.code == 2);
  REQUIRE(contains(uneven.err, "--gpus"));
  const std::string path = scratch.file("plan.svg");
  REQUIRE(planner.run("--policies 'sluice;quest' --length 8K,32K --rows 1,4 --plot '" + path + "'").code == 0);
  const std::string svg = read_file(path);
  for (const char* const said : {"<svg", "sluice, hybrid", "quest, hybrid, 4 sequences", "8K", "32K", "</svg>"})
    REQUIRE(contains(svg, said));
}
