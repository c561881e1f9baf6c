#include "tests/support/problem.hpp"

#include <limits>
#include <numeric>
#include <utility>

#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

constexpr double kPoison = std::numeric_limits<double>::quiet_NaN();

}  // namespace

Problem::Problem(const ProblemOptions& options)
    : options_(options),
      layout_{.page_tokens = options.page_tokens, .head_dim = options.head_dim, .dtype = options.dtype},
      q_(std::size_t{options.group} * options.head_dim),
      k_(std::size_t{options.tokens} * options.head_dim),
      v_(k_.size()) {
  Random random(options.seed);
  const auto pages = static_cast<std::uint32_t>(div_up(options.tokens, options.page_tokens));
  const std::uint32_t frames = 2 * pages + 1;
  memory_.resize(frames * layout_.page_bytes());
  for (std::size_t i = 0; i < memory_.size() / bytes_of(options.dtype); ++i) {
    store_element(memory_.data(), options.dtype, i, kPoison);
  }
  std::vector<std::uint32_t> order(frames);
  std::iota(order.begin(), order.end(), 0u);
  for (std::uint32_t i = 0; i < pages; ++i) {
    std::swap(order[i], order[i + random.below(frames - i)]);
    frames_.push_back(order[i]);
  }
  for (float& x : q_) x = static_cast<float>(random.normal());
  for (std::uint32_t token = 0; token < options.tokens; ++token) {
    const double scale = token == options.tokens / 2 ? options.outlier : 1.0;
    for (std::uint32_t c = 0; c < options.head_dim; ++c) {
      set_k(token, c, scale * random.normal());
      store_element(kv().v_row(token), options.dtype, c, random.normal());
      v_[at(token, c)] = load_element(kv().v_row(token), options.dtype, c);
    }
  }
}

void Problem::set_k(std::uint32_t token, std::uint32_t c, double value) noexcept {
  store_element(kv().k_row(token), options_.dtype, c, value);
  k_[at(token, c)] = load_element(kv().k_row(token), options_.dtype, c);
}

std::vector<PageRun> runs_over(std::uint32_t tokens, std::uint32_t page_tokens) {
  std::vector<PageRun> runs;
  for (std::uint32_t begin = 0; begin < tokens; begin += page_tokens) {
    const std::uint32_t rows = tokens - begin < page_tokens ? tokens - begin : page_tokens;
    runs.push_back({.page = begin / page_tokens, .begin = 0, .end = static_cast<std::uint16_t>(rows)});
  }
  return runs;
}

std::vector<std::uint32_t> random_tokens(std::uint32_t tokens, double share, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::uint32_t> chosen;
  for (std::uint32_t token = 0; token < tokens; ++token) {
    if (random.uniform() < share) chosen.push_back(token);
  }
  return chosen;
}

}  // namespace sluice::test
