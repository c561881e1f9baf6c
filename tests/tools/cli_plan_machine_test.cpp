// `sluice plan`: machines in files, what was measured, and several GPUs.
#include <set>

#include "tests/tools/cli_plan.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;
using sluice::test::plans::machine;
using sluice::test::plans::Planner;

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
