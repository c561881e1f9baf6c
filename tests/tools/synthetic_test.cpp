#include "tools/cli/synthetic/synthetic.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/stages/rows.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::tools;

namespace {

constexpr AttentionShape kShape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 64};

struct Machine {
  cpu::Topology topology;
  std::shared_ptr<const cpu::Workers> workers =
      std::make_shared<const cpu::Workers>(topology, cpu::WorkersOptions{.threads = 2});
};

SyntheticOptions options_of(DType dtype) {
  SyntheticOptions options{.shape = kShape,
                           .layout = {.page_tokens = 16, .head_dim = kShape.head_dim, .dtype = dtype},
                           .tokens = 1000,
                           .steps = 3};
  options.seed = 5;
  return options;
}

/// Rows of K or V in float64.
std::vector<double> rows_of(const SyntheticLayer& layer, std::uint32_t kv_head, bool values) {
  const SyntheticOptions& options = layer.options();
  std::vector<float> row(kShape.head_dim);
  std::vector<double> rows;
  const KvView view = layer.view(kv_head);
  for (std::uint32_t t = 0; t < options.tokens + options.steps; ++t) {
    const std::byte* const from = values ? view.v_row(t) : view.k_row(t);
    cpu::read_row(cpu::fastest_kernels(), options.layout, from, nullptr, row.data());
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

/// What the first tokens hold of the softmax of `q` over the first `tokens` keys.
double sink_share(const std::vector<double>& keys, const float* q, std::uint32_t tokens) {
  std::vector<double> score(tokens);
  for (std::uint32_t t = 0; t < tokens; ++t) {
    for (std::uint32_t c = 0; c < kShape.head_dim; ++c) score[t] += q[c] * keys[std::size_t{t} * kShape.head_dim + c];
    score[t] /= std::sqrt(double{kShape.head_dim});
  }
  const double top = *std::max_element(score.begin(), score.end());
  double all = 0.0, sinks = 0.0;
  for (std::uint32_t t = 0; t < tokens; ++t) {
    const double weight = std::exp(score[t] - top);
    all += weight;
    if (t < SyntheticLayer::kSinks) sinks += weight;
  }
  return sinks / all;
}

/// Calls `see(query head, share)` for every query of prompt and steps.
template <typename See>
void for_each_query(const SyntheticLayer& layer, See&& see) {
  const SyntheticOptions& options = layer.options();
  for (std::uint32_t head = 0; head < kShape.kv_heads; ++head) {
    const std::vector<double> keys = rows_of(layer, head, false);
    for (std::uint32_t row = 0; row < options.prompt_queries + options.steps; ++row) {
      const float* const q = row < options.prompt_queries
                                 ? layer.prompt_queries(head).data() + row * kShape.group() * kShape.head_dim
                                 : layer.query(head, row - options.prompt_queries);
      for (std::uint32_t h = 0; h < kShape.group(); ++h) {
        see(head * kShape.group() + h,
            sink_share(keys, q + h * kShape.head_dim, options.tokens - options.prompt_queries + row + 1));
      }
    }
  }
}

}  // namespace

TEST_CASE("the sinks of synthetic attention hold the share that was asked for, in every query", "[synthetic]") {
  const Machine machine;
  SyntheticOptions options = options_of(GENERATE(DType::bf16, DType::f32));
  options.pattern = GENERATE(SyntheticPattern::structured, SyntheticPattern::uniform);
  options.sinks = GENERATE(std::vector<double>{0.5}, std::vector<double>{0.0, 0.25, 0.7, 0.95, 0.999});
  const SyntheticLayer layer(options, machine.topology, machine.workers);
  for_each_query(layer, [&](std::uint32_t head, double share) {
    CAPTURE(head);
    REQUIRE(share == Approx(options.sinks[head % options.sinks.size()]).epsilon(1e-4).margin(1e-6));
  });
}

TEST_CASE("the values of sinks are small", "[synthetic]") {
  const Machine machine;
  SyntheticOptions options = options_of(DType::f32);
  options.sinks = {0.5};
  const SyntheticLayer layer(options, machine.topology, machine.workers);
  const std::vector<double> values = rows_of(layer, 1, true);
  const auto square = [&](std::uint32_t begin, std::uint32_t end) {
    double sum = 0.0;
    for (std::size_t i = begin * kShape.head_dim; i < end * kShape.head_dim; ++i) sum += values[i] * values[i];
    return sum / ((end - begin) * kShape.head_dim);
  };
  CHECK(square(SyntheticLayer::kSinks, 1000) == Approx(1.0).epsilon(0.1));
  CHECK(square(0, SyntheticLayer::kSinks) < 0.02);
}

TEST_CASE("without sinks the first tokens are like any other", "[synthetic]") {
  const Machine machine;
  const SyntheticLayer layer(options_of(DType::bf16), machine.topology, machine.workers);
  double sum = 0.0;
  std::uint32_t queries = 0;
  for_each_query(layer, [&](std::uint32_t, double share) {
    sum += share;
    ++queries;
  });
  CHECK(sum / queries < 0.01);
}

TEST_CASE("shares that no sinks can have are refused by name", "[synthetic]") {
  SyntheticOptions options = options_of(DType::bf16);
  options.sinks = {0.5, GENERATE(1.0, -0.1, std::numeric_limits<double>::quiet_NaN())};
  REQUIRE_THROWS_AS(check_sinks(options), Error);
  options.sinks = {0.5};
  REQUIRE_NOTHROW(check_sinks(options));
  options.tokens = 63;
  REQUIRE_THROWS_AS(check_sinks(options), Error);
  options.sinks.clear();
  REQUIRE_NOTHROW(check_sinks(options));
}
