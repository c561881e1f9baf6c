// Confidence of shares, and where answers part.
#include "tools/cli/eval/agreement.hpp"

#include <cmath>
#include <vector>

#include "tests/support/catch.hpp"

using namespace sluice::tools;

TEST_CASE("Wilson's interval is the set of shares that the hits do not contradict") {
  for (const auto& [hits, trials] : {std::pair(3u, 8u), {7u, 8u}, {31u, 32u}, {60u, 128u}}) {
    CAPTURE(hits, trials);
    const Interval found = wilson(hits, trials);
    const double share = static_cast<double>(hits) / trials;
    REQUIRE(found.low < share);
    REQUIRE(found.high > share);
    // At its ends the share lies 1.96 standard deviations off what that end would give.
    for (const double end : {found.low, found.high})
      REQUIRE(std::abs(share - end) == Approx(1.959964 * std::sqrt(end * (1.0 - end) / trials)).epsilon(1e-6));
  }
  REQUIRE(wilson(8, 8).high == 1.0);
  REQUIRE(wilson(8, 8).low == Approx(0.6756).epsilon(1e-3));
  REQUIRE(wilson(0, 8).low == 0.0);
  REQUIRE(wilson(0, 8).high == Approx(1.0 - 0.6756).epsilon(1e-3));
  REQUIRE(wilson(0, 0).low == 0.0);
  REQUIRE(wilson(0, 0).high == 1.0);
}

TEST_CASE("a share is at least what makes so many hits a chance of one in twenty") {
  // All of n: p^n = 0.05. None: nothing is known. Between: tables of the binomial distribution.
  REQUIRE(at_least(128, 128) == Approx(std::pow(0.05, 1.0 / 128)).epsilon(1e-5));
  REQUIRE(at_least(1, 1) == Approx(0.05).epsilon(1e-5));
  REQUIRE(at_least(0, 10) == 0.0);
  REQUIRE(at_least(0, 0) == 0.0);
  REQUIRE(at_least(9, 10) == Approx(0.6058).epsilon(1e-3));
  REQUIRE(at_least(5, 10) == Approx(0.2224).epsilon(1e-3));
  // Of 128 prompts, two may differ.
  REQUIRE(at_least(126, 128) > 0.95);
  REQUIRE(at_least(125, 128) < 0.95);
  // One-sided: it says more than the low end of an interval.
  for (const std::uint64_t hits : {100u, 120u, 127u}) REQUIRE(at_least(hits, 128) > wilson(hits, 128).low);
}

TEST_CASE("predictions are compared while both have said the same, and where they part") {
  const auto logits = [](std::vector<double> shares) {
    std::vector<float> found;
    for (const double share : shares) found.push_back(static_cast<float>(3.0 + std::log(share)));
    return found;
  };
  const std::vector<std::vector<int>> dense{{0, 1}, {1, 1}};
  const std::vector<std::vector<int>> said{{0, 0}, {0, 1}};
  const std::vector<std::vector<float>> of_dense{logits({0.5, 0.5, 0.25, 0.75}), logits({0.1, 0.9, 0.1, 0.9})};
  const std::vector<std::vector<float>> of_said{logits({0.5, 0.5, 0.5, 0.5}), logits({0.6, 0.4, 0.9, 0.1})};
  const Divergence found = divergence(said, dense, of_said, of_dense, 2);
  const double second = 0.25 * std::log(0.25 / 0.5) + 0.75 * std::log(0.75 / 0.5);
  const double third = 0.1 * std::log(0.1 / 0.6) + 0.9 * std::log(0.9 / 0.4);
  REQUIRE(found.steps == 3);  // The second prompt's second step follows other words.
  REQUIRE(found.nats == Approx((second + third) / 3).epsilon(1e-5));
  REQUIRE(found.worst_nats == Approx(third).epsilon(1e-5));
  REQUIRE(divergence(dense, dense, of_dense, of_dense, 2).worst_nats == Approx(0.0).margin(1e-9));
  REQUIRE(divergence(dense, dense, of_dense, of_dense, 2).steps == 4);
  REQUIRE(divergence({}, {}, {}, {}, 2).steps == 0);
}

TEST_CASE("predictions of a text are judged by what came") {
  const auto logits = [](std::vector<double> shares) {
    std::vector<float> found;
    for (const double share : shares) found.push_back(static_cast<float>(-2.0 + std::log(share)));
    return found;
  };
  const std::vector<std::vector<int>> came{{0, 1}, {1}};
  const std::vector<std::vector<float>> sure{logits({0.5, 0.5, 0.2, 0.8}), logits({0.9, 0.1})};
  const Prediction found = prediction(came, sure, 2);
  REQUIRE(found.tokens == 3);
  REQUIRE(found.perplexity == Approx(std::cbrt(1.0 / (0.5 * 0.8 * 0.1))).epsilon(1e-5));
  const std::vector<std::vector<float>> other{logits({0.6, 0.4, 0.7, 0.3}), logits({0.6, 0.4})};
  REQUIRE(same_predictions(other, sure, 2) == Approx(2.0 / 3));
  REQUIRE(same_predictions(sure, sure, 2) == 1.0);
  REQUIRE(prediction({}, {}, 2).perplexity == 0.0);
  REQUIRE(same_predictions({}, {}, 2) == 0.0);
}

TEST_CASE("answers part at the first token that differs, one that ends early at its end") {
  const std::vector<std::vector<int>> dense{{1, 2, 3}, {1, 2, 3}, {1, 2, 3}, {}};
  const std::vector<std::vector<int>> said{{1, 2, 3}, {1, 9, 3}, {1, 2, 3, 4}, {}};
  const Agreement found = agreement(said, dense);
  REQUIRE(found.same_share == 0.5);
  REQUIRE(found.until_different);
  REQUIRE(*found.until_different == Approx((1.0 + 3.0) / 2));
  REQUIRE_FALSE(agreement(dense, dense).until_different);
  REQUIRE(agreement({}, {}).same_share == 0.0);
}
