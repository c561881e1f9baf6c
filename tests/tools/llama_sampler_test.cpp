#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tools/llama/sampler.hpp"

namespace {

using namespace sluice::tools;
using sluice::Error;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<int> draw(const SamplerOptions& options, const std::vector<float>& logits, int count) {
  Sampler sampler(options);
  std::vector<int> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(sampler.next(logits));
  return tokens;
}

/// The tokens that are drawn of shares 0.2, 0.4, 0.1, 0.3.
std::set<int> kept(std::uint32_t top_k, float top_p) {
  const std::vector<float> logits = {std::log(0.2f), std::log(0.4f), std::log(0.1f), std::log(0.3f)};
  const auto tokens = draw({.temperature = 1.f, .top_p = top_p, .top_k = top_k, .seed = 1}, logits, 2'000);
  return {tokens.begin(), tokens.end()};
}

}  // namespace

TEST_CASE("argmax takes the lowest of equals and never a NaN", "[llama][sampler]") {
  CHECK(argmax(std::vector<float>{1, 3, 3, 2}) == 1);
  CHECK(argmax(std::vector<float>{kNan, -5, kNan, -7}) == 1);
  CHECK(argmax(std::vector<float>{kNan, -kInf, kNan}) == 1);
  CHECK(argmax(std::vector<float>{0.f, kInf}) == 1);
  CHECK_THROWS_AS(argmax(std::vector<float>{}), Error);
  CHECK_THROWS_AS(argmax(std::vector<float>{kNan, kNan}), Error);
}

TEST_CASE("temperature 0 is greedy whatever the seed and top-p", "[llama][sampler]") {
  const std::vector<float> logits = {0.1f, 0.3f, 0.2f};
  for (const std::uint64_t seed : {0u, 1u, 99u}) {
    CHECK(draw({.temperature = 0.f, .top_p = 0.5f, .seed = seed}, logits, 5) == std::vector<int>(5, 1));
  }
}

TEST_CASE("a seed fixes the draws, another seed gives others", "[llama][sampler]") {
  const std::vector<float> logits(50, 0.f);  // all equal: every draw is a choice
  const SamplerOptions options{.temperature = 1.f, .top_p = 1.f, .seed = 7};
  const auto once = draw(options, logits, 100);
  CHECK(once == draw(options, logits, 100));
  auto other = options;
  other.seed = 8;
  CHECK(once != draw(other, logits, 100));
}

TEST_CASE("draws follow the softmax at their temperature", "[llama][sampler]") {
  const std::vector<float> logits = {1.f, kNan, 0.f, -1.f, -kInf};
  const float temperature = GENERATE(0.5f, 1.f, 3.f);
  constexpr int kDraws = 40'000;
  std::vector<int> counts(logits.size());
  for (const int token : draw({.temperature = temperature, .top_p = 1.f, .seed = 3}, logits, kDraws)) ++counts[token];
  CHECK(counts[1] == 0);
  CHECK(counts[4] == 0);
  double sum = 0;
  for (const int i : {0, 2, 3}) sum += std::exp(logits[i] / temperature);
  for (const int i : {0, 2, 3}) {
    const double p = std::exp(logits[i] / temperature) / sum;
    CAPTURE(temperature, i, p);
    CHECK(std::abs(counts[i] - kDraws * p) < 5 * std::sqrt(kDraws * p * (1 - p)));
  }
}

TEST_CASE("top-p keeps the shortest prefix that holds its share", "[llama][sampler]") {
  CHECK(kept(0, 1e-6f) == std::set<int>{1});
  CHECK(kept(0, 0.39f) == std::set<int>{1});
  CHECK(kept(0, 0.5f) == std::set<int>{1, 3});
  CHECK(kept(0, 0.75f) == std::set<int>{0, 1, 3});
  CHECK(kept(0, 1.f) == std::set<int>{0, 1, 2, 3});
}

TEST_CASE("top-k keeps so many of the likeliest tokens, and top-p counts among them", "[llama][sampler]") {
  CHECK(kept(1, 1.f) == std::set<int>{1});
  CHECK(kept(3, 1.f) == std::set<int>{0, 1, 3});
  CHECK(kept(9, 1.f) == std::set<int>{0, 1, 2, 3});
  CHECK(kept(2, 0.5f) == std::set<int>{1});  // 0.4 of 0.7 is more than half
}

TEST_CASE("options out of range are refused", "[llama][sampler]") {
  for (const float bad : {-1.f, 101.f, kNan}) CHECK_THROWS_AS(Sampler({.temperature = bad}), Error);
  for (const float bad : {0.f, -0.5f, 1.5f, kNan}) CHECK_THROWS_AS(Sampler({.top_p = bad}), Error);
  Sampler sampler({.temperature = 1.f});
  CHECK_THROWS_AS((void)sampler.next(std::vector<float>{1.f, kInf}), Error);
  CHECK_THROWS_AS((void)sampler.next(std::vector<float>{-kInf}), Error);
}
