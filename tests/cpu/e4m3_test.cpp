// Rows with scales: what is rounded, and what comes back.
#include "sluice/step/e4m3.hpp"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/float16.hpp"
#include "cpu/kernels/kernels.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr std::size_t kUnit = cpu::kHeadDimUnit;

const cpu::Kernels& fastest() { return *cpu::available_kernels().back(); }

struct Encoded {
  std::vector<std::byte> codes;
  float scale = 0.f;
  std::vector<float> back;
};

Encoded encoded(const cpu::Kernels& kernels, std::span<const float> row) {
  Encoded result{.codes = std::vector<std::byte>(row.size()), .back = std::vector<float>(row.size())};
  kernels.e4m3.encode(row.data(), result.codes.data(), &result.scale, row.size());
  kernels.e4m3.decode(result.codes.data(), result.scale, result.back.data(), row.size());
  return result;
}

/// Every variant makes of the row what the reference does, bit by bit; and so of what comes back.
void require_as_reference(std::span<const float> row) {
  std::vector<std::byte> codes(row.size());
  float scale = 0.f;
  store_row(codes.data(), &scale, DType::fp8_e4m3, std::vector<double>(row.begin(), row.end()));
  const std::vector<double> back = load_row(codes.data(), &scale, DType::fp8_e4m3, row.size());
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    const Encoded got = encoded(*kernels, row);
    const bool nan = std::isnan(scale);
    if (nan != std::isnan(got.scale) || (!nan && got.scale != scale)) FAIL(kernels->name << ": scale " << got.scale);
    for (std::size_t i = 0; i < row.size(); ++i) {
      CAPTURE(kernels->name, i, row[i], scale, got.back[i]);
      if (got.codes[i] != codes[i]) FAIL("another code");
      if (nan ? !std::isnan(got.back[i]) : got.back[i] != back[i] || std::signbit(got.back[i]) != std::signbit(row[i]))
        FAIL("something else comes back");
      // Where it lies near it is the same.
      if (!nan && cpu::bf16_to_float(cpu::float_to_bf16(got.back[i])) != got.back[i]) FAIL("no number of bf16");
    }
    if (!nan && encoded(*kernels, got.back).back != got.back) FAIL(kernels->name << ": rounded twice is another row");
  }
}

/// A row of these, and of `fill` where they are too few.
std::vector<float> row_of(std::initializer_list<float> values, float fill = 0.f, std::size_t size = kUnit) {
  std::vector<float> row(size, fill);
  std::copy(values.begin(), values.end(), row.begin());
  return row;
}

}  // namespace

TEST_CASE("every e4m3 code is what the format says, under every scale", "[cpu][kernels]") {
  std::vector<std::byte> codes(256);
  for (std::uint32_t i = 0; i < 256; ++i) codes[i] = static_cast<std::byte>(i);
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    for (float scale = E4m3::kLeastScale; scale <= E4m3::kMostScale; scale *= 2.f) {
      const std::vector<double> want = load_row(codes.data(), &scale, DType::fp8_e4m3, codes.size());
      std::vector<float> got(codes.size());
      kernels->e4m3.decode(codes.data(), scale, got.data(), got.size());
      for (std::uint32_t i = 0; i < 256; ++i) {
        if ((i & E4m3::kNaN) == E4m3::kNaN) continue;  // Only a row whose scale is NaN has it.
        if (got[i] != want[i] || std::signbit(got[i]) != (i >= 128)) FAIL(i << " under " << scale << " is " << got[i]);
      }
    }
  }
  SUCCEED();
}

TEST_CASE("every number of bf16 is rounded as the reference does", "[cpu][kernels]") {
  // Each in a row that is as large as it, and in one that is a thousand times larger, where most become subnormal.
  for (const float larger : {1.f, 1000.f}) {
    for (std::uint32_t bits = 0; bits < 0x10000; bits += kUnit) {
      std::vector<float> row(kUnit);
      for (std::uint32_t i = 0; i < kUnit; ++i) row[i] = cpu::bf16_to_float(static_cast<std::uint16_t>(bits + i));
      row[0] *= larger;
      require_as_reference(row);
    }
  }
}

TEST_CASE("ties go to the even code, and what lies beside one to the nearer", "[cpu][kernels]") {
  // 448 makes the scale 1. Between every two neighbours: the middle, and the numbers of float32 around it.
  std::vector<double> codes;
  for (std::uint32_t code = 0; code < E4m3::kNaN; ++code) {
    const auto byte = static_cast<std::byte>(code);
    const float one = 1.f;
    codes.push_back(load_row(&byte, &one, DType::fp8_e4m3, 1)[0]);
  }
  for (std::size_t i = 0; i + 1 < codes.size(); ++i) {
    const auto middle = static_cast<float>((codes[i] + codes[i + 1]) / 2);
    require_as_reference(row_of({448.f, middle, -middle, std::nextafter(middle, 0.f), std::nextafter(middle, 1e9f),
                                 static_cast<float>(codes[i]), -static_cast<float>(codes[i + 1])}));
  }
}

TEST_CASE("the row's largest magnitude lies in the upper half of what codes reach", "[cpu][kernels]") {
  for (int exponent = -140; exponent < 128; ++exponent) {
    for (const double mantissa : {1.0, 1.25, 1.7499999, 1.75, 1.7500001, 1.9999999}) {
      const auto largest = static_cast<float>(std::ldexp(mantissa, exponent));
      if (!std::isfinite(largest)) continue;
      const std::vector<float> row = row_of({largest, -largest / 3, largest / 500, -0.f, largest * 1e-5f});
      require_as_reference(row);
      const float scale = encoded(fastest(), row).scale;
      CAPTURE(largest, scale);
      if (scale > E4m3::kLeastScale) REQUIRE(double{largest} / scale > 224.0);
      if (scale < E4m3::kMostScale) REQUIRE(double{largest} / scale <= 448.0);
    }
  }
}

TEST_CASE("rows of zeros, rows with outliers and rows with what is no number", "[cpu][kernels]") {
  const Encoded zeros = encoded(fastest(), row_of({0.f, -0.f}));
  REQUIRE(zeros.scale == E4m3::kLeastScale);
  REQUIRE(zeros.codes[1] == std::byte{0x80});
  require_as_reference(row_of({0.f, -0.f}));
  require_as_reference(row_of({1e-45f, -1e-45f}));
  require_as_reference(row_of({std::numeric_limits<float>::max(), -std::numeric_limits<float>::max(), 1.f}));
  REQUIRE(encoded(fastest(), row_of({std::numeric_limits<float>::max()})).back[0] == E4m3::kLargest * E4m3::kMostScale);
  for (const float wrong : {kNan, -kNan, kInf, -kInf}) {
    require_as_reference(row_of({1.f, wrong, -3.f}));
    for (const float x : encoded(fastest(), row_of({wrong})).back) REQUIRE(std::isnan(x));
  }
  Random random(7);
  for (const std::uint32_t head_dim : {64u, 80u, 96u, 128u, 192u, 256u}) {
    for (const double outlier : {1.0, 30.0, 1e4, 1e9}) {
      std::vector<float> row(head_dim);
      for (float& x : row) x = static_cast<float>(random.normal());
      row[random.below(head_dim)] *= static_cast<float>(outlier);
      require_as_reference(row);
    }
  }
}

TEST_CASE("no element is further off than its code allows", "[cpu][kernels]") {
  Random random(8);
  std::vector<float> row(256);
  for (int round = 0; round < 200; ++round) {
    for (float& x : row) x = static_cast<float>(random.normal() * std::exp2(12.0 * random.uniform() - 6.0));
    const Encoded got = encoded(fastest(), row);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const double most = std::max(std::abs(double{row[i]}) * 0x1p-4, double{got.scale} * 0x1p-10);
      if (!(std::abs(double{got.back[i]} - row[i]) <= most)) FAIL(row[i] << " became " << got.back[i]);
    }
  }
}

}  // namespace sluice::test
