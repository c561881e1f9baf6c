#include "tools/cli/eval/agreement.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace sluice::tools {
namespace {

/// Probability of `hits` or more of `trials`, each with `share`.
double tail(std::uint64_t hits, std::uint64_t trials, double share) {
  const auto n = static_cast<double>(trials);
  double sum = 0.0;
  for (std::uint64_t k = hits; k <= trials; ++k) {
    const auto x = static_cast<double>(k);
    const double ways = std::lgamma(n + 1.0) - std::lgamma(x + 1.0) - std::lgamma(n - x + 1.0);
    const double misses = k == trials ? 0.0 : (n - x) * std::log1p(-share);
    sum += std::exp(ways + x * std::log(share) + misses);
  }
  return sum;
}

/// Logarithm of the sum of exponentials.
double log_sum(std::span<const float> logits) {
  const double most = *std::ranges::max_element(logits);
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(logit - most);
  return most + std::log(sum);
}

/// Of two softmax distributions.
double kullback_leibler(std::span<const float> from, std::span<const float> to) {
  const double from_sum = log_sum(from);
  const double to_sum = log_sum(to);
  double nats = 0.0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const double log_share = from[i] - from_sum;
    nats += std::exp(log_share) * (log_share - (to[i] - to_sum));
  }
  return std::max(0.0, nats);  // Rounding.
}

}  // namespace

Interval wilson(std::uint64_t hits, std::uint64_t trials) {
  if (trials == 0) return {};
  constexpr double kZ = 1.959964;  // Of the normal distribution, for 95% in the middle.
  const auto n = static_cast<double>(trials);
  const double share = static_cast<double>(hits) / n;
  const double middle = (share + kZ * kZ / (2.0 * n)) / (1.0 + kZ * kZ / n);
  const double half = kZ / (1.0 + kZ * kZ / n) * std::sqrt(share * (1.0 - share) / n + kZ * kZ / (4.0 * n * n));
  return {.low = hits == 0 ? 0.0 : middle - half, .high = hits == trials ? 1.0 : middle + half};
}

double at_least(std::uint64_t hits, std::uint64_t trials) {
  constexpr double kDoubt = 0.05;
  if (hits == 0) return 0.0;
  double low = 0.0;
  double high = static_cast<double>(hits) / static_cast<double>(trials);
  while (high - low > std::numeric_limits<float>::epsilon()) {
    const double middle = 0.5 * (low + high);
    (tail(hits, trials, middle) > kDoubt ? high : low) = middle;
  }
  return low;
}

Agreement agreement(std::span<const std::vector<int>> outputs, std::span<const std::vector<int>> dense) {
  const std::size_t count = std::min(outputs.size(), dense.size());
  std::size_t same = 0;
  double tokens = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    if (outputs[i] == dense[i]) {
      ++same;
      continue;
    }
    const auto apart = std::ranges::mismatch(outputs[i], dense[i]);
    tokens += static_cast<double>(apart.in1 - outputs[i].begin());
  }
  Agreement found;
  if (count != 0) found.same_share = static_cast<double>(same) / static_cast<double>(count);
  if (same != count) found.until_different = tokens / static_cast<double>(count - same);
  return found;
}

Prediction prediction(std::span<const std::vector<int>> tokens, std::span<const std::vector<float>> logits,
                      std::size_t vocabulary) {
  Prediction found;
  double nats = 0.0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (std::size_t step = 0; step < tokens[i].size(); ++step) {
      const auto before = std::span(logits[i]).subspan(step * vocabulary, vocabulary);
      nats += log_sum(before) - static_cast<double>(before[static_cast<std::size_t>(tokens[i][step])]);
      ++found.tokens;
    }
  }
  if (found.tokens != 0) found.perplexity = std::exp(nats / static_cast<double>(found.tokens));
  return found;
}

double same_predictions(std::span<const std::vector<float>> logits, std::span<const std::vector<float>> dense_logits,
                        std::size_t vocabulary) {
  std::uint64_t same = 0;
  std::uint64_t steps = 0;
  const auto likeliest = [vocabulary](const std::vector<float>& of, std::size_t step) {
    const auto predicted = std::span(of).subspan(step * vocabulary, vocabulary);
    return std::ranges::max_element(predicted) - predicted.begin();
  };
  for (std::size_t i = 0; i < logits.size(); ++i) {
    for (std::size_t step = 0; step < logits[i].size() / vocabulary; ++step, ++steps)
      same += likeliest(logits[i], step) == likeliest(dense_logits[i], step) ? 1 : 0;
  }
  return steps == 0 ? 0.0 : static_cast<double>(same) / static_cast<double>(steps);
}

Divergence divergence(std::span<const std::vector<int>> outputs, std::span<const std::vector<int>> dense,
                      std::span<const std::vector<float>> logits, std::span<const std::vector<float>> dense_logits,
                      std::size_t vocabulary) {
  Divergence found;
  double sum = 0.0;
  for (std::size_t i = 0; i < std::min({outputs.size(), dense.size(), logits.size(), dense_logits.size()}); ++i) {
    const auto common = static_cast<std::size_t>(std::ranges::mismatch(outputs[i], dense[i]).in1 - outputs[i].begin());
    const std::size_t steps =
        std::min({common + 1, logits[i].size() / vocabulary, dense_logits[i].size() / vocabulary});
    for (std::size_t step = 0; step < steps; ++step) {
      const double nats = kullback_leibler(std::span(dense_logits[i]).subspan(step * vocabulary, vocabulary),
                                           std::span(logits[i]).subspan(step * vocabulary, vocabulary));
      sum += nats;
      found.worst_nats = std::max(found.worst_nats, nats);
      ++found.steps;
    }
  }
  if (found.steps != 0) found.nats = sum / static_cast<double>(found.steps);
  return found;
}

}  // namespace sluice::tools
