#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"

/// What cases of `sluice plan` share.
namespace sluice::test::plans {

using nlohmann::json;

inline json machine() {
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

}  // namespace sluice::test::plans
