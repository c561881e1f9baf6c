// The choice among clusters of keys by a fitted curve, on any backend, against the paper's algorithm in float64.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/support/backend_under_test.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/prune_reference.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

constexpr std::uint32_t kUntouched = 0xabcd'1234u;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Windows of the paper's places over n tokens, narrower where these are few.
FitSamples samples_of(std::uint32_t n) {
  const auto part = [n](double share) { return static_cast<std::uint32_t>(share * n); };
  const std::uint32_t width = std::max(1u, part(0.01));
  const auto at = [&](std::uint32_t begin) { return ListRange{.begin = begin, .end = begin + width}; };
  const std::uint32_t head = std::max(1u, part(0.015));
  const std::uint32_t near = std::max(head, part(0.1));
  return {
      .tokens = n, .head = {.begin = 0, .end = head}, .near = at(near), .far = at(std::max(near + width, part(0.6)))};
}

struct Options {
  ProblemOptions problem{
      .dtype = DType::bf16, .tokens = 900, .head_dim = 64, .group = 4, .page_tokens = 16, .scale = 0.5f};
  std::uint32_t clustered = 800;
  std::uint32_t clusters = 40;
  std::uint32_t sinks = 0;
  std::uint32_t recent = 0;  ///< newest tokens, at least those that are in no cluster
  float mass = 0.9f;
};

/// Clusters whose centroids and queries are eighths, so that products are exact and equal ones are equal; keys lie
/// around them. Every seventh cluster is empty and the second has a quarter of all tokens.
class ClusterProblem {
 public:
  explicit ClusterProblem(const Options& options)
      : samples(samples_of(options.clustered)), options_(options), problem_(options.problem) {
    Random random(options.problem.seed);
    const std::uint32_t dim = options.problem.head_dim;
    const auto eighths = [&] { return (static_cast<float>(random.below(17)) - 8.f) / 8.f; };
    for (std::uint32_t h = 0; h < options.problem.group; ++h) {
      for (std::uint32_t c = 0; c < dim; ++c) problem_.set_q(h, c, eighths());
    }
    centroids.resize(std::size_t{options.clusters} * dim);
    for (float& x : centroids) x = eighths();
    std::vector<std::vector<std::uint32_t>> lists(options.clusters);
    for (std::uint32_t token = 0; token < options.clustered; ++token) {
      std::uint32_t cluster = random.below(options.clusters);
      if (options.clusters > 7 && (cluster % 7 == 6 || random.below(4) == 0)) cluster = 1;
      lists[cluster].push_back(token);
      for (std::uint32_t c = 0; c < dim; ++c)
        problem_.set_k(token, c, static_cast<double>(centroids[cluster * dim + c]) + 0.3 * random.normal());
    }
    starts.push_back(0);
    for (const auto& list : lists) {
      members.insert(members.end(), list.begin(), list.end());
      starts.push_back(static_cast<std::uint32_t>(members.size()));
    }
  }

  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] Problem& problem() { return problem_; }
  [[nodiscard]] std::uint32_t recent_begin() const {
    return std::min(options_.problem.tokens - options_.recent, options_.clustered);
  }
  /// The tokens of query head `h`'s list, in float64.
  [[nodiscard]] std::vector<std::uint32_t> list(std::uint32_t h) const {
    const std::uint32_t dim = options_.problem.head_dim;
    std::vector<double> scores(options_.clusters, 0.0);
    for (std::uint32_t i = 0; i < options_.clusters; ++i) {
      for (std::uint32_t c = 0; c < dim; ++c)
        scores[i] += static_cast<double>(problem_.q(h, c)) * static_cast<double>(centroids[i * dim + c]);
    }
    std::vector<std::uint32_t> order(options_.clusters);
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) {
      return std::isnan(scores[b]) ? !std::isnan(scores[a]) : scores[a] > scores[b];
    });
    std::vector<std::uint32_t> tokens;
    for (const std::uint32_t i : order)
      tokens.insert(tokens.end(), members.begin() + starts[i], members.begin() + starts[i + 1]);
    return tokens;
  }

  std::vector<float> centroids;
  std::vector<std::uint32_t> starts, members;
  FitSamples samples;

 private:
  Options options_;
  Problem problem_;
};

/// A task in the memory of a backend.
struct Asked {
  ChooseClustersTask task;
  std::span<std::byte> copies;
};

Asked ask(BackendUnderTest& under_test, ClusterProblem& of) {
  const Options& options = of.options();
  const Problem& problem = of.problem();
  const Placed placed = place(under_test, problem);
  const Int4Layout layout(problem.layout());
  Asked asked{.task = {},
              .copies = under_test.array((2 * problem.frames().size() + 1) * layout.page_bytes(), std::byte{0xff})};
  std::vector<CodesTask> codes;
  for (std::uint32_t page = 0; page < problem.frames().size(); ++page) {
    const std::uint32_t left = options.problem.tokens - page * layout.page_tokens;
    codes.push_back({.page = placed.kv.page(page),
                     .rows = std::min(left, layout.page_tokens),
                     .out = asked.copies.data() + problem.frames()[page] * layout.page_bytes()});
  }
  under_test.backend().make_codes(codes, problem.layout(), under_test.stream());
  under_test.finish();
  const std::uint64_t words = (options.problem.tokens + 31) / 32 + 3;
  asked.task = {.q = placed.q,
                .centroids = under_test.copy_of(of.centroids).data(),
                .starts = under_test.copy_of(of.starts).data(),
                .members = under_test.copy_of(of.members).data(),
                .clusters = options.clusters,
                .samples = of.samples,
                .copies = asked.copies.data(),
                .frames = placed.device_frames,
                .tokens = options.problem.tokens,
                .sinks = std::min(options.sinks, of.recent_begin()),
                .recent = of.recent_begin(),
                .mass = options.mass,
                .masks = under_test.array(words * options.problem.group, kUntouched).data(),
                .mask_words = words,
                .counts = under_test.array(options.problem.group, kUntouched).data()};
  const std::uint64_t scratch = under_test.backend().choose_clusters_scratch_bytes(asked.task, problem.shape());
  asked.task.scratch = under_test.array(scratch + 256, std::byte{0xff}).data();
  const auto address = reinterpret_cast<std::uintptr_t>(asked.task.scratch);
  asked.task.scratch += (256 - address % 256) % 256;
  return asked;
}

void run(BackendUnderTest& under_test, ClusterProblem& of, std::span<const ChooseClustersTask> tasks) {
  under_test.backend().choose_clusters(tasks, of.problem().shape(), of.problem().layout(), under_test.stream());
  under_test.finish();
}

/// How many tokens of its list a query head keeps, by the definition: sums over all of the list, token by token.
std::uint32_t reference_budget(const ClusterProblem& of, const Problem& problem, const Asked& asked,
                               const std::vector<std::uint32_t>& list, std::uint32_t h) {
  const ChooseClustersTask& task = asked.task;
  const Int4Layout layout(problem.layout());
  const auto score = [&](std::uint32_t token) {
    const std::uint32_t frame = problem.frames()[token / layout.page_tokens];
    const DecodedRow row =
        decode_row(asked.copies.data() + frame * layout.page_bytes(), layout, token % layout.page_tokens);
    double dot = 0.0;
    for (std::uint32_t c = 0; c < layout.head_dim; ++c) dot += static_cast<double>(problem.q(h, c)) * row.at(c);
    dot *= static_cast<double>(problem.shape().score_scale());
    const double cap = static_cast<double>(problem.options().softcap);
    return cap == 0.0 ? dot : cap * std::tanh(dot / cap);
  };
  const auto in_window = [&](std::uint32_t token) { return token < task.sinks || token >= task.recent; };
  std::vector<double> anyway, head, near, far;
  for (std::uint32_t token = 0; token < task.tokens; ++token)
    if (in_window(token)) anyway.push_back(score(token));
  const auto sample = [&](const ListRange& range, std::vector<double>& to) {
    for (std::uint32_t i = range.begin; i < range.end; ++i)
      to.push_back(in_window(list[i]) ? -kInfinity : score(list[i]));
  };
  sample(of.samples.head, head);
  sample(of.samples.near, near);
  sample(of.samples.far, far);
  double top = -kInfinity;
  for (const auto* some : {&anyway, &head, &near, &far})
    for (const double x : *some) top = x > top ? x : top;
  if (!std::isfinite(top) || task.mass >= 1.f) return task.samples.tokens;
  const auto weigh = [&](std::vector<double>& some) {
    for (double& x : some) x = std::isnan(x) ? 0.0 : std::exp(x - top);
    return std::accumulate(some.begin(), some.end(), 0.0);
  };
  const double attended = weigh(anyway);
  (void)weigh(head);
  const double near_mean = weigh(near) / static_cast<double>(near.size());
  const double far_mean = weigh(far) / static_cast<double>(far.size());
  // a / i + b through the means of both windows, flat where it would rise.
  const auto inverse = [](const ListRange& range) {
    double sum = 0.0;
    for (std::uint32_t i = range.begin + 1; i <= range.end; ++i) sum += 1.0 / i;
    return sum / range.size();
  };
  double a = 0.0;
  double b = 0.5 * (near_mean + far_mean);
  if (near_mean >= far_mean) {
    a = (near_mean - far_mean) / (inverse(of.samples.near) - inverse(of.samples.far));
    b = near_mean - a * inverse(of.samples.near);
  }
  std::vector<double> upto;
  double sum = 0.0;
  for (std::uint32_t i = 1; i <= task.samples.tokens; ++i)
    upto.push_back(sum += i <= head.size() ? head[i - 1] : std::max(a / i + b, 0.0));
  const double wanted = static_cast<double>(task.mass) * (sum + attended) - attended;
  if (!(sum + attended > 0.0)) return task.samples.tokens;
  if (attended > 0.0 && wanted <= 0.0) return 0;
  const auto found = std::ranges::lower_bound(upto, wanted);
  return std::min(static_cast<std::uint32_t>(found - upto.begin()) + 1, task.samples.tokens);
}

/// What a backend chose of a problem is what the definition says; returns how many each head keeps.
std::vector<std::uint32_t> require_chosen(ClusterProblem& of, const Asked& asked) {
  const ChooseClustersTask& task = asked.task;
  std::vector<std::uint32_t> counts;
  for (std::uint32_t h = 0; h < of.options().problem.group; ++h) {
    const std::vector<std::uint32_t> list = of.list(h);
    const std::uint32_t want = reference_budget(of, of.problem(), asked, list, h);
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

std::vector<std::uint32_t> chosen(BackendUnderTest& under_test, ClusterProblem& of) {
  const Asked asked = ask(under_test, of);
  run(under_test, of, {&asked.task, 1});
  return require_chosen(of, asked);
}

}  // namespace

TEST_CASE("the clusters that a curve asks for are kept, of every type and group", "[backend][clusters]") {
  const auto [dtype, head_dim, group, page_tokens] =
      GENERATE(grid(std::array{DType::bf16, DType::f16, DType::f32}, std::array{64u, 128u}, std::array{1u, 4u, 7u, 32u},
                    std::array{16u, 64u}));
  const float softcap = head_dim == 64 && group == 4 ? 3.f : 0.f;
  CAPTURE(to_string(dtype), head_dim, group, page_tokens);
  const auto under_test = backend_under_test();
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

TEST_CASE("a larger share of the mass takes no fewer clusters, and all of it takes all", "[backend][clusters]") {
  const auto window = GENERATE(0u, 100u, 400u);
  CAPTURE(window);
  const auto under_test = backend_under_test();
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

TEST_CASE("few clusters and many are put in order, equal ones by index", "[backend][clusters]") {
  const auto [clusters, equal] =
      GENERATE(grid(std::array{1u, 2u, 31u, 1024u, 1025u, 4096u, 4097u, 16'384u}, std::array{false, true}));
  CAPTURE(clusters, equal);
  const auto under_test = backend_under_test();
  Options options{.clustered = std::max(3u, clusters + clusters / 2), .clusters = clusters};
  options.problem.tokens = options.clustered + 5;
  options.problem.group = 2;
  ClusterProblem problem(options);
  for (std::uint32_t i = 0; i < clusters && equal; ++i)
    std::copy_n(problem.centroids.begin(), 64, problem.centroids.begin() + std::size_t{i} / 3 * 3 * 64);
  (void)chosen(*under_test, problem);
}

TEST_CASE("a key that outweighs all others, and centroids that are no numbers", "[backend][clusters]") {
  const auto [outlier, broken] = GENERATE(grid(std::array{1.0, 300.0}, std::array{0u, 1u, 5u, 40u}));
  CAPTURE(outlier, broken);
  const auto under_test = backend_under_test();
  ClusterProblem problem({.sinks = 2, .recent = 120});
  for (std::uint32_t c = 0; c < 64 && outlier > 1.0; ++c)
    problem.problem().set_k(333, c, outlier * static_cast<double>(problem.problem().q(0, c)));
  for (std::uint32_t i = 0; i < broken; ++i)
    problem.centroids[std::size_t{i * 7 % 40} * 64 + i] =
        i % 2 == 0 ? kNotANumber : std::numeric_limits<float>::infinity();
  // Infinite centroids score infinity, minus infinity or no number, each in its place.
  (void)chosen(*under_test, problem);
}

TEST_CASE("where sinks hold the mass no cluster is kept", "[backend][clusters]") {
  const auto under_test = backend_under_test();
  ClusterProblem problem({.sinks = 4, .recent = 110});
  for (std::uint32_t h = 0; h < 4; ++h) {
    for (std::uint32_t c = 0; c < 64; ++c)
      problem.problem().set_k(h, c, 40.0 * static_cast<double>(problem.problem().q(h, c)));
  }
  REQUIRE(chosen(*under_test, problem) == std::vector<std::uint32_t>(4, 0));
}

TEST_CASE("a query that is no number keeps everything, beside others that do not", "[backend][clusters]") {
  const auto under_test = backend_under_test();
  ClusterProblem problem({.sinks = 4, .recent = 110});
  problem.problem().set_q(2, 9, kNotANumber);
  const std::vector<std::uint32_t> counts = chosen(*under_test, problem);
  REQUIRE(counts[2] == 800);
  REQUIRE(counts[1] < 800);
}

TEST_CASE("keys that are no numbers weigh nothing", "[backend][clusters]") {
  const auto under_test = backend_under_test();
  ClusterProblem problem({.sinks = 4, .recent = 110});
  for (std::uint32_t token = 0; token < 900; token += 3) problem.problem().set_k(token, token % 64, std::nan(""));
  (void)chosen(*under_test, problem);
}

TEST_CASE("choices of several KV heads at once are those of each alone, and some choose nothing",
          "[backend][clusters]") {
  const auto under_test = backend_under_test();
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
