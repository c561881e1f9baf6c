#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"

namespace sluice::test {

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
