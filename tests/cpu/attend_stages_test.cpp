#include <algorithm>
#include <cmath>
#include <thread>

#include "cpu/kernels/kernels.hpp"
#include "cpu/stages/score_tokens.hpp"
#include "tests/cpu/stage_support.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {
namespace {

OwnPartial attend_tokens(tools::Stages& stages, const Problem& problem, std::span<const std::uint32_t> tokens) {
  OwnPartial out(problem);
  AttendTask task = attend_task(problem, out);
  task.tokens = tokens;
  stages.attend({&task, 1}, problem.shape(), nullptr);
  return out;
}

std::vector<std::uint32_t> all_tokens(std::uint32_t count) { return random_tokens(count, 2.0, 1); }

}  // namespace

TEST_CASE("merging the two sides of any cut equals attending to the whole", "[cpu][stages]") {
  // share: 0 and 1: one side is empty
  const auto [tokens, share, dtype] =
      GENERATE(grid(std::array{1u, 2u, 33u, 700u}, std::array{0.0, 0.3, 1.0}, std::array{DType::f32, DType::bf16}));
  CAPTURE(tokens, share, to_string(dtype));
  tools::HostStages stages({.workers = workers(1)});
  const Problem problem({.dtype = dtype, .tokens = tokens, .seed = tokens});
  const auto all = all_tokens(tokens);
  const auto cut = static_cast<std::size_t>(share * tokens);
  OwnPartial near = attend_tokens(stages, problem, std::span(all).first(cut));
  OwnPartial far = attend_tokens(stages, problem, std::span(all).subspan(cut));

  const Partial parts[] = {near.view(), far.view()};
  OwnPartial merged(problem);
  const tools::MergeTask task{
      .parts = parts, .out = reinterpret_cast<std::byte*>(merged.out.data()), .lse = merged.lse.data()};
  stages.merge({&task, 1}, problem.shape(), DType::f32, nullptr);

  const Attention whole = reference::attend(problem, attended(0, tokens));
  REQUIRE(max_abs_diff(merged.out, whole.out) <= tolerance(problem));
  REQUIRE(max_abs_diff(merged.lse, whole.lse) <= tolerance(problem));
}

TEST_CASE("merging empty partials stays empty and outputs are rounded to their dtype", "[cpu][stages]") {
  tools::HostStages stages({.workers = workers(1)});
  const Problem problem({.tokens = 5});
  OwnPartial empty = attend_tokens(stages, problem, {});
  REQUIRE(std::count(empty.lse.begin(), empty.lse.end(), kEmptyLse) == 4);
  REQUIRE(std::count(empty.out.begin(), empty.out.end(), 0.f) == 4 * 64);
  const std::vector<std::uint32_t> tokens{1, 3};
  OwnPartial some = attend_tokens(stages, problem, tokens);
  const Partial parts[] = {empty.view(), some.view(), empty.view()};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<std::byte> out(some.out.size() * bytes_of(dtype));
    const tools::MergeTask task{.parts = parts, .out = out.data()};
    stages.merge({&task, 1}, problem.shape(), dtype, nullptr);
    std::vector<std::byte> rounded(out.size());
    for (std::size_t i = 0; i < some.out.size(); ++i) store_element(rounded.data(), dtype, i, some.out[i]);
    REQUIRE(out == rounded);
  }
  OwnPartial merged(problem);
  const Partial nothing[] = {empty.view(), empty.view()};
  const tools::MergeTask task{
      .parts = nothing, .out = reinterpret_cast<std::byte*>(merged.out.data()), .lse = merged.lse.data()};
  stages.merge({&task, 1}, problem.shape(), DType::f32, nullptr);
  REQUIRE(merged.out == empty.out);
  REQUIRE(merged.lse == empty.lse);
}

TEST_CASE("runs and the same tokens one by one are the same selection", "[cpu][stages]") {
  const auto [threads, tokens, dtype] =
      GENERATE(grid(std::array{1u, 3u}, std::array{1u, 40u, 9'001u}, std::array{DType::bf16, DType::fp8_e4m3}));
  CAPTURE(threads, tokens, to_string(dtype));
  tools::HostStages stages({.workers = workers(threads)});
  const Problem problem({.dtype = dtype, .tokens = tokens, .head_dim = 128, .seed = tokens});
  const Attention whole = reference::attend(problem, attended(0, tokens));
  const auto all = all_tokens(tokens);
  const auto runs = runs_over(tokens, problem.options().page_tokens);

  OwnPartial by_runs(problem);
  AttendTask task = attend_task(problem, by_runs);
  task.runs = runs;
  stages.attend({&task, 1}, problem.shape(), nullptr);
  REQUIRE(max_abs_diff(by_runs.out, whole.out) <= tolerance(problem));
  REQUIRE(max_abs_diff(by_runs.lse, whole.lse) <= tolerance(problem));

  const OwnPartial by_tokens = attend_tokens(stages, problem, all);
  REQUIRE(max_abs_diff(by_tokens.out, whole.out) <= tolerance(problem));

  // The first half as runs, with inner rows of pages, the rest as tokens.
  OwnPartial mixed(problem);
  const std::uint32_t half = tokens / 2;
  std::vector<PageRun> some_runs = runs_over(half, problem.options().page_tokens);
  task = attend_task(problem, mixed);
  task.runs = some_runs;
  task.tokens = std::span(all).subspan(half);
  stages.attend({&task, 1}, problem.shape(), nullptr);
  REQUIRE(max_abs_diff(mixed.out, whole.out) <= tolerance(problem));
  REQUIRE(max_abs_diff(mixed.lse, whole.lse) <= tolerance(problem));
}

TEST_CASE("attending does not depend on the number of threads", "[cpu][stages]") {
  const Problem problem({.tokens = 20'000, .head_dim = 128, .group = 3});
  const auto runs = runs_over(12'000, problem.options().page_tokens);
  const auto tokens = [] {
    auto all = all_tokens(20'000);
    all.erase(all.begin(), all.begin() + 12'000);
    return all;
  }();
  std::vector<OwnPartial> results;
  for (const std::uint32_t threads : {1u, 3u}) {
    tools::HostStages stages({.workers = workers(threads)});
    OwnPartial& out = results.emplace_back(problem);
    AttendTask task = attend_task(problem, out);
    task.runs = runs;
    task.tokens = tokens;
    stages.attend({&task, 1}, problem.shape(), nullptr);
  }
  REQUIRE(results[0].out == results[1].out);
  REQUIRE(results[0].lse == results[1].lse);
}

TEST_CASE("many tasks from several threads at once keep apart", "[cpu][stages]") {
  tools::HostStages stages({.workers = workers(3)});
  const Problem problem({.tokens = 3'000, .head_dim = 128});
  const auto runs = runs_over(3'000, problem.options().page_tokens);
  const auto few = random_tokens(3'000, 0.02, 3);
  const Attention whole = reference::attend(problem, attended(0, 3'000));
  const Attention part = reference::attend(problem, attended(few));
  const double within = tolerance(problem);
  std::vector<int> wrong(3, 0);
  const auto caller = [&](std::size_t id) {
    for (int round = 0; round < 20; ++round) {
      std::vector<OwnPartial> outs(9, OwnPartial(problem));
      std::vector<AttendTask> tasks;
      for (std::size_t i = 0; i < outs.size(); ++i) {
        tasks.push_back(attend_task(problem, outs[i]));
        if (i % 3 == 0) tasks.back().runs = runs;
        if (i % 3 == 1) tasks.back().tokens = few;
      }
      stages.attend(tasks, problem.shape(), nullptr);
      for (std::size_t i = 0; i < outs.size(); ++i) {
        const double off = i % 3 == 0   ? max_abs_diff(outs[i].out, whole.out)
                           : i % 3 == 1 ? max_abs_diff(outs[i].out, part.out)
                                        : max_abs_diff(outs[i].lse, std::vector<float>(4, kEmptyLse));
        if (!(off <= within)) ++wrong[id];
      }
    }
  };
  std::vector<std::thread> callers;
  for (std::size_t id = 0; id < wrong.size(); ++id) callers.emplace_back(caller, id);
  for (std::thread& thread : callers) thread.join();
  REQUIRE(wrong == std::vector<int>(3, 0));
}

TEST_CASE("attending with the scores of score_tokens equals attending without", "[cpu][stages]") {
  const auto [group, threads] = GENERATE(grid(std::array{1u, 4u, 7u}, std::array{1u, 3u}));
  CAPTURE(group, threads);
  tools::HostStages stages({.workers = workers(threads)});
  const Problem problem({.tokens = 6'000, .head_dim = 128, .group = group});
  const auto tokens = random_tokens(6'000, 0.6, 4);
  std::vector<float> scores(tokens.size() * group, kNan);
  cpu::score_tokens(cpu::fastest_kernels(),
                    {.q = problem.q(), .kv = problem.kv(), .tokens = tokens, .out = scores.data()}, problem.shape());
  const double within = tolerance(problem);
  for (std::size_t i = 0; i < tokens.size(); i += 97) {
    for (std::uint32_t head = 0; head < group; ++head) {
      REQUIRE(std::abs(scores[i * group + head] - reference::score(problem, head, tokens[i])) <= within);
    }
  }
  const OwnPartial unscored = attend_tokens(stages, problem, tokens);
  OwnPartial scored(problem);
  AttendTask task = attend_task(problem, scored);
  task.q = nullptr;
  task.tokens = tokens;
  task.scores = scores;
  stages.attend({&task, 1}, problem.shape(), nullptr);
  REQUIRE(max_abs_diff(scored.out, unscored.out) <= 1e-6);
  REQUIRE(max_abs_diff(scored.lse, unscored.lse) <= 1e-6);
}

TEST_CASE("a head that is no member of any token has an empty partial", "[cpu][stages]") {
  tools::HostStages stages({.workers = workers(1)});
  const Problem problem({.tokens = 2'000, .head_dim = 64, .group = 4});
  const auto tokens = random_tokens(2'000, 0.7, 4);
  std::vector<std::uint32_t> members(tokens.size());
  std::vector<Attended> pairs;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    members[i] = i % 5 == 0 ? 0b1011u : 0b0010u;
    pairs.push_back({.token = tokens[i], .members = members[i]});
  }
  OwnPartial out(problem);
  AttendTask task = attend_task(problem, out);
  task.tokens = tokens;
  task.members = members;
  stages.attend({&task, 1}, problem.shape(), nullptr);
  const Attention expected = reference::attend(problem, pairs);
  REQUIRE(max_abs_diff(out.out, expected.out) <= tolerance(problem));
  REQUIRE(max_abs_diff(out.lse, expected.lse) <= tolerance(problem));
  REQUIRE(out.lse[2] == kEmptyLse);
}

TEST_CASE("prefill equals attending every query to all that came before", "[cpu][stages]") {
  struct Case {
    std::uint32_t tokens, chunk, group, head_dim;
    DType dtype;
  };
  const auto c =
      GENERATE(Case{1, 1, 1, 16, DType::f32}, Case{37, 1, 4, 64, DType::bf16}, Case{37, 5, 3, 80, DType::f16},
               Case{130, 130, 1, 64, DType::bf16}, Case{130, 64, 8, 128, DType::f32},
               Case{150, 49, 2, 256, DType::bf16}, Case{330, 300, 4, 64, DType::bf16});
  CAPTURE(c.tokens, c.chunk, c.group, c.head_dim, to_string(c.dtype));
  const Problem problem({.dtype = c.dtype, .tokens = c.tokens, .head_dim = c.head_dim, .group = c.group, .seed = 77});
  // One query per (token, head), and an output of NaN, with gaps between the rows.
  const std::uint64_t head_stride = c.head_dim + 3;
  const std::uint64_t token_stride = c.group * head_stride + 5;
  std::vector<float> q(c.tokens * token_stride);
  Random random(5);
  for (float& x : q) x = static_cast<float>(random.normal());

  std::vector<Attention> expected;
  Problem query = problem;
  for (std::uint32_t token = 0; token < c.tokens; ++token) {
    for (std::uint32_t head = 0; head < c.group; ++head) {
      for (std::uint32_t i = 0; i < c.head_dim; ++i)
        query.set_q(head, i, q[token * token_stride + head * head_stride + i]);
    }
    expected.push_back(reference::attend(query, attended(0, token + 1)));
  }
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    tools::HostStages stages({.workers = workers(3), .kernels = *kernels});
    std::vector<float> out(c.tokens * token_stride, kNan);
    for (std::uint32_t first = 0; first < c.tokens; first += c.chunk) {
      const PrefillTask task{.q = reinterpret_cast<const std::byte*>(q.data() + first * token_stride),
                             .kv = problem.kv(),
                             .first = first,
                             .count = std::min(c.chunk, c.tokens - first),
                             .out = reinterpret_cast<std::byte*>(out.data() + first * token_stride)};
      stages.prefill({&task, 1},
                     {.q_token_stride = token_stride,
                      .q_head_stride = head_stride,
                      .out_token_stride = token_stride,
                      .out_head_stride = head_stride},
                     problem.shape(), nullptr);
    }
    for (std::uint32_t token = 0; token < c.tokens; ++token) {
      for (std::uint32_t head = 0; head < c.group; ++head) {
        const std::span<const float> row(&out[token * token_stride + head * head_stride], c.head_dim);
        const auto exact = std::span<const double>(expected[token].out).subspan(head * c.head_dim, c.head_dim);
        REQUIRE(max_abs_diff(row, exact) <= 2e-5);
        REQUIRE(std::isnan(*(row.data() + c.head_dim)));
      }
    }
  }
}

}  // namespace sluice::test
