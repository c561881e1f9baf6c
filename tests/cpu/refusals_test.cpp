#include <cmath>
#include <vector>

#include "cpu/threads/rates.hpp"
#include "sluice/error.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tests/cpu/stage_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/errors.hpp"

namespace sluice::test {

TEST_CASE("shapes without kernels are named and refused before anything is written", "[cpu][stages]") {
  tools::HostStages stages({.workers = workers(1)});
  const Problem problem({.tokens = 20});
  REQUIRE(stages.unsupported_reasons(problem.shape(), problem.layout()).empty());
  const AttentionShape odd{.layers = 1, .q_heads = 66, .kv_heads = 2, .head_dim = 72};
  const auto reasons = stages.unsupported_reasons(odd, problem.layout());
  REQUIRE(reasons.size() == 3);
  REQUIRE(reasons[0].find("head_dim 72") != std::string::npos);
  REQUIRE(reasons[1].find("33 query heads") != std::string::npos);
  REQUIRE(reasons[2].find("pages of head_dim 64") != std::string::npos);

  OwnPartial out(problem);
  AttendTask task = attend_task(problem, out);
  try {
    stages.attend({&task, 1}, odd, nullptr);
    FAIL("odd shape was accepted");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::unsupported);
  }
  REQUIRE(std::isnan(out.lse[0]));
  stages.attend({}, odd, nullptr);
}

TEST_CASE("tensors of a type whose scales only pages have are refused by every stage that takes one", "[cpu][stages]") {
  constexpr DType kScaled = DType::fp8_e4m3;
  tools::HostStages stages({.workers = workers(1)});
  const Problem problem({.tokens = 20});
  std::vector<std::byte> memory(problem.layout().page_bytes());
  OwnPartial partial(problem);

  const tools::AppendTask append{
      .k = memory.data(), .v = memory.data(), .dtype = kScaled, .page = memory.data(), .count = 1};
  REQUIRE(code_of([&] { stages.append({&append, 1}, problem.layout(), nullptr); }) == Errc::unsupported);
  const tools::ToF32Task convert{.in = {.data = memory.data(), .dtype = kScaled}};
  REQUIRE(code_of([&] { stages.to_f32({&convert, 1}, nullptr); }) == Errc::unsupported);
  const Partial part = partial.view();
  const tools::MergeTask merge{.parts = {&part, 1}, .out = memory.data()};
  REQUIRE(code_of([&] { stages.merge({&merge, 1}, problem.shape(), kScaled, nullptr); }) == Errc::unsupported);
  const ScorePagesTask pages{};
  REQUIRE(code_of([&] { stages.score_pages({&pages, 1}, problem.shape(), kScaled, nullptr); }) == Errc::unsupported);

  const PrefillTask prefill{.q = memory.data(), .kv = problem.kv(), .count = 1, .out = memory.data()};
  for (const PrefillShape& strides : {PrefillShape{.q_dtype = kScaled}, PrefillShape{.out_dtype = kScaled}})
    REQUIRE(code_of([&] { stages.prefill({&prefill, 1}, strides, problem.shape(), nullptr); }) == Errc::unsupported);
  std::vector<std::uint32_t> blocks(problem.shape().group());
  std::vector<PrefillChoice> choices(problem.shape().group());
  const SelectBlocksTask select{
      .q = memory.data(), .kv = problem.kv(), .count = 1, .blocks = blocks.data(), .choices = choices.data()};
  REQUIRE(code_of([&] {
            stages.select_blocks({&select, 1}, {}, {.q_dtype = kScaled}, problem.shape(), nullptr);
          }) == Errc::unsupported);
}

TEST_CASE("the measured read rate is a usable rate", "[cpu][stages]") {
  const double gbps = cpu::measure_read_gbps(workers(1), 8 * MiB);
  REQUIRE(std::isfinite(gbps));
  REQUIRE(gbps > 0.0);
}

}  // namespace sluice::test
