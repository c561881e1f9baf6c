// Scores of any tokens of a KV head, as policies that choose on the CPU ask for them.

#include "cpu/stages/score_tokens.hpp"

#include <array>
#include <cmath>
#include <vector>

#include "cpu/forward/forward_verbs.hpp"
#include "tests/cpu/stage_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/derived_pages.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {

TEST_CASE("token scores are scaled products with the keys", "[cpu][score_tokens]") {
  const auto [dtype, head_dim, group] = GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3},
                                                      std::array{80u, 128u}, std::array{1u, 3u, 8u}));
  CAPTURE(to_string(dtype), head_dim, group);
  const Problem problem({.dtype = dtype, .tokens = 1'501, .head_dim = head_dim, .group = group});
  std::vector<double> scores;
  for (std::uint32_t token = 0; token < 1'501; ++token)
    for (std::uint32_t head = 0; head < group; ++head) scores.push_back(reference::score(problem, head, token));
  const double within = tolerance(problem);
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    for (const std::vector<std::uint32_t>& tokens :
         {std::vector<std::uint32_t>{}, {0}, {1'500}, random_tokens(1'501, 0.05, 3), random_tokens(1'501, 2.0, 1)}) {
      std::vector<float> out(tokens.size() * group + 1, kNan);
      cpu::score_tokens(*kernels, {.q = problem.q(), .kv = problem.kv(), .tokens = tokens, .out = out.data()},
                        problem.shape());
      REQUIRE(std::isnan(out.back()));
      out.pop_back();
      std::vector<double> expected;
      for (const std::uint32_t token : tokens)
        expected.insert(expected.end(), &scores[token * group], &scores[token * group] + group);
      REQUIRE(max_abs_diff(out, expected) <= within);
    }
  }
}

TEST_CASE("any tokens are estimated as whole pages are", "[cpu][score_tokens][int4]") {
  tools::HostStages stages({.workers = workers(3), .kernels = *cpu::available_kernels().back()});
  const Problem problem({.tokens = 16 * 200, .head_dim = 128, .group = 4});
  const CodeLayout layout(problem.layout());
  std::vector<std::byte> copies((2 * problem.frames().size() + 1) * layout.page_bytes());
  const DerivedPages derived{
      .kv = problem.kv(), .tokens = problem.options().tokens, .codes = copies.data(), .mean = nullptr};
  cpu::ForwardVerbs verbs(workers(3), cpu::available_kernels().back());
  derive(verbs, derived, far_pages(derived), nullptr);
  std::vector<float> all(4 * problem.options().tokens);
  const ScoreInt4Task whole{.q = problem.q(),
                            .copies = copies.data(),
                            .frames = problem.frames().data(),
                            .tokens = problem.options().tokens,
                            .out = all.data()};
  stages.score_int4({&whole, 1}, problem.shape(), problem.layout(), nullptr);
  for (const double share : {0.0, 0.01, 0.7}) {
    const std::vector<std::uint32_t> tokens = random_tokens(problem.options().tokens, share, 3);
    std::vector<float> out(tokens.size() * 4);
    cpu::estimate_tokens(*cpu::available_kernels().back(),
                         {.q = problem.q(),
                          .copies = copies.data(),
                          .frames = problem.frames().data(),
                          .tokens = tokens,
                          .out = out.data()},
                         problem.shape(), problem.layout());
    for (std::size_t i = 0; i < out.size(); ++i) {
      REQUIRE(out[i] == all[i % 4 * problem.options().tokens + tokens[i / 4]]);
    }
  }
}

}  // namespace sluice::test
