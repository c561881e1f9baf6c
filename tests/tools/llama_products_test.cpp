#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tools/llama/products.hpp"

namespace {

using namespace sluice::tools;

/// Normal numbers with a few outliers, as activations have.
std::vector<float> hard_values(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random) * (random() % 97 == 0 ? 100.f : 1.f);
  return values;
}

constexpr float kSentinel = 12345.f;

}  // namespace

TEST_CASE("every instruction set multiplies as float64 does and writes nothing else", "[llama][products]") {
  const auto rows = GENERATE(1u, 2u, 16u, 17u, 40u);
  const auto inner = GENERATE(1u, 31u, 384u);
  const auto outs = GENERATE(1u, 7u, 130u);
  const auto into = GENERATE(Into::overwrite, Into::add);
  const std::uint64_t x_stride = inner + 3;
  const std::uint64_t y_stride = outs + 5;
  const auto x = hard_values(rows * x_stride, 1);
  const auto w = hard_values(std::size_t{outs} * inner, 2);
  const auto before = hard_values(rows * y_stride, 3);
  for (const Products* products : usable_products()) {
    CAPTURE(products->isa, rows, inner, outs, static_cast<int>(into));
    auto y = before;
    if (into == Into::overwrite) std::fill(y.begin(), y.end(), NAN);  // old contents must not count
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t pad = outs; pad < y_stride; ++pad) y[row * y_stride + pad] = kSentinel;
    }
    products->multiply({.x = x.data(),
                        .w = w.data(),
                        .y = y.data(),
                        .rows = rows,
                        .inner = inner,
                        .outs = outs,
                        .x_stride = x_stride,
                        .y_stride = y_stride,
                        .into = into});
    double worst = 0;
    bool padding_kept = true;
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t out = 0; out < outs; ++out) {
        double sum = into == Into::add ? before[row * y_stride + out] : 0.0;
        double size = std::abs(sum) + 1e-30;
        for (std::size_t c = 0; c < inner; ++c) {
          const double term = static_cast<double>(x[row * x_stride + c]) * w[out * inner + c];
          sum += term;
          size += std::abs(term);
        }
        const double error = std::abs(sum - y[row * y_stride + out]) / size;
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
      for (std::size_t pad = outs; pad < y_stride; ++pad) padding_kept &= y[row * y_stride + pad] == kSentinel;
    }
    CHECK(worst < 2e-6);
    CHECK(padding_kept);
  }
}

TEST_CASE("every instruction set computes SwiGLU as float64 does, far into the tails", "[llama][products]") {
  std::vector<float> gate = {0.f,   -0.f,  1.f,    -1.f,   20.f,     -20.f,    80.f,
                             -80.f, 300.f, -300.f, 1e-20f, 30'000.f, -30'000.f};
  const auto more = hard_values(100, 4);
  gate.insert(gate.end(), more.begin(), more.end());
  const auto up = hard_values(gate.size(), 5);
  for (const Products* products : usable_products()) {
    for (std::uint32_t count = 0; count <= gate.size(); ++count) {
      auto out = gate;
      products->swiglu(out.data(), up.data(), count);
      double worst = 0;
      for (std::uint32_t i = 0; i < count; ++i) {
        const double g = gate[i];
        const double exact = g / (1.0 + std::exp(-g)) * up[i];
        const double error = std::abs(exact - out[i]) / (std::abs(exact) + 1e-6);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
      }
      CAPTURE(products->isa, count);
      REQUIRE(worst < 1e-5);
      REQUIRE(std::equal(out.begin() + count, out.end(), gate.begin() + count));
    }
  }
}

TEST_CASE("the best products are the last usable ones", "[llama][products]") {
  REQUIRE_FALSE(usable_products().empty());
  CHECK(std::string(usable_products().front()->isa) == "generic");
  CHECK(&best_products() == usable_products().back());
}
