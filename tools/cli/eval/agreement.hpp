#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace sluice::tools {

/// A share and where it lies with 95% confidence.
struct Interval {
  double low = 0.0;
  double high = 1.0;
};
/// Of `hits` among `trials` that do not depend on each other, by Wilson's score: right for few trials and at 0 and 1,
/// too.
[[nodiscard]] Interval wilson(std::uint64_t hits, std::uint64_t trials);

/// What the share of a cell is at least, with a confidence of 95%: the smallest share under which so many hits among
/// `trials` that do not depend on each other are no more unlikely than 5%. Exact (Clopper and Pearson), one-sided.
[[nodiscard]] double at_least(std::uint64_t hits, std::uint64_t trials);

/// How far greedy outputs are those of dense attention.
struct Agreement {
  double same_share = 0.0;                ///< of the outputs, that are the same from beginning to end
  std::optional<double> until_different;  ///< of the others, tokens before the first that differs: the mean
};
/// `dense`: for the same prompts in the same order.
[[nodiscard]] Agreement agreement(std::span<const std::vector<int>> outputs, std::span<const std::vector<int>> dense);

/// How far predictions of the next token are from those of dense attention.
struct Divergence {
  double nats = 0.0;        ///< Kullback-Leibler divergence from dense attention's, the mean over steps
  double worst_nats = 0.0;  ///< of one step
  std::uint64_t steps = 0;
};
/// How well tokens were predicted that were not chosen by the prediction.
struct Prediction {
  double perplexity = 0.0;  ///< exponential of the mean negative log-likelihood
  std::uint64_t tokens = 0;
};
/// @param tokens  of each text
/// @param logits  [tokens, vocabulary] of each text: what was predicted before each token
[[nodiscard]] Prediction prediction(std::span<const std::vector<int>> tokens,
                                    std::span<const std::vector<float>> logits, std::size_t vocabulary);
/// Share of the steps in which both find the same token most likely.
[[nodiscard]] double same_predictions(std::span<const std::vector<float>> logits,
                                      std::span<const std::vector<float>> dense_logits, std::size_t vocabulary);

/// Over the steps in which both had said the same before: those of a common beginning, and the one after it.
/// @param outputs, dense  as of `agreement`
/// @param logits, dense_logits  [steps, vocabulary] of each prompt, a step for each token said and for one that ends it
[[nodiscard]] Divergence divergence(std::span<const std::vector<int>> outputs, std::span<const std::vector<int>> dense,
                                    std::span<const std::vector<float>> logits,
                                    std::span<const std::vector<float>> dense_logits, std::size_t vocabulary);

}  // namespace sluice::tools
