#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/tools/llama_cuda_support.hpp"
#include "tools/llama/cuda/kernels.hpp"
#include "tools/llama/likeliest.hpp"

namespace {

using namespace sluice::tools;
using sluice::test::DeviceArray;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<Likeliest> on_device(const std::vector<float>& logits, std::uint32_t rows) {
  const DeviceArray<float> in{std::span(logits)};
  const DeviceArray<std::uint64_t> parts(std::size_t{rows} * cuda::kLikeliestParts);
  const DeviceArray<Likeliest> out(rows);
  cuda::likeliest({.logits = in.data(),
                   .parts = parts.data(),
                   .out = out.data(),
                   .rows = rows,
                   .width = static_cast<std::uint32_t>(logits.size() / rows)},
                  sluice::test::gpu_queue());
  (void)parts.read();  // Its guard.
  return out.read();
}

void check_as_on_host(const std::vector<float>& logits, std::uint32_t rows) {
  const std::vector<Likeliest> got = on_device(logits, rows);
  const std::size_t width = logits.size() / rows;
  for (std::uint32_t row = 0; row < rows; ++row) {
    const Likeliest want = likeliest(std::span(logits).subspan(row * width, width));
    CAPTURE(width, row, want.token, want.logit, got[row].token, got[row].logit);
    CHECK(got[row].token == want.token);
    CHECK(got[row].logit == want.logit);
  }
}

}  // namespace

TEST_CASE("the GPU chooses the likeliest tokens as the host does, of rows of any length", "[llama][gpu][likeliest]") {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const std::uint32_t width : {1u, 3u, 31u, 257u, 2'047u, 2'049u, 32'001u, 128'256u, 200'003u}) {
    for (const std::uint32_t rows : {1u, 2u, 9u}) {
      std::vector<float> logits(std::size_t{rows} * width);
      for (float& logit : logits) logit = normal(random);
      check_as_on_host(logits, rows);
      // Rounded to few values, so that the largest is there many times, and with NaN at random places.
      for (float& logit : logits) logit = random() % 7 == 0 ? kNan : std::round(logit);
      check_as_on_host(logits, rows);
      for (float& logit : logits) logit = -std::abs(logit) - 1.f;
      check_as_on_host(logits, rows);
    }
  }
}

TEST_CASE("of equals the GPU chooses the lowest token wherever they are", "[llama][gpu][likeliest]") {
  constexpr std::uint32_t kWidth = 128'256;
  for (const std::uint32_t first : {0u, 1u, 255u, 256u, 16'384u, 131'071u % kWidth, kWidth - 2}) {
    for (const std::uint32_t second : {first + 1, kWidth - 1}) {
      std::vector<float> logits(kWidth, -3.f);
      logits[first] = logits[second] = 2.f;
      CAPTURE(first, second);
      CHECK(on_device(logits, 1).front().token == static_cast<std::int32_t>(first));
    }
  }
  CHECK(on_device(std::vector<float>(kWidth, -1.f), 1).front().token == 0);
}

TEST_CASE("the GPU knows numbers that are none, zeros of both signs, infinities and the smallest",
          "[llama][gpu][likeliest]") {
  const float least = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> rows = {{kNan, kNan, kNan, kNan},         {kNan, -kInf, kNan, -kInf},
                                                {-kInf, kNan, kInf, kInf},        {-0.f, 0.f, -0.f, 0.f},
                                                {kNan, -0.f, 0.f, -1.f},          {0.f, -least, least, 2 * least},
                                                {-2 * least, -least, -kInf, -1.f}};
  std::vector<float> logits;
  for (const auto& row : rows) logits.insert(logits.end(), row.begin(), row.end());
  check_as_on_host(logits, static_cast<std::uint32_t>(rows.size()));
  CHECK(on_device(rows[0], 1).front().token == -1);
  CHECK(on_device(rows[3], 1).front().token == 0);
  CHECK(on_device(rows[5], 1).front().token == 3);
}
