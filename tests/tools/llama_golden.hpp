#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "tests/support/data.hpp"

namespace sluice::test {

inline std::filesystem::path testbed() { return std::filesystem::path(test_data()) / "testbed"; }

/// One prompt of golden.json with the float32 reference's logits after it and its next greedy tokens.
struct GoldenCase {
  std::vector<int> prompt;
  std::vector<float> logits;
  std::vector<int> greedy;
};

inline std::vector<GoldenCase> golden_cases() {
  std::ifstream in(testbed() / "golden.json");
  const auto document = nlohmann::json::parse(in);
  std::vector<GoldenCase> cases;
  for (const auto& entry : document.at("cases")) {
    cases.push_back({entry.at("prompt_ids").get<std::vector<int>>(), entry.at("last_logits").get<std::vector<float>>(),
                     entry.at("greedy").get<std::vector<int>>()});
  }
  return cases;
}

/// NaN counts as infinitely far.
inline float max_abs_diff(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return INFINITY;
  float worst = 0.f;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const float diff = std::abs(a[i] - b[i]);
    worst = std::isnan(diff) ? INFINITY : std::max(worst, diff);
  }
  return worst;
}

}  // namespace sluice::test
