// Copies in codes by every instruction set: the same bits, the same estimates.

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "cpu/stages/rows.hpp"
#include "tests/cpu/stage_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/int4_support.hpp"

namespace sluice::test {
namespace {

/// Copies of all pages by one variant, page after page.
std::vector<std::byte> copies_of(const Problem& problem, const float* mean, const cpu::Kernels& kernels,
                                 const CodeLayout& layout) {
  std::vector<std::byte> copies(problem.frames().size() * layout.page_bytes());
  for (std::size_t page = 0; page < problem.frames().size(); ++page) {
    std::byte* const to = copies.data() + page * layout.page_bytes();
    kernels.element[static_cast<int>(problem.options().dtype)].make_codes(
        {.k = problem.kv().page(page), .copy = to, .mean = mean, .rows = layout.page_tokens, .layout = layout});
  }
  return copies;
}

}  // namespace

TEST_CASE("every variant makes the same copies and estimates alike", "[cpu][kernels][int4]") {
  const auto bits = GENERATE(4u, 3u);
  const auto dtype = GENERATE(DType::f32, DType::f16, DType::bf16);
  const auto head_dim = GENERATE(16u, 64u, 80u, 128u, 256u);
  const auto group = GENERATE(1u, 3u, 4u, 16u);
  CAPTURE(bits, to_string(dtype), head_dim, group);
  const Problem problem({.dtype = dtype, .tokens = 7 * 16, .head_dim = head_dim, .group = group, .outlier = 1e3});
  const CodeLayout layout(problem.layout(), bits);
  const std::vector<float> mean = int4_copies::mean_key(problem);
  const std::vector<std::byte> expected = copies_of(problem, mean.data(), *cpu::available_kernels().front(), layout);
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    const std::vector<std::byte> copies = copies_of(problem, mean.data(), *kernels, layout);
    REQUIRE(copies == expected);
    std::vector<const std::byte*> codes, thirds, params;
    for (std::uint32_t token = 0; token < problem.options().tokens; token += 1 + token % 3) {
      const std::byte* const page = copies.data() + token / 16 * layout.page_bytes();
      codes.push_back(page + layout.codes_offset(token % 16));
      thirds.push_back(page + layout.thirds_offset(token % 16));
      params.push_back(page + layout.params_offset() + token % 16 * CodeLayout::kParamBytes);
    }
    std::vector<float> out(codes.size() * group + 1, 1234.f);
    kernels->score_int4({.q = problem.q(),
                         .mean = mean.data(),
                         .scale = problem.shape().score_scale(),
                         .codes = codes.data(),
                         .thirds = bits == 3 ? thirds.data() : nullptr,
                         .params = params.data(),
                         .count = static_cast<std::uint32_t>(codes.size()),
                         .group = group,
                         .head_dim = head_dim,
                         .out = out.data(),
                         .token_stride = group,
                         .head_stride = 1});
    REQUIRE(out.back() == 1234.f);
    std::size_t i = 0;
    for (std::uint32_t token = 0; token < problem.options().tokens; token += 1 + token % 3) {
      const DecodedRow row = decode_row(copies.data() + token / 16 * layout.page_bytes(), layout, token % 16);
      for (std::uint32_t head = 0; head < group; ++head, ++i) {
        std::vector<double> q;
        double logit = 0.0, size = 0.0;
        for (std::uint32_t c = 0; c < head_dim; ++c) {
          q.push_back(double{problem.q(head, c)});
          logit += q[c] * double{mean[c]};
          size += std::abs(q[c] * double{mean[c]});
        }
        q = rotated(q);
        for (std::uint32_t c = 0; c < head_dim; ++c) {
          logit += q[c] * row.at(c);
          size += std::abs(q[c]) * (15.0 * row.scale + std::abs(row.zero));
        }
        const double root = std::sqrt(static_cast<double>(head_dim));
        if (std::abs(out[i] - logit / root) > 2e-6 * size / root) FAIL("token " << token << ", head " << head);
      }
    }
  }
}

TEST_CASE("the rotation is the orthonormal Hadamard transform of blocks", "[cpu][int4]") {
  const auto head_dim = GENERATE(16u, 64u, 80u, 96u, 192u, 256u);
  CAPTURE(head_dim);
  const std::uint32_t block = rotation_block(head_dim);
  REQUIRE((head_dim % block == 0 && std::has_single_bit(block) && head_dim / block % 2 == 1));
  for (std::uint32_t j = 0; j < head_dim; ++j) {
    std::vector<double> unit(head_dim, 0.0);
    unit[j] = 1.0;
    const std::vector<double> column = rotated(unit);
    for (std::uint32_t i = 0; i < head_dim; ++i) {
      const double size = i / block == j / block ? 1.0 / std::sqrt(static_cast<double>(block)) : 0.0;
      REQUIRE(std::abs(column[i] - (std::popcount(i % block & j % block) % 2 == 0 ? size : -size)) < 1e-15);
    }
  }
  REQUIRE(std::abs(double{rotation_scale(block)} * std::sqrt(static_cast<double>(block)) - 1.0) < 1e-7);
}

TEST_CASE("the mean key is that of the rows of a page, without what is no finite number", "[cpu][int4]") {
  const auto dtype = GENERATE(DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3);
  const auto page_tokens = GENERATE(8u, 16u, 32u);
  CAPTURE(to_string(dtype), page_tokens);
  Problem problem({.dtype = dtype, .tokens = 2 * page_tokens, .head_dim = 96, .page_tokens = page_tokens});
  for (std::uint32_t token = 0; token < page_tokens; ++token) problem.set_k(token, 7, 100.0 + token);
  problem.set_k(3, 5, std::nan(""));
  if (dtype != DType::fp8_e4m3) problem.set_k(4, 6, INFINITY);
  if (dtype == DType::f32) {
    for (std::uint32_t token = 0; token < page_tokens; ++token) problem.set_k(token, 8, 3e38);  // Their sum is none.
  }
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    std::vector<float> mean(97, 1234.f);
    cpu::key_mean(*kernels, problem.layout(), problem.kv().page(0), mean.data());
    REQUIRE(mean.back() == 1234.f);
    mean.pop_back();
    REQUIRE(mean == int4_copies::mean_key(problem));
  }
}

}  // namespace sluice::test
