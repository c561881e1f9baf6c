// The choice of pages by a progressive share, on any device, against the paper's algorithm in float64.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/choose_pages_reference.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

using namespace page_choices;

constexpr float kInf = std::numeric_limits<float>::infinity();

/// What a device chose is what the definition says; returns how many pages.
std::uint32_t require_chosen(const PageProblem& of, const ChoosePagesTask& task) {
  const Reference reference(of);
  const std::uint32_t taken = *task.count;
  CAPTURE(taken, reference.order().size());
  REQUIRE(reference.may_take(taken, 1e-3));
  std::vector<bool> kept(task.tokens, false);
  for (std::uint32_t i = 0; i < taken; ++i) {
    for (std::uint32_t t = 0; t < of.o.page_tokens; ++t) kept[reference.order()[i] * of.o.page_tokens + t] = true;
  }
  for (std::uint32_t h = 0; h < of.o.group; ++h) {
    const std::uint32_t* const mask = task.masks + h * task.mask_words;
    std::uint32_t wrong = 0;
    for (std::uint32_t token = task.sinks; token < task.recent; ++token)
      wrong += kept[token] != ((mask[token / 32] >> token % 32 & 1) != 0) ? 1 : 0;
    CAPTURE(h);
    REQUIRE(wrong == 0);
    // No bit of a token that there is not.
    if (task.tokens % 32 != 0) REQUIRE(mask[task.tokens / 32] >> task.tokens % 32 == 0);
    for (std::uint64_t word = (task.tokens + 31) / 32; word < task.mask_words; ++word)
      REQUIRE(mask[word] == kUntouched);
  }
  return taken;
}

std::uint32_t chosen(StagesUnderTest& under_test, const PageProblem& of) {
  const ChoosePagesTask task = ask(under_test, of);
  under_test.stages().choose_pages({&task, 1}, of.shape(), of.layout(), under_test.stream());
  under_test.finish();
  return require_chosen(of, task);
}

}  // namespace

TEST_CASE("pages are taken until every head has its share, by every rule, group and size of pages", "[stages][pages]") {
  const auto [group, page_tokens, microbatch, rule] =
      GENERATE(grid(std::array{1u, 4u, 7u, 32u}, std::array{8u, 16u, 32u, 64u, 256u}, std::array{1u, 4u, 9u},
                    std::array{ProgressRule::least, ProgressRule::mean, ProgressRule::median}));
  CAPTURE(group, page_tokens, microbatch, rule);
  const auto under_test = stages_under_test();
  PageProblem problem({.page_tokens = page_tokens,
                       .group = group,
                       .sinks = 4,
                       .recent = 70,
                       .microbatch = microbatch,
                       .rule = rule,
                       .softcap = group == 4 && page_tokens == 16 ? 3.f : 0.f,
                       .seed = group + page_tokens});
  const std::uint32_t taken = chosen(*under_test, problem);
  REQUIRE(taken > microbatch);
  if (group <= 4 && problem.o.softcap == 0.f) REQUIRE(taken < problem.o.pages * 3 / 4);
}

TEST_CASE("a larger share takes no fewer pages, and all of it takes all", "[stages][pages]") {
  const auto [sinks, recent] = GENERATE(grid(std::array{0u, 3u, 32u, 100u, 6'000u}, std::array{0u, 1u, 64u, 700u}));
  CAPTURE(sinks, recent);
  const auto under_test = stages_under_test();
  std::uint32_t before = 0;
  for (const float mass : {0.01f, 0.5f, 0.9f, 0.99f, 1.f}) {
    CAPTURE(mass);
    const PageProblem problem({.sinks = sinks, .recent = recent, .mass = mass});
    const std::uint32_t taken = chosen(*under_test, problem);
    REQUIRE(taken >= before);
    before = taken;
  }
  if (sinks < 6'000) REQUIRE(before > 150);
}

TEST_CASE("few pages and many are put in order, equal ones the newest first", "[stages][pages]") {
  const auto [pages, equal] = GENERATE(
      grid(std::array{1u, 2u, 31u, 1024u, 1025u, 4096u, 4097u, 16'384u, 16'385u, 40'000u}, std::array{false, true}));
  CAPTURE(pages, equal);
  if (kSanitized && pages > 5'000) return;
  const auto under_test = stages_under_test();
  PageProblem problem({.pages = pages, .page_tokens = 8, .group = 2, .microbatch = 3, .spread = 3.f, .seed = pages});
  for (std::uint32_t page = 0; page < pages && equal; ++page) {
    for (std::uint32_t h = 0; h < 2; ++h) problem.page_score(h, page) = static_cast<float>(page / 7 % 5);
  }
  (void)chosen(*under_test, problem);
}

TEST_CASE("more microbatches than a thread block has threads are walked in turns", "[stages][pages]") {
  const auto [group, mass] = GENERATE(grid(std::array{1u, 5u}, std::array{0.5f, 0.97f, 0.9999f}));
  CAPTURE(group, mass);
  const auto under_test = stages_under_test();
  const PageProblem problem(
      {.pages = 3'500, .page_tokens = 8, .group = group, .mass = mass, .microbatch = 1, .spread = 0.5f});
  const std::uint32_t taken = chosen(*under_test, problem);
  if (mass > 0.9f) REQUIRE(taken > 1'024);
}

TEST_CASE("large microbatches, up to one of all pages, have a mean and a median", "[stages][pages]") {
  const auto [microbatch, rule] = GENERATE(
      grid(std::array{100u, 1'024u}, std::array{ProgressRule::least, ProgressRule::mean, ProgressRule::median}));
  CAPTURE(microbatch, rule);
  const auto under_test = stages_under_test();
  (void)chosen(*under_test,
               PageProblem({.pages = 1'500, .page_tokens = 8, .mass = 0.8f, .microbatch = microbatch, .rule = rule}));
}

TEST_CASE("scores that are no numbers weigh nothing, and their pages come last", "[stages][pages]") {
  const ProgressRule rule = GENERATE(ProgressRule::least, ProgressRule::mean, ProgressRule::median);
  const float softcap = GENERATE(0.f, 3.f);
  CAPTURE(rule, softcap);
  const auto under_test = stages_under_test();
  PageProblem problem({.sinks = 2, .recent = 40, .rule = rule, .softcap = softcap});
  for (std::uint32_t token = 0; token < problem.tokens(); token += 3) problem.score(1, token) = kNotANumber;
  for (std::uint32_t page = 0; page < 200; page += 9) problem.page_score(page % 4, page) = kNotANumber;
  for (std::uint32_t token = 640; token < 672; ++token) problem.score(2, token) = -kInf;
  (void)chosen(*under_test, problem);
  // Of a head to which nothing is a number nothing is enough.
  for (std::uint32_t token = 0; token < problem.tokens(); ++token) problem.score(3, token) = kNotANumber;
  REQUIRE(chosen(*under_test, problem) == 199);  // The newest 40 tokens hold the last page.
}

TEST_CASE("a page without weight has none under a soft-cap either", "[stages][pages]") {
  const float softcap = GENERATE(0.f, 3.f);
  CAPTURE(softcap);
  const auto under_test = stages_under_test();
  PageProblem problem({.group = 1, .recent = 40, .microbatch = 1, .softcap = softcap});
  for (std::uint32_t token = 640; token < 672; ++token) problem.score(0, token) = -kInf;
  problem.page_score(0, 20) = 1'000.f;
  // It comes first, and no page to come is taken to weigh more.
  REQUIRE(chosen(*under_test, problem) == 1);
}

TEST_CASE("scores that are infinite, and one that outweighs all others", "[stages][pages]") {
  const auto [at, infinite, first] =
      GENERATE(grid(std::array{5u, 3'000u, 6'399u}, std::array{false, true}, std::array{false, true}));
  CAPTURE(at, infinite, first);
  const auto under_test = stages_under_test();
  PageProblem problem({.sinks = 10, .recent = 33});
  for (std::uint32_t h = 0; h < 4; ++h) {
    problem.score(h, at) = infinite ? kInf : 300.f;
    if (first) problem.page_score(h, at / 32) = 1'000.f;
  }
  (void)chosen(*under_test, problem);
}

TEST_CASE("pages of next to no mass behind sinks that have all of it", "[stages][pages]") {
  const auto under_test = stages_under_test();
  PageProblem problem({.sinks = 4});
  for (std::uint32_t h = 0; h < 4; ++h) {
    for (std::uint32_t token = 0; token < 4; ++token) problem.score(h, token) = 500.f;
  }
  REQUIRE(chosen(*under_test, problem) == 4);  // What the rest weighs is known from a microbatch only.
}

TEST_CASE("choices of several KV heads at once are those of each alone, some choose nothing, and all the same again",
          "[stages][pages]") {
  const auto under_test = stages_under_test();
  std::vector<PageProblem> problems;
  std::vector<ChoosePagesTask> tasks;
  for (std::uint32_t i = 0; i < 40; ++i) {
    problems.emplace_back(Options{.pages = 1 + 37 * i,
                                  .newest = 1 + i % 32,
                                  .sinks = i % 5,
                                  .recent = 11 * (i % 9),
                                  .mass = 0.6f,
                                  .microbatch = 1 + i % 6,
                                  .rule = static_cast<ProgressRule>(i % 3),
                                  .seed = 100 + i});
  }
  for (const PageProblem& problem : problems) {
    tasks.push_back(ask(*under_test, problem));
    tasks.push_back({});
  }
  std::vector<std::uint32_t> before;
  for (std::uint32_t round = 0; round < 3; ++round) {
    under_test->stages().choose_pages(tasks, problems.front().shape(), problems.front().layout(), under_test->stream());
    under_test->finish();
    std::vector<std::uint32_t> counts;
    for (std::uint32_t i = 0; i < 40; ++i) {
      CAPTURE(i, round);
      counts.push_back(require_chosen(problems[i], tasks[2 * i]));
      if (round == 0) REQUIRE(chosen(*under_test, problems[i]) == counts.back());
    }
    REQUIRE((round == 0 || counts == before));
    before = counts;
  }
}

}  // namespace sluice::test
