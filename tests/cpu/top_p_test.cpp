// top-p of the CPU against sorting, on as many rows as the paper's deviations were found with.

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "cpu/stages/stages.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/prune_reference.hpp"

namespace sluice::test {

TEST_CASE("top-p equals a sort in float64 on ten thousand rows", "[cpu][top_p]") {
  Random random(1);
  std::uint32_t equal = 0;
  constexpr std::uint32_t kRows = 10'000;
  for (std::uint32_t i = 0; i < kRows; ++i) {
    const std::uint32_t longest = i % 1'000 == 0 ? 131'072 : i % 50 == 0 ? 8'192 : 300;
    const std::uint32_t count = i % 1'000 == 0 ? longest : 2 + random.below(longest);
    const std::vector<float> row = random_logits(count, random);
    const double p = 0.05 + 0.949 * random.uniform();
    std::vector<std::uint32_t> mask((count + 31) / 32);
    const std::uint32_t kept =
        cpu::select_top_p(*cpu::available_kernels().back(),
                          {.values = row, .p = static_cast<float>(p), .mask = mask.data()});
    if (!is_top_p(row, p, mask, kept, 1e-6)) FAIL("row " << i << " of " << count << ", p " << p << ": kept " << kept);
    equal += kept == sorted_top_p(row, p).size() ? 1 : 0;
  }
  REQUIRE(equal > kRows - 20);  // A weight off by its last bit decides a few of the long rows.
}

TEST_CASE("every variant weighs like exp", "[cpu][kernels]") {
  std::vector<float> x;
  for (int i = 0; i < 1'003; ++i) x.push_back(7.f - 0.09f * static_cast<float>(i));
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    std::vector<float> out(x.size() + 1, 1234.f);
    kernels->weigh(x.data(), x.size(), 7.f, out.data());
    REQUIRE(out.back() == 1234.f);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = std::exp(static_cast<double>(x[i]) - 7.0);
      if (std::abs(out[i] - expected) > 4e-7 * expected + 1e-37) FAIL(x[i] << ": " << out[i]);
    }
  }
}

TEST_CASE("every variant weighs ties, infinities and rows of any length", "[cpu][kernels]") {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kLargest = std::numeric_limits<float>::max();
  const std::vector<float> values = {3.f, -kInfinity, 2.5f, kNan, 3.f, -84.f, -85.f, -3'000.f, -kLargest, 0.f, -0.f};
  const float top = GENERATE_COPY(3.f, kLargest, kInfinity, -kInfinity);
  CAPTURE(top);
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    kernels->weigh(nullptr, 0, top, nullptr);
    for (std::size_t count = 1; count <= 70; ++count) {
      CAPTURE(count);
      std::vector<float> x;
      for (std::size_t i = 0; i < count; ++i) {
        const float value = (i + count) % 12 == 11 ? top : values[(i + count) % 12];
        x.push_back(value > top ? top : value);
      }
      std::vector<float> out(count + 1, 1234.f);
      kernels->weigh(x.data(), count, top, out.data());
      REQUIRE(out.back() == 1234.f);
      for (std::size_t i = 0; i < count; ++i) {
        CAPTURE(i, x[i], out[i]);
        if (std::isnan(x[i])) {
          REQUIRE(std::isnan(out[i]));
          continue;
        }
        const double expected = x[i] == top ? 1.0 : std::exp(static_cast<double>(x[i]) - static_cast<double>(top));
        REQUIRE(std::abs(static_cast<double>(out[i]) - expected) <= 4e-7 * expected + 1e-37);
      }
    }
  }
}

}  // namespace sluice::test
