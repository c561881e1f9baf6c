#include "tests/support/choose_clusters_reference.hpp"

#include <cmath>
#include <limits>
#include <numeric>

#include "tests/support/random.hpp"

namespace sluice::test::choices {
namespace {

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

}  // namespace

ClusterProblem::ClusterProblem(const Options& options)
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

std::vector<std::uint32_t> ClusterProblem::list(std::uint32_t h) const {
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

Asked ask(StagesUnderTest& under_test, ClusterProblem& of) {
  const Options& options = of.options();
  const Problem& problem = of.problem();
  const Placed placed = place(under_test, problem);
  Asked asked{.task = {}, .copies = int4_copies::Copies(under_test, problem, placed)};
  under_test.finish();
  const std::uint64_t words = (options.problem.tokens + 31) / 32 + 3;
  asked.task = {.q = placed.q,
                .centroids = under_test.copy_of(of.centroids).data(),
                .starts = under_test.copy_of(of.starts).data(),
                .members = under_test.copy_of(of.members).data(),
                .clusters = options.clusters,
                .samples = of.samples,
                .copies = asked.copies.data.data(),
                .mean = asked.copies.mean.data(),
                .frames = placed.device_frames,
                .tokens = options.problem.tokens,
                .sinks = std::min(options.sinks, of.recent_begin()),
                .recent = of.recent_begin(),
                .mass = options.mass,
                .masks = under_test.array(words * options.problem.group, kUntouched).data(),
                .mask_words = words,
                .counts = under_test.array(options.problem.group, kUntouched).data()};
  asked.task.scratch =
      under_test.scratch(under_test.stages().choose_clusters_scratch_bytes(asked.task, problem.shape()));
  return asked;
}

std::uint32_t reference_budget(const ClusterProblem& of, const Asked& asked, const std::vector<std::uint32_t>& list,
                               std::uint32_t h) {
  const Problem& problem = of.problem();
  const ChooseClustersTask& task = asked.task;
  const auto score = [&](std::uint32_t token) {
    const double dot = asked.copies.estimate(problem, token, h).logit;
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

}  // namespace sluice::test::choices
