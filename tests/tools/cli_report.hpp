#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"

namespace sluice::test {

/// What `sluice ARGUMENTS -o json` reports; it must succeed.
inline nlohmann::json json_of(const std::string& arguments) {
  const Outcome outcome = sluice(arguments + " -o json");
  CAPTURE(arguments, outcome.err);
  REQUIRE(outcome.code == 0);
  return nlohmann::json::parse(outcome.out);
}

/// Parses a report and checks what every report holds.
inline nlohmann::json report_of(const std::string& text, const std::string& command) {
  const auto report = nlohmann::json::parse(text);
  CHECK(report.at("schema_version") == 1);
  CHECK(report.at("tool") == "sluice");
  CHECK(report.at("command") == command);
  CHECK(report.at("host").at("cpu").is_string());
  CHECK(report.at("config").is_object());
  CHECK(report.at("results").is_object());
  return report;
}

}  // namespace sluice::test
