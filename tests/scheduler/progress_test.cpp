// When progressive attention stops: the laws of PSA's rule on pages of known mass.

#include "sluice/step/progress.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

using namespace sluice;
using sluice::test::Random;
namespace reference = sluice::test::reference;

namespace {

/// Log masses of `count` pages: a few heavy ones, a long tail, some ties, some that weigh nothing.
std::vector<float> random_masses(std::size_t count, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.f, 1.f + static_cast<float>(seed % 4));
  std::vector<float> masses(count);
  for (std::size_t i = 0; i < count; ++i) {
    masses[i] = i % 11 == 10 ? masses[i - 1] : i % 17 == 16 ? kEmptyLse : normal(rng) + (i % 29 == 5 ? 8.f : 0.f);
  }
  return masses;
}

std::vector<float> descending(std::vector<float> masses) {
  std::sort(masses.rbegin(), masses.rend());
  return masses;
}

double coverage(const std::vector<float>& masses, std::size_t attended) {
  double some = 0.0;
  double all = 0.0;
  for (std::size_t i = 0; i < masses.size(); ++i) {
    all += std::exp(static_cast<double>(masses[i]));
    if (i < attended) some += std::exp(static_cast<double>(masses[i]));
  }
  return some / all;
}

struct Visit {
  std::size_t pages = 0;
  std::vector<float> shares;  ///< P after each microbatch
};

/// Visits pages in the order given until the share passes.
Visit visit(const std::vector<float>& masses, float mass, std::uint32_t microbatch,
            ProgressRule rule = ProgressRule::least) {
  ProgressState state;
  Visit done;
  while (done.pages < masses.size()) {
    const auto pages = static_cast<std::uint32_t>(std::min<std::size_t>(microbatch, masses.size() - done.pages));
    add_pages(state, rule, {.first = masses.data() + done.pages, .pages = pages, .full = pages});
    done.pages += pages;
    const auto left = static_cast<std::uint32_t>(masses.size() - done.pages);
    done.shares.push_back(progress_share(state, left));
    if (passes(done.shares.back(), mass, left)) break;
  }
  return done;
}

/// Log masses as they come from attention, and as they should not: ties, nothing, and what is no number.
float random_mass(Random& random, bool hard) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kSpecial[] = {std::numeric_limits<float>::quiet_NaN(), -kInf, 3.f, 3.f, -300.f, 300.f};
  if (hard && random.below(8) == 0) return kSpecial[random.below(6)];
  return static_cast<float>(2.0 * random.normal());
}

void require_close(double found, double wanted) {
  CAPTURE(found, wanted);
  REQUIRE((found == wanted || std::abs(found - wanted) <= 2e-5 * std::max(1.0, std::abs(wanted))));
}

}  // namespace

TEST_CASE("all of the mass visits every page, in any order and any microbatch", "[progress]") {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const auto masses = random_masses(1 + seed * 9, seed);
    for (const std::uint32_t m : {1u, 4u, 7u, 1000u}) REQUIRE(visit(masses, 1.f, m).pages == masses.size());
  }
}

TEST_CASE("in true order stopping means that the share was attended, and P never exceeds it", "[progress]") {
  const auto m = GENERATE(1u, 3u, 4u, 16u);
  const auto eps = GENERATE(0.05f, 0.5f, 0.9f, 0.95f, 0.999f);
  CAPTURE(m, eps);
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    const auto masses = descending(random_masses(150, seed));
    const Visit done = visit(masses, eps, m);
    REQUIRE(coverage(masses, done.pages) >= eps - 1e-5);
    for (std::size_t i = 0; i < done.shares.size(); ++i) {
      const std::size_t seen = std::min<std::size_t>((i + 1) * m, masses.size());
      REQUIRE(done.shares[i] <= coverage(masses, seen) + 1e-5);
      if (seen == masses.size()) REQUIRE(done.shares[i] == 1.f);
    }
  }
}

TEST_CASE("a larger microbatch only quantises where it stops", "[progress]") {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    const auto masses = descending(random_masses(200 + seed % 4, seed));
    const std::size_t one = visit(masses, 0.9f, 1).pages;
    const std::size_t four = visit(masses, 0.9f, 4).pages;
    REQUIRE(four >= one);
    REQUIRE(four <= one + 3);
  }
}

TEST_CASE("shifting all scores changes no share", "[progress]") {
  const auto rule = GENERATE(ProgressRule::least, ProgressRule::mean, ProgressRule::median);
  for (const float shift : {-3000.f, -40.f, 120.f, 3000.f}) {
    const auto masses = random_masses(90, 4);
    auto shifted = masses;
    for (float& mass : shifted) mass += shift;
    const Visit a = visit(masses, 0.97f, 4, rule);
    const Visit b = visit(shifted, 0.97f, 4, rule);
    REQUIRE(a.pages == b.pages);
    for (std::size_t i = 0; i < a.shares.size(); ++i) REQUIRE(std::abs(a.shares[i] - b.shares[i]) < 2e-3f);
  }
}

TEST_CASE("milder rules than the minimum never stop earlier", "[progress]") {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    const auto masses = random_masses(300, seed);
    const std::size_t least = visit(masses, 0.9f, 4).pages;
    REQUIRE(visit(masses, 0.9f, 4, ProgressRule::mean).pages >= least);
    REQUIRE(visit(masses, 0.9f, 4, ProgressRule::median).pages >= least);
  }
}

TEST_CASE("a certified share is covered whatever the order", "[progress]") {
  std::mt19937 rng(3);
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    auto masses = random_masses(120, seed);
    std::shuffle(masses.begin(), masses.end(), rng);
    ProgressState state;
    std::size_t seen = 0;
    for (; seen < masses.size(); ++seen) {
      const auto left = static_cast<std::uint32_t>(masses.size() - seen);
      float bound = kEmptyLse;
      for (std::size_t i = seen; i < masses.size(); ++i) bound = merge_weights(bound, masses[i] + 0.1f).lse;
      if (passes(progress_share(state, left, bound), 0.9f, left)) break;
      add_pages(state, ProgressRule::certified, {.first = &masses[seen], .pages = 1, .full = 1});
    }
    REQUIRE(coverage(masses, seen) >= 0.9 - 1e-5);
  }
}

TEST_CASE("pages without all their tokens say nothing of pages to come", "[progress]") {
  const float masses[] = {2.f, 1.f, -20.f};
  for (const auto rule : {ProgressRule::least, ProgressRule::mean, ProgressRule::median, ProgressRule::certified}) {
    ProgressState state;
    add_pages(state, rule, {.first = masses, .pages = 3, .full = 0});
    REQUIRE(std::isinf(state.unseen));
    REQUIRE(progress_share(state, 5) == 0.f);
    REQUIRE(progress_share(state, 0) == 1.f);
    add_pages(state, rule, {.first = masses, .pages = 3, .full = 2});
    REQUIRE(state.unseen >= 1.f);
    REQUIRE(state.unseen <= 2.f);
  }
}

TEST_CASE("the share after every microbatch is that of the formula", "[progress]") {
  const auto rule = GENERATE(ProgressRule::least, ProgressRule::mean, ProgressRule::median, ProgressRule::certified);
  const auto hard = GENERATE(false, true);
  const auto seed = GENERATE(range(1u, 40u));
  CAPTURE(static_cast<int>(rule), hard, seed);
  constexpr std::uint32_t kGroup = 3;  // Masses of one head are not neighbours.
  Random random(seed);
  ProgressState state;
  reference::Progress expected;
  for (std::uint32_t round = 1; round <= 5; ++round) {
    CAPTURE(round);
    const std::uint32_t pages = random.below(round == 2 ? 68 : 6);
    const std::uint32_t full = pages - (pages != 0 ? random.below(2) : 0);
    const std::uint32_t left = round == 5 ? 0 : 1 + random.below(1'000);
    std::vector<float> masses(pages * kGroup + 1);
    std::vector<double> of_head;
    for (float& mass : masses) mass = random_mass(random, hard);
    for (std::uint32_t page = 0; page < pages; ++page) of_head.push_back(masses[page * kGroup + 1]);
    const float extra = random_mass(random, hard);
    const float bound = rule == ProgressRule::certified ? random_mass(random, false) + 2.f : kEmptyLse;
    add_mass(state, extra);
    reference::add_mass(expected, extra);
    add_pages(state, rule, {.first = masses.data() + 1, .pages = pages, .full = full, .stride = kGroup});
    reference::add_pages(expected, rule, of_head, full);
    require_close(state.mass, expected.mass);
    require_close(state.unseen, expected.unseen);
    require_close(progress_share(state, left, bound), reference::progress_share(expected, left, bound));
  }
}

TEST_CASE("masses that are no numbers weigh nothing", "[progress]") {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const float masses[] = {kNan, 1.f, kNan, 0.f};
  for (const auto rule : {ProgressRule::least, ProgressRule::mean, ProgressRule::median}) {
    ProgressState state;
    add_mass(state, kNan);
    add_pages(state, rule, {.first = masses, .pages = 4, .full = 4});
    ProgressState plain;
    const float numbers[] = {1.f, 0.f};
    add_pages(plain, rule, {.first = numbers, .pages = 2, .full = 2});
    REQUIRE(state == plain);
    REQUIRE(progress_share(state, 3, kNan) == 0.f);
  }
}
