// The choice among clusters of keys by a fitted curve, on any device, against the paper's algorithm in float64.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/choose_clusters_reference.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

using namespace choices;

void run(StagesUnderTest& under_test, ClusterProblem& of, std::span<const ChooseClustersTask> tasks) {
  under_test.stages().choose_clusters(tasks, of.problem().shape(), of.problem().layout(), under_test.stream());
  under_test.finish();
}

/// What a device chose of a problem is what the definition says; returns how many each head keeps.
std::vector<std::uint32_t> require_chosen(ClusterProblem& of, const Asked& asked) {
  const ChooseClustersTask& task = asked.task;
  std::vector<std::uint32_t> counts;
  for (std::uint32_t h = 0; h < of.options().problem.group; ++h) {
    const std::vector<std::uint32_t> list = of.list(h);
    const std::uint32_t want = reference_budget(of, asked, list, h);
    const std::uint32_t got = task.counts[h];
    CAPTURE(h, want, got, list.size());
    REQUIRE(got <= list.size());
    // Harmonic sums are approximated to 1e-6, weights to 1e-6; where the curve is flat a token has little of the mass.
    REQUIRE(std::abs(static_cast<double>(got) - want) <= 2.0 + 2e-3 * static_cast<double>(list.size()));
    std::vector<bool> kept(task.tokens, false);
    for (std::uint32_t i = 0; i < got; ++i) kept[list[i]] = true;
    const std::uint32_t* const mask = task.masks + h * task.mask_words;
    for (std::uint32_t token = task.sinks; token < task.recent; ++token) {
      if (kept[token] != ((mask[token / 32] >> token % 32 & 1) != 0)) {
        CAPTURE(token);
        REQUIRE(kept[token] == !kept[token]);
      }
    }
    // No bit of a token that there is not.
    if (task.tokens % 32 != 0) REQUIRE(mask[task.tokens / 32] >> task.tokens % 32 == 0);
    for (std::uint64_t word = (task.tokens + 31) / 32; word < task.mask_words; ++word)
      REQUIRE(mask[word] == kUntouched);
    counts.push_back(got);
  }
  return counts;
}

std::vector<std::uint32_t> chosen(StagesUnderTest& under_test, ClusterProblem& of) {
  const Asked asked = ask(under_test, of);
  run(under_test, of, {&asked.task, 1});
  return require_chosen(of, asked);
}

}  // namespace

TEST_CASE("the clusters that a curve asks for are kept, of every type and group", "[stages][clusters]") {
  const auto [dtype, head_dim, group, page_tokens] =
      GENERATE(grid(std::array{DType::bf16, DType::f16, DType::f32}, std::array{64u, 128u}, std::array{1u, 4u, 7u, 32u},
                    std::array{16u, 64u}));
  const float softcap = head_dim == 64 && group == 4 ? 3.f : 0.f;
  CAPTURE(to_string(dtype), head_dim, group, page_tokens);
  const auto under_test = stages_under_test();
  Options options{.sinks = 4, .recent = 150};
  options.problem.dtype = dtype;
  options.problem.head_dim = head_dim;
  options.problem.group = group;
  options.problem.page_tokens = page_tokens;
  options.problem.softcap = softcap;
  ClusterProblem problem(options);
  if (!under_test->supports(problem.problem().shape(), problem.problem().layout())) return;
  (void)chosen(*under_test, problem);
}

TEST_CASE("a larger share of the mass takes no fewer clusters, and all of it takes all", "[stages][clusters]") {
  const auto window = GENERATE(0u, 100u, 400u);
  CAPTURE(window);
  const auto under_test = stages_under_test();
  std::vector<std::uint32_t> before(4, 0);
  for (const float mass : {0.05f, 0.3f, 0.6f, 0.9f, 0.99f, 1.f}) {
    CAPTURE(mass);
    ClusterProblem problem({.sinks = window / 10, .recent = window, .mass = mass});
    const std::vector<std::uint32_t> counts = chosen(*under_test, problem);
    for (std::uint32_t h = 0; h < 4; ++h) REQUIRE(counts[h] >= before[h]);
    before = counts;
  }
  REQUIRE(before == std::vector<std::uint32_t>(4, 800));
}

TEST_CASE("few clusters and many are put in order, equal ones by index", "[stages][clusters]") {
  constexpr std::array kCounts{31u, 1025u, 4097u, 1u, 2u, 1024u, 4096u, 16'384u, 16'385u, 33'000u};
  const auto [clusters, equal] = GENERATE_COPY(grid(few<3>(kCounts), std::array{false, true}));
  CAPTURE(clusters, equal);
  const auto under_test = stages_under_test();
  // More of them a GPU sorts in other ways; the CPU sorts all alike.
  if (under_test->is_cpu() && clusters > 4097) return;
  Options options{.clustered = std::max(3u, clusters + clusters / 2), .clusters = clusters};
  options.problem.tokens = options.clustered + 5;
  options.problem.group = 2;
  ClusterProblem problem(options);
  for (std::uint32_t i = 0; i < clusters && equal; ++i)
    std::copy_n(problem.centroids.begin(), 64, problem.centroids.begin() + std::size_t{i} / 3 * 3 * 64);
  (void)chosen(*under_test, problem);
}

TEST_CASE("a key that outweighs all others, and centroids that are no numbers", "[stages][clusters]") {
  const auto [outlier, broken] = GENERATE(grid(std::array{1.0, 300.0}, std::array{0u, 1u, 5u, 40u}));
  CAPTURE(outlier, broken);
  const auto under_test = stages_under_test();
  ClusterProblem problem({.sinks = 2, .recent = 120});
  for (std::uint32_t c = 0; c < 64 && outlier > 1.0; ++c)
    problem.problem().set_k(333, c, outlier * static_cast<double>(problem.problem().q(0, c)));
  for (std::uint32_t i = 0; i < broken; ++i)
    problem.centroids[std::size_t{i * 7 % 40} * 64 + i] =
        i % 2 == 0 ? kNotANumber : std::numeric_limits<float>::infinity();
  // Infinite centroids score infinity, minus infinity or no number, each in its place.
  (void)chosen(*under_test, problem);
}

TEST_CASE("where sinks hold the mass no cluster is kept", "[stages][clusters]") {
  const auto under_test = stages_under_test();
  ClusterProblem problem({.sinks = 4, .recent = 110});
  for (std::uint32_t h = 0; h < 4; ++h) {
    for (std::uint32_t c = 0; c < 64; ++c)
      problem.problem().set_k(h, c, 40.0 * static_cast<double>(problem.problem().q(h, c)));
  }
  REQUIRE(chosen(*under_test, problem) == std::vector<std::uint32_t>(4, 0));
}

TEST_CASE("a query that is no number keeps everything, beside others that do not", "[stages][clusters]") {
  const auto under_test = stages_under_test();
  ClusterProblem problem({.sinks = 4, .recent = 110});
  problem.problem().set_q(2, 9, kNotANumber);
  const std::vector<std::uint32_t> counts = chosen(*under_test, problem);
  REQUIRE(counts[2] == 800);
  REQUIRE(counts[1] < 800);
}

TEST_CASE("keys that are no numbers weigh nothing", "[stages][clusters]") {
  const auto under_test = stages_under_test();
  ClusterProblem problem({.sinks = 4, .recent = 110});
  for (std::uint32_t token = 0; token < 900; token += 3) problem.problem().set_k(token, token % 64, std::nan(""));
  (void)chosen(*under_test, problem);
}

TEST_CASE("choices of several KV heads at once are those of each alone, and some choose nothing",
          "[stages][clusters]") {
  const auto under_test = stages_under_test();
  std::vector<ClusterProblem> problems;
  std::vector<Asked> asked;
  std::vector<ChooseClustersTask> tasks;
  for (std::uint32_t i = 0; i < 40; ++i) {
    Options options{
        .clustered = 300 + 20 * i, .clusters = 5 + 3 * i, .sinks = i % 5, .recent = 7 * (i % 3), .mass = 0.5f};
    options.problem.tokens = options.clustered + 10 * (i % 4);
    options.problem.seed = 100 + i;
    problems.emplace_back(options);
  }
  for (ClusterProblem& problem : problems) asked.push_back(ask(*under_test, problem));
  for (const Asked& each : asked) {
    tasks.push_back(each.task);
    tasks.push_back({});
  }
  run(*under_test, problems.front(), tasks);
  for (std::uint32_t i = 0; i < 40; ++i) {
    CAPTURE(i);
    (void)require_chosen(problems[i], asked[i]);
  }
}

}  // namespace sluice::test
