// Copies of keys in codes of 4 and 3 bits, and what is estimated from them, on any device.

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/int4_support.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {

using namespace int4_copies;

namespace {

/// What 3 bits leave out of a row's range on either side.
double beyond(std::uint32_t bits, const Extremes& range) {
  return bits == 3 ? 3.0 / 32.0 * (range.most - range.least) : 0.0;
}

}  // namespace

TEST_CASE("copies are within half a step of what they copy, or as far off as their range ends", "[stages][int4]") {
  const std::uint32_t bits = GENERATE(4u, 3u);
  const auto [dtype, head_dim, page_tokens, outlier] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}, std::array{64u, 80u, 128u},
                    std::array{8u, 16u, 256u}, std::array{1.0, 1e3, 1e-6}));
  CAPTURE(bits, to_string(dtype), head_dim, page_tokens, outlier);
  const auto under_test = stages_under_test();
  const Problem problem({.dtype = dtype,
                         .tokens = 5 * page_tokens - 3,
                         .head_dim = head_dim,
                         .group = 1,
                         .page_tokens = page_tokens,
                         .outlier = outlier});
  if (!under_test->supports(problem.shape(), problem.layout())) return;
  const Copies copies(*under_test, problem, place(*under_test, problem), bits);
  under_test->finish();
  for (std::uint32_t token = 0; token < problem.options().tokens; ++token) {
    const DecodedRow row = copies.row(problem, token);
    const std::vector<double> copied = copies.copied(problem, token);
    const Extremes range = extremes(copied);
    const double slack = f16_slack(range);
    CAPTURE(token, row.scale, row.zero);
    const double first = range.least + beyond(bits, range), last = range.most - beyond(bits, range);
    REQUIRE(std::abs(row.zero - first) <= slack);
    double worst = 0.0;
    double most = -1e30;
    for (std::uint32_t c = 0; c < head_dim; ++c) {
      worst = std::max(worst, std::abs(row.at(c) - std::clamp(copied[c], first, last)));
      most = std::max(most, row.at(c));
    }
    REQUIRE(worst <= row.scale / 2.0 * 1.001 + slack);
    REQUIRE(std::abs(most - last) <= 2.0 * slack);
  }
  // Rows that no token has were left alone.
  const std::uint32_t frame = problem.frames().back();
  const DecodedRow untouched =
      decode_row(copies.data.data() + frame * copies.layout.page_bytes(), copies.layout, page_tokens - 1);
  REQUIRE(std::isnan(untouched.scale));
  REQUIRE(std::count(untouched.codes.begin(), untouched.codes.end(), copies.layout.levels()) == head_dim);
}

TEST_CASE("copies of constant, huge and undefined keys are defined", "[stages][int4]") {
  const std::uint32_t bits = GENERATE(4u, 3u);
  const auto [dtype, head_dim] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16}, std::array{64u, 96u, 128u, 192u, 256u}));
  CAPTURE(bits, to_string(dtype), head_dim);
  const auto under_test = stages_under_test();
  Problem problem({.dtype = dtype, .tokens = 7, .head_dim = head_dim, .group = 1, .page_tokens = 8});
  if (!under_test->supports(problem.shape(), problem.layout())) return;
  const double rows[] = {0.0, 2.5, 1e30, -1e30};
  for (std::uint32_t token = 0; token < std::size(rows); ++token) {
    for (std::uint32_t c = 0; c < head_dim; ++c) problem.set_k(token, c, rows[token]);
  }
  problem.set_k(4, head_dim - 1, std::nan(""));
  problem.set_k(5, 7, kInf);
  for (std::uint32_t c = 0; c < head_dim; ++c) problem.set_k(6, c, -kInf);
  const Copies copies(*under_test, problem, place(*under_test, problem), bits);
  under_test->finish();
  const DecodedRow none = copies.row(problem, 0);
  REQUIRE(none.scale == 0x1p-24);
  for (std::uint32_t c = 0; c < head_dim; ++c) REQUIRE(none.at(c) == 0.0);
  // What all channels have is in the first of a block.
  const std::uint32_t block = head_dim & -head_dim;
  const DecodedRow even = copies.row(problem, 1);
  const double size = 2.5 * std::sqrt(static_cast<double>(block));
  REQUIRE(even.at(0) == Approx(size - beyond(bits, {0.0, size})).epsilon(1e-3));
  for (std::uint32_t c = 0; c < head_dim; ++c) REQUIRE(even.codes[c] == (c % block == 0 ? copies.layout.levels() : 0));
  const double largest = dtype == DType::f16 ? kInf : 65504.0;
  for (const std::uint32_t token : {2u, 3u}) {  // f16 has no such number.
    const DecodedRow row = copies.row(problem, token);
    if (largest == kInf) REQUIRE((std::isnan(row.scale) && std::isnan(row.zero)));
    const double least = token == 3 ? -largest : bits == 3 ? largest : 0.0;
    if (largest != kInf) REQUIRE((row.scale == largest && row.zero == least));
  }
  const DecodedRow endless = copies.row(problem, 5);
  REQUIRE((endless.scale == 65504.0 && endless.zero == -65504.0));
  for (const std::uint32_t token : {4u, 6u})
    REQUIRE((std::isnan(copies.row(problem, token).scale) && std::isnan(copies.row(problem, token).zero)));
}

TEST_CASE("estimates are products with the decoded copies, and near the logits", "[stages][int4]") {
  const std::uint32_t bits = GENERATE(4u, 3u);
  const auto [dtype, head_dim, group] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16}, std::array{16u, 64u, 80u, 96u, 128u, 192u, 256u},
                    std::array{1u, 3u, 4u, 8u, 13u, 32u}));
  CAPTURE(bits, to_string(dtype), head_dim, group);
  const auto under_test = stages_under_test();
  const std::uint32_t page_tokens = group == 3 ? 24 : 16;
  const Problem problem({.dtype = dtype,
                         .tokens = 533,
                         .head_dim = head_dim,
                         .group = group,
                         .page_tokens = page_tokens,
                         .outlier = group == 4 ? 50.0 : 1.0});
  if (!under_test->supports(problem.shape(), problem.layout())) return;
  const Placed placed = place(*under_test, problem);
  const Copies copies(*under_test, problem, placed, bits);
  std::vector<ScoreInt4Task> tasks;
  for (const std::uint32_t tokens : {533u, 1u, 0u, 16u, 100u, 127u, 529u}) {
    const auto out = under_test->array(std::size_t{group} * tokens + 1, kUntouched);
    tasks.push_back({.q = placed.q,
                     .copies = copies.data.data(),
                     .mean = copies.mean.data(),
                     .frames = placed.device_frames,
                     .tokens = tokens,
                     .bits = bits,
                     .out = out.data()});
  }
  under_test->stages().score_int4(tasks, problem.shape(), problem.layout(), under_test->stream());
  under_test->finish();
  for (std::uint32_t token = 0; token < 533; ++token) {
    const DecodedRow row = copies.row(problem, token);
    const double slack = f16_slack(extremes(copies.copied(problem, token)));
    for (std::uint32_t head = 0; head < group; ++head) {
      const Estimate expected = copies.estimate(problem, row, head);
      const double logit = reference::score(problem, head, token);
      double q1 = 0.0;
      for (const double x : copies.queries[head]) q1 += std::abs(x);
      // Of 3 bits what lies beyond the codes is off by 3/32 of the range, which is 7 / (13/16) steps.
      const double step = bits == 3 ? 0.81 : 0.5;
      const double bound = (row.scale * step * 1.001 + slack) * q1 / std::sqrt(static_cast<double>(head_dim));
      for (const ScoreInt4Task& task : tasks) {
        if (token >= task.tokens) continue;
        const float got = task.out[std::size_t{head} * task.tokens + token];
        const bool is_product = close(got, expected);
        const bool is_near = std::abs(got - logit) <= bound + expected.within;
        if (is_product && is_near) continue;
        CAPTURE(token, head, task.tokens, got, expected.logit, expected.within);
        REQUIRE(is_product);
        REQUIRE(is_near);
      }
    }
  }
  for (const ScoreInt4Task& task : tasks) REQUIRE(task.out[std::size_t{group} * task.tokens] == kUntouched);
}

TEST_CASE("estimates of keys with a large constant part weigh what the keys do", "[stages][int4]") {
  const std::uint32_t bits = GENERATE(4u, 3u);
  struct Case {
    DType dtype;
    std::uint32_t head_dim, group, page_tokens;
  };
  const auto [dtype, head_dim, group, page_tokens] = GENERATE(Catch::Generators::from_range(
      few<4>(std::array{Case{DType::bf16, 64, 7, 32}, Case{DType::bf16, 96, 3, 16}, Case{DType::f32, 128, 1, 8},
                        Case{DType::fp8_e4m3, 64, 7, 16}, Case{DType::bf16, 128, 7, 16}, Case{DType::bf16, 192, 1, 8},
                        Case{DType::bf16, 256, 3, 32}})));
  CAPTURE(bits, to_string(dtype), head_dim, group, page_tokens);
  const auto under_test = stages_under_test();
  // To set an element of a row of 8 bits rounds the whole row.
  const bool scaled = dtype == DType::fp8_e4m3;
  const std::uint32_t tokens = scaled ? 300 : 600;
  Problem problem(
      {.dtype = dtype, .tokens = tokens, .head_dim = head_dim, .group = group, .page_tokens = page_tokens, .seed = 9});
  if (!under_test->supports(problem.shape(), problem.layout())) return;
  // Rows of 8 bits hold no more of a key beside a part as large as that.
  const double size = scaled ? 4.0 : 100.0;
  Random random(head_dim);
  std::vector<double> parts(head_dim);
  for (double& part : parts) part = random.below(2) == 0 ? size : -size;
  for (std::uint32_t token = 0; token < tokens; ++token) {
    for (std::uint32_t c = 0; c < head_dim; ++c)  // And one channel whose values are larger than those of others.
      problem.set_k(token, c, parts[c] + random.normal() * (c == 5 ? 4.0 : 1.0));
  }
  const Placed placed = place(*under_test, problem);
  const Copies copies(*under_test, problem, placed, bits);
  const auto out = under_test->array(std::size_t{group} * tokens, kUntouched);
  const ScoreInt4Task task{.q = placed.q,
                           .copies = copies.data.data(),
                           .mean = copies.mean.data(),
                           .frames = placed.device_frames,
                           .tokens = tokens,
                           .bits = bits,
                           .out = out.data()};
  under_test->stages().score_int4({&task, 1}, problem.shape(), problem.layout(), under_test->stream());
  under_test->finish();
  const auto lse = [](const std::vector<double>& logits) {
    const double top = *std::ranges::max_element(logits);
    double sum = 0.0;
    for (const double logit : logits) sum += std::exp(logit - top);
    return top + std::log(sum);
  };
  for (std::uint32_t head = 0; head < group; ++head) {
    std::vector<double> logits;
    for (std::uint32_t token = 0; token < tokens; ++token) logits.push_back(reference::score(problem, head, token));
    const double want = lse(logits);
    const double got = lse({out.begin() + head * tokens, out.begin() + (head + 1) * tokens});
    CAPTURE(head, want, got);
    REQUIRE(std::abs(got - want) < 0.1);
  }
}

TEST_CASE("a tail is scored by its keys, behind the estimates", "[stages][int4]") {
  const std::uint32_t bits = GENERATE(4u, 3u);
  const auto [dtype, head_dim, group] =
      GENERATE(grid(std::array{DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3},
                    std::array{16u, 64u, 80u, 128u, 256u}, std::array{1u, 4u, 7u, 13u, 32u}));
  CAPTURE(bits, to_string(dtype), head_dim, group);
  const auto under_test = stages_under_test();
  const std::uint32_t page_tokens = group == 7 ? 40 : 16, tail_page = 9;
  Problem problem(
      {.dtype = dtype, .tokens = 10 * page_tokens, .head_dim = head_dim, .group = group, .page_tokens = page_tokens});
  if (!under_test->supports(problem.shape(), problem.layout())) return;
  problem.set_k(tail_page * page_tokens, 3, std::nan(""));
  const Placed placed = place(*under_test, problem);
  const Copies copies(*under_test, problem, placed, bits);
  std::vector<ScoreInt4Task> tasks;
  const std::uint32_t tokens[] = {9 * page_tokens, 0, 1, page_tokens, 9 * page_tokens - 5, 0};
  const std::uint32_t rows[] = {page_tokens, 1, page_tokens - 1, 0, 3, 0};
  for (std::uint32_t i = 0; i < std::size(tokens); ++i) {
    const auto out = under_test->array(std::size_t{group} * (tokens[i] + rows[i]) + 1, kUntouched);
    tasks.push_back({.q = placed.q,
                     .copies = copies.data.data(),
                     .mean = copies.mean.data(),
                     .frames = placed.device_frames,
                     .tokens = tokens[i],
                     .tail = placed.kv.page(tail_page),
                     .tail_rows = rows[i],
                     .bits = bits,
                     .out = out.data()});
  }
  under_test->stages().score_int4(tasks, problem.shape(), problem.layout(), under_test->stream());
  under_test->finish();
  for (const ScoreInt4Task& task : tasks) {
    const std::uint32_t row = task.tokens + task.tail_rows;
    REQUIRE(task.out[std::size_t{group} * row] == kUntouched);
    for (std::uint32_t i = 0; i < group * row; ++i) {
      const std::uint32_t head = i / row, at = i % row;
      const float got = task.out[i];
      CAPTURE(head, at, task.tokens, got);
      if (at < task.tokens) {
        if (!close(got, copies.estimate(problem, at, head))) FAIL("not the product with the copy");
        continue;
      }
      if (!close(got, exact(problem, tail_page * page_tokens + at - task.tokens, head))) {
        FAIL("not the product with the key");
      }
    }
  }
}

TEST_CASE("a key with NaN estimates as NaN and spoils no other", "[stages][int4]") {
  const std::uint32_t bits = GENERATE(4u, 3u);
  const auto under_test = stages_under_test();
  const std::uint32_t spoiled = GENERATE(3u, 17u);  // In the page whose mean is taken, and behind it.
  Problem problem({.tokens = 40, .group = 5});
  problem.set_k(spoiled, 3, std::nan(""));
  const Placed placed = place(*under_test, problem);
  const Copies copies(*under_test, problem, placed, bits);
  const auto out = under_test->array(5 * 40, kUntouched);
  const ScoreInt4Task task{.q = placed.q,
                           .copies = copies.data.data(),
                           .mean = copies.mean.data(),
                           .frames = placed.device_frames,
                           .tokens = 40,
                           .bits = bits,
                           .out = out.data()};
  under_test->stages().score_int4({&task, 1}, problem.shape(), problem.layout(), under_test->stream());
  under_test->finish();
  for (std::uint32_t i = 0; i < 200; ++i) {
    CAPTURE(bits, i);
    REQUIRE(std::isnan(out[i]) == (i % 40 == spoiled));
  }
}

TEST_CASE("estimates of many tasks and of one long task", "[stages][int4]") {
  const std::uint32_t bits = GENERATE(4u, 3u);
  struct Size {
    std::uint32_t tasks, tokens, group, head_dim;
  };
  // The longest: several turns of each thread block, of one and of two fragments of queries, and of more heads than
  // these.
  const auto [count, most, group, head_dim] = GENERATE(Catch::Generators::from_range(
      few<3>(std::array{Size{150, 400, 4, 128}, Size{1, 20'000, 4, 128}, Size{1, 150'001, 13, 96},
                        Size{1, 150'003, 4, 128}, Size{1, 250'003, 8, 64}, Size{1, 80'001, 8, 256}})));
  const auto under_test = stages_under_test();
  // The CPU goes through long sequences as through these, whose last page stays as long as it was.
  const std::uint32_t tokens = under_test->is_cpu() ? std::min(most, 20'000u + most % 16) : most;
  CAPTURE(bits, count, tokens, group, head_dim);
  const bool many = count != 1;
  const Problem problem({.tokens = tokens, .head_dim = head_dim, .group = group});
  const Placed placed = place(*under_test, problem);
  const Copies copies(*under_test, problem, placed, bits);
  std::vector<ScoreInt4Task> tasks;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t visible = many ? 1 + i * 7 % tokens : tokens;
    tasks.push_back({.q = placed.q,
                     .copies = copies.data.data(),
                     .mean = copies.mean.data(),
                     .frames = placed.device_frames,
                     .tokens = visible,
                     .tail = placed.kv.page(7),
                     .tail_rows = i % 3 == 2 ? 0u : 5u,
                     .bits = bits,
                     .out = under_test->array(std::size_t{group} * (visible + 5), kUntouched).data()});
  }
  under_test->stages().score_int4(tasks, problem.shape(), problem.layout(), under_test->stream());
  under_test->finish();
  std::vector<Estimate> expected;
  for (std::uint32_t token = 0; token < tokens; ++token) {
    const DecodedRow row = copies.row(problem, token);
    for (std::uint32_t head = 0; head < group; ++head) expected.push_back(copies.estimate(problem, row, head));
  }
  for (const ScoreInt4Task& task : tasks) {
    const std::uint32_t row = task.tokens + task.tail_rows;
    std::size_t right = 0;
    for (std::uint32_t i = 0; i < group * row; ++i) {
      const std::uint32_t at = i % row;
      right += close(task.out[i], at < task.tokens ? expected[at * group + i / row]
                                                   : exact(problem, 7 * 16 + at - task.tokens, i / row));
    }
    REQUIRE(right == std::size_t{group} * row);
  }
}

}  // namespace sluice::test
