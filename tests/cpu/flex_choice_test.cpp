// The parts of FlexPrefill's choice where exact ties and empty sums decide.

#include "cpu/stages/flex_choice.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/catch.hpp"

namespace sluice::test {
namespace {

using cpu::LineKind;

std::vector<std::uint32_t> members(const cpu::BlockSet& set) {
  std::vector<std::uint32_t> list;
  for (std::uint32_t i = 0; i < set.has.size(); ++i) {
    if (set.has[i] != 0) list.push_back(i);
  }
  REQUIRE(set.count == list.size());
  return list;
}

cpu::BlockSet choose(const std::vector<float>& lines, LineKind kind, const FlexPrefillSpec& spec) {
  const auto tokens = static_cast<std::uint32_t>(lines.size());
  return cpu::choose_lines(lines, cpu::block_sums(lines), kind, spec, cpu::ChunkGrid(0, tokens, spec));
}

using List = std::vector<std::uint32_t>;

}  // namespace

TEST_CASE("of equal blocks the first are taken, and block 0 before all", "[cpu][flexprefill]") {
  const std::vector<double> sums{0.0, 0.2, 0.3, 0.2, 0.2, 0.1};
  REQUIRE(members(cpu::largest_blocks(sums, 1)) == List{0});
  REQUIRE(members(cpu::largest_blocks(sums, 2)) == List{0, 2});
  REQUIRE(members(cpu::largest_blocks(sums, 4)) == List{0, 1, 2, 3});
  REQUIRE(members(cpu::largest_blocks(sums, 99)) == List{0, 1, 2, 3, 4, 5});
}

TEST_CASE("equal lines are counted, and touched, by lowest index", "[cpu][flexprefill]") {
  // Half of 640 equal lines fill two and a half blocks.
  const std::vector<float> lines(640, 1.f / 640.f);
  REQUIRE(choose(lines, LineKind::column, {.gamma = 0.5f, .min_budget = 0}).count == 3);
  REQUIRE(members(choose(lines, LineKind::column, {.gamma = 0.5f, .min_budget = 0, .lines = true})) == List{0, 1, 2});
  REQUIRE(members(choose(lines, LineKind::diagonal, {.gamma = 0.5f, .min_budget = 0, .lines = true})) ==
          List{0, 1, 2, 3});
  REQUIRE(choose(lines, LineKind::column, {.gamma = 1.f, .min_budget = 0}).count == 5);
  REQUIRE(choose(lines, LineKind::column, {.gamma = 1.f, .min_budget = 0, .max_budget = 200}).count == 2);
  REQUIRE(choose(lines, LineKind::column, {.gamma = 0.1f, .min_budget = 513}).count == 5);
}

TEST_CASE("lines touch their blocks, diagonals two", "[cpu][flexprefill]") {
  std::vector<float> lines(128 * 6, 0.f);
  lines[256] = 0.5f;
  lines[127 + 3 * 128] = 0.5f;
  const FlexPrefillSpec spec{.gamma = 0.95f, .min_budget = 0, .lines = true};
  REQUIRE(members(choose(lines, LineKind::column, spec)) == List{0, 2, 3});
  REQUIRE(members(choose(lines, LineKind::diagonal, spec)) == List{0, 2, 3, 4});
  lines[127 + 5 * 128] = 0.5f;  // Its second block is beyond the last.
  REQUIRE(members(choose(lines, LineKind::diagonal, spec)) == List{0, 2, 3, 4, 5});
  // No more than are allowed, those with the largest sums.
  lines[127 + 5 * 128] = 0.75f;
  const FlexPrefillSpec tight{.gamma = 1.f, .min_budget = 0, .max_budget = 3 * 128, .lines = true};
  REQUIRE(members(choose(lines, LineKind::column, tight)) == List{0, 2, 5});
  REQUIRE(choose(lines, LineKind::diagonal, tight).count == 3);
  // Filled up to the budget with the largest sums.
  lines.assign(128 * 6, 1e-6f);
  lines[5 * 128] = 1.f;
  lines[3 * 128] = 1e-3f;
  REQUIRE(members(choose(lines, LineKind::column, {.gamma = 0.9f, .min_budget = 300, .lines = true})) == List{0, 3, 5});
}

TEST_CASE("attention that weighs nothing leaves the budget", "[cpu][flexprefill]") {
  const std::vector<float> lines(700, 0.f);
  for (const bool by_lines : {false, true}) {
    for (const float gamma : {0.5f, 1.f}) {
      const FlexPrefillSpec spec{.gamma = gamma, .min_budget = 256, .lines = by_lines};
      REQUIRE(members(choose(lines, LineKind::column, spec)) == List{0, 1});
    }
  }
}

TEST_CASE("softening leaves out what is not a number", "[cpu][flexprefill]") {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  std::vector<double> scores{1.0, std::nan(""), 1.0, -kInf, kInf};
  cpu::soften(scores);
  REQUIRE(scores == std::vector<double>{0.5, 0.0, 0.5, 0.0, 0.0});
  scores = {std::nan(""), -kInf};
  cpu::soften(scores);
  REQUIRE(scores == std::vector<double>{0.0, 0.0});
  REQUIRE(cpu::jensen_shannon(scores, scores) == 0.0);
  const std::vector<double> left{1.0, 0.0};
  const std::vector<double> right{0.0, 1.0};
  REQUIRE(cpu::jensen_shannon(left, right) == Approx(std::sqrt(std::log(2.0))));
}

TEST_CASE("the fewest pooled weights are taken, none beyond", "[cpu][flexprefill]") {
  const std::vector<double> weights{0.1, 0.25, 0.25, 0.4};
  const auto taken = [&](double gamma, std::uint32_t most = 9) {
    std::uint32_t bits = 0;
    cpu::add_fewest(weights, gamma, most, &bits);
    return bits;
  };
  REQUIRE(taken(0.3) == 0b1000u);
  REQUIRE(taken(0.4) == 0b1000u);
  REQUIRE(taken(0.41) == 0b1010u);
  REQUIRE(taken(0.9) == 0b1110u);
  REQUIRE(taken(1.0) == 0b1111u);
  REQUIRE(taken(0.9, 2) == 0b1010u);  // No more than are allowed: of equal ones the first.
  REQUIRE(taken(1.0, 3) == 0b1110u);
  REQUIRE(taken(0.3, 2) == 0b1000u);
}

TEST_CASE("query blocks that choose together take the fewest pairs of all, early ones first", "[cpu][flexprefill]") {
  const std::vector<std::vector<double>> weights{{1.0}, {0.5, 0.5}, {0.4, 0.35, 0.25}};
  const auto taken = [&](double gamma) {
    std::vector<std::uint32_t> bits(3);
    cpu::add_fewest_of_all(weights, gamma, 1, bits.data());
    return bits;
  };
  using Bits = std::vector<std::uint32_t>;
  REQUIRE(taken(0.3) == Bits{0b1u, 0, 0});
  REQUIRE(taken(0.4) == Bits{0b1u, 0b1u, 0});  // Of equal ones the first.
  REQUIRE(taken(0.6) == Bits{0b1u, 0b11u, 0});
  REQUIRE(taken(0.7) == Bits{0b1u, 0b11u, 0b1u});
  REQUIRE(taken(1.0) == Bits{0b1u, 0b11u, 0b111u});
  // What weighs nothing is never taken, and rows may be without weight.
  std::vector<std::uint32_t> bits(2);
  cpu::add_fewest_of_all(std::vector<std::vector<double>>{{0.0}, {0.0, 1.0}}, 1.0, 1, bits.data());
  REQUIRE(bits == Bits{0, 0b10u});
}

}  // namespace sluice::test
