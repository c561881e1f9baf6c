#include "tests/support/problem.hpp"

#include <algorithm>
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
  for (std::size_t i = 0; i < memory_.size() / bytes_of(layout_.near().dtype); ++i) {
    store_element(memory_.data(), layout_.near().dtype, i, kPoison);
  }
  // Scales are float32, of which two such elements make no NaN.
  if (layout_.scaled()) std::ranges::fill(memory_, std::byte{0xff});
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
      k_[at(token, c)] = scale * random.normal();
      v_[at(token, c)] = random.normal();
    }
    store(k_, token);
    store(v_, token);
  }
}

void Problem::set_k(std::uint32_t token, std::uint32_t c, double value) {
  k_[at(token, c)] = value;
  store(k_, token);
}

void Problem::store(std::vector<double>& values, std::uint32_t token) {
  const bool keys = &values == &k_;
  std::byte* const row = keys ? kv().k_row(token) : kv().v_row(token);
  float* const scale = layout_.scaled() ? kv().scales(token) + (keys ? 0 : 1) : nullptr;
  const std::span<double> mine(values.data() + at(token, 0), options_.head_dim);
  store_row(row, scale, layout_.dtype, mine);
  std::ranges::copy(load_row(row, scale, layout_.dtype, mine.size()), mine.begin());
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
