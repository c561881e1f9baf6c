#include "cpu/backend.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "cpu/kernels.hpp"
#include "cpu/rates.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

const cpu::Workers& workers(std::uint32_t threads) {
  static const cpu::Topology topology;
  static const cpu::Workers one(topology, {.threads = 1});
  static const cpu::Workers three(topology, {.threads = 3, .pin = false});
  return threads == 1 ? one : three;
}

/// A partial of one task with memory of its own, NaN before it is written.
struct OwnPartial {
  explicit OwnPartial(const Problem& problem)
      : out(std::size_t{problem.options().group} * problem.options().head_dim, kNan), lse(problem.options().group, kNan) {}
  [[nodiscard]] Partial view() { return {.out = out.data(), .lse = lse.data()}; }
  std::vector<float> out;
  std::vector<float> lse;
};

AttendTask attend_task(const Problem& problem, OwnPartial& out) {
  AttendTask task;
  task.q = problem.q();
  task.kv = problem.kv();
  task.out = out.view();
  return task;
}

OwnPartial attend_tokens(cpu::Backend& backend, const Problem& problem, std::span<const std::uint32_t> tokens) {
  OwnPartial out(problem);
  AttendTask task = attend_task(problem, out);
  task.tokens = tokens;
  backend.attend({&task, 1}, problem.shape(), nullptr);
  return out;
}

std::vector<float> score_tokens(cpu::Backend& backend, const Problem& problem, std::span<const std::uint32_t> tokens) {
  std::vector<float> out(tokens.size() * problem.options().group, kNan);
  const ScoreTokensTask task{.q = problem.q(), .kv = problem.kv(), .tokens = tokens, .out = out.data()};
  backend.score_tokens({&task, 1}, problem.shape(), nullptr);
  return out;
}

std::vector<std::byte> digests_of(cpu::Backend& backend, const Problem& problem, DigestKind kind) {
  const std::size_t digest_bytes = 2 * problem.layout().row_bytes();
  std::vector<std::byte> digests((2 * problem.frames().size() + 1) * digest_bytes);
  std::vector<DigestTask> tasks;
  for (std::uint32_t page = 0; page < problem.frames().size(); ++page) {
    tasks.push_back({.page = problem.kv().page(page), .out = digests.data() + problem.frames()[page] * digest_bytes});
  }
  backend.digest(tasks, kind, problem.layout(), nullptr);
  return digests;
}

std::vector<float> score_pages(cpu::Backend& backend, const Problem& problem, DigestKind kind) {
  const std::vector<std::byte> digests = digests_of(backend, problem, kind);
  const auto pages = static_cast<std::uint32_t>(problem.frames().size());
  std::vector<float> out(std::size_t{problem.options().group} * pages, kNan);
  const ScorePagesTask task{
      .q = problem.q(), .digests = digests.data(), .frames = problem.frames().data(), .pages = pages, .out = out.data()};
  backend.score_pages({&task, 1}, problem.shape(), problem.options().dtype, nullptr);
  return out;
}

std::vector<std::uint32_t> all_tokens(std::uint32_t count) { return random_tokens(count, 2.0, 1); }

}  // namespace

TEST_CASE("merging the two sides of any cut equals attending to the whole", "[cpu][backend]") {
  const auto tokens = GENERATE(1u, 2u, 33u, 700u);
  const auto share = GENERATE(0.0, 0.3, 1.0);  // 0 and 1: one side is empty
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  CAPTURE(tokens, share, to_string(dtype));
  cpu::Backend backend(workers(1));
  const Problem problem({.dtype = dtype, .tokens = tokens, .seed = tokens});
  const auto all = all_tokens(tokens);
  const auto cut = static_cast<std::size_t>(share * tokens);
  OwnPartial near = attend_tokens(backend, problem, std::span(all).first(cut));
  OwnPartial far = attend_tokens(backend, problem, std::span(all).subspan(cut));

  const Partial parts[] = {near.view(), far.view()};
  OwnPartial merged(problem);
  const MergeTask task{.parts = parts, .out = reinterpret_cast<std::byte*>(merged.out.data()), .lse = merged.lse.data()};
  backend.merge({&task, 1}, problem.shape(), DType::f32, nullptr);

  const Attention whole = reference::attend(problem, attended(0, tokens));
  REQUIRE(max_abs_diff(merged.out, whole.out) <= tolerance(problem));
  REQUIRE(max_abs_diff(merged.lse, whole.lse) <= tolerance(problem));
}

TEST_CASE("merging empty partials stays empty and outputs are rounded to their dtype", "[cpu][backend]") {
  cpu::Backend backend(workers(1));
  const Problem problem({.tokens = 5});
  OwnPartial empty = attend_tokens(backend, problem, {});
  REQUIRE(std::count(empty.lse.begin(), empty.lse.end(), kEmptyLse) == 4);
  REQUIRE(std::count(empty.out.begin(), empty.out.end(), 0.f) == 4 * 64);
  const std::vector<std::uint32_t> tokens{1, 3};
  OwnPartial some = attend_tokens(backend, problem, tokens);
  const Partial parts[] = {empty.view(), some.view(), empty.view()};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<std::byte> out(some.out.size() * bytes_of(dtype));
    const MergeTask task{.parts = parts, .out = out.data()};
    backend.merge({&task, 1}, problem.shape(), dtype, nullptr);
    std::vector<std::byte> rounded(out.size());
    for (std::size_t i = 0; i < some.out.size(); ++i) store_element(rounded.data(), dtype, i, some.out[i]);
    REQUIRE(out == rounded);
  }
  OwnPartial merged(problem);
  const Partial nothing[] = {empty.view(), empty.view()};
  const MergeTask task{.parts = nothing, .out = reinterpret_cast<std::byte*>(merged.out.data()), .lse = merged.lse.data()};
  backend.merge({&task, 1}, problem.shape(), DType::f32, nullptr);
  REQUIRE(merged.out == empty.out);
  REQUIRE(merged.lse == empty.lse);
}

TEST_CASE("runs and the same tokens one by one are the same selection", "[cpu][backend]") {
  const auto threads = GENERATE(1u, 3u);
  const auto tokens = GENERATE(1u, 40u, 9'001u);
  CAPTURE(threads, tokens);
  cpu::Backend backend(workers(threads));
  const Problem problem({.tokens = tokens, .head_dim = 128, .seed = tokens});
  const Attention whole = reference::attend(problem, attended(0, tokens));
  const auto all = all_tokens(tokens);
  const auto runs = runs_over(tokens, problem.options().page_tokens);

  OwnPartial by_runs(problem);
  AttendTask task = attend_task(problem, by_runs);
  task.runs = runs;
  backend.attend({&task, 1}, problem.shape(), nullptr);
  REQUIRE(max_abs_diff(by_runs.out, whole.out) <= tolerance(problem));
  REQUIRE(max_abs_diff(by_runs.lse, whole.lse) <= tolerance(problem));

  const OwnPartial by_tokens = attend_tokens(backend, problem, all);
  REQUIRE(max_abs_diff(by_tokens.out, whole.out) <= tolerance(problem));

  // The first half as runs, with inner rows of pages, the rest as tokens.
  OwnPartial mixed(problem);
  const std::uint32_t half = tokens / 2;
  std::vector<PageRun> some_runs = runs_over(half, problem.options().page_tokens);
  task = attend_task(problem, mixed);
  task.runs = some_runs;
  task.tokens = std::span(all).subspan(half);
  backend.attend({&task, 1}, problem.shape(), nullptr);
  REQUIRE(max_abs_diff(mixed.out, whole.out) <= tolerance(problem));
  REQUIRE(max_abs_diff(mixed.lse, whole.lse) <= tolerance(problem));
}

TEST_CASE("attending does not depend on the number of threads", "[cpu][backend]") {
  const Problem problem({.tokens = 20'000, .head_dim = 128, .group = 3});
  const auto runs = runs_over(12'000, problem.options().page_tokens);
  const auto tokens = [] {
    auto all = all_tokens(20'000);
    all.erase(all.begin(), all.begin() + 12'000);
    return all;
  }();
  std::vector<OwnPartial> results;
  for (const std::uint32_t threads : {1u, 3u}) {
    cpu::Backend backend(workers(threads));
    OwnPartial& out = results.emplace_back(problem);
    AttendTask task = attend_task(problem, out);
    task.runs = runs;
    task.tokens = tokens;
    backend.attend({&task, 1}, problem.shape(), nullptr);
  }
  REQUIRE(results[0].out == results[1].out);
  REQUIRE(results[0].lse == results[1].lse);
}

TEST_CASE("many tasks from several threads at once keep apart", "[cpu][backend]") {
  cpu::Backend backend(workers(3));
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
      backend.attend(tasks, problem.shape(), nullptr);
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

TEST_CASE("attending with the scores of score_tokens equals attending without", "[cpu][backend]") {
  const auto group = GENERATE(1u, 4u, 7u);
  const auto threads = GENERATE(1u, 3u);
  CAPTURE(group, threads);
  cpu::Backend backend(workers(threads));
  const Problem problem({.tokens = 6'000, .head_dim = 128, .group = group});
  const auto tokens = random_tokens(6'000, 0.6, 4);
  const std::vector<float> scores = score_tokens(backend, problem, tokens);
  for (std::size_t i = 0; i < tokens.size(); i += 97) {
    for (std::uint32_t head = 0; head < group; ++head) {
      REQUIRE(std::abs(scores[i * group + head] - reference::score(problem, head, tokens[i])) <= tolerance(problem));
    }
  }
  const OwnPartial unscored = attend_tokens(backend, problem, tokens);
  OwnPartial scored(problem);
  AttendTask task = attend_task(problem, scored);
  task.q = nullptr;
  task.tokens = tokens;
  task.scores = scores;
  backend.attend({&task, 1}, problem.shape(), nullptr);
  REQUIRE(max_abs_diff(scored.out, unscored.out) <= 1e-6);
  REQUIRE(max_abs_diff(scored.lse, unscored.lse) <= 1e-6);
}

TEST_CASE("a head that is no member of any token has an empty partial", "[cpu][backend]") {
  cpu::Backend backend(workers(1));
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
  backend.attend({&task, 1}, problem.shape(), nullptr);
  const Attention expected = reference::attend(problem, pairs);
  REQUIRE(max_abs_diff(out.out, expected.out) <= tolerance(problem));
  REQUIRE(max_abs_diff(out.lse, expected.lse) <= tolerance(problem));
  REQUIRE(out.lse[2] == kEmptyLse);
}

TEST_CASE("a page's box bounds every key and its cuboid mean lies inside", "[cpu][backend]") {
  const auto dtype = GENERATE(DType::f32, DType::f16, DType::bf16);
  const auto head_dim = GENERATE(80u, 128u);
  const auto outlier = GENERATE(1.0, 1e3);
  CAPTURE(to_string(dtype), head_dim, outlier);
  cpu::Backend backend(workers(3));
  const Problem problem({.dtype = dtype, .tokens = 40 * 16, .head_dim = head_dim, .group = 3, .outlier = outlier});
  const std::vector<float> box = score_pages(backend, problem, DigestKind::box);
  const std::vector<float> mean = score_pages(backend, problem, DigestKind::cuboid_mean);
  const double raw = std::sqrt(static_cast<double>(head_dim));
  for (std::uint32_t head = 0; head < 3; ++head) {
    for (std::uint32_t page = 0; page < 40; ++page) {
      const double bound = box[head * 40 + page];
      const double slack = 1e-5 * (1.0 + std::abs(bound));
      REQUIRE(mean[head * 40 + page] <= bound + slack);
      for (std::uint32_t token = page * 16; token < (page + 1) * 16; ++token) {
        REQUIRE(reference::score(problem, head, token) * raw <= bound + slack);
      }
    }
  }
}

TEST_CASE("a page of identical keys scores q.k, and the order of tokens does not matter", "[cpu][backend]") {
  const auto kind = GENERATE(DigestKind::box, DigestKind::cuboid_mean);
  cpu::Backend backend(workers(1));
  Problem problem({.tokens = 32, .group = 2});
  Problem reversed = problem;
  for (std::uint32_t token = 0; token < 16; ++token) {
    for (std::uint32_t c = 0; c < 64; ++c) {
      problem.set_k(token, c, problem.k(0, c));
      reversed.set_k(16 + token, c, problem.k(31 - token, c));
    }
  }
  const std::vector<float> scores = score_pages(backend, problem, kind);
  for (std::uint32_t head = 0; head < 2; ++head) {
    REQUIRE(std::abs(scores[head * 2] - 8.0 * reference::score(problem, head, 3)) < 1e-4);
  }
  const std::vector<float> mirrored = score_pages(backend, reversed, kind);
  // A mean of bf16 rounds in the last place; an extreme does not.
  const float within = kind == DigestKind::box ? 0.f : 0.05f;
  for (std::uint32_t head = 0; head < 2; ++head) {
    REQUIRE(std::abs(mirrored[head * 2 + 1] - scores[head * 2 + 1]) <= within);
  }
}

TEST_CASE("top-k equals a sort, ties by lowest index, NaN last", "[cpu][backend]") {
  const auto count = GENERATE(0u, 1u, 7u, 100u, 1'500u, 60'000u);
  const auto distinct = GENERATE(1u, 5u, 1'000'000u);  // 1: nothing but ties
  CAPTURE(count, distinct);
  Random random(count + distinct);
  std::vector<float> values;
  for (std::uint32_t i = 0; i < count; ++i) {
    const float special[] = {kNan, -kNan, kInf, -kInf, 0.f, -0.f, 1e-45f};
    const float plain = static_cast<float>(random.below(distinct)) - 2.f;
    values.push_back(random.below(10) == 0 ? special[random.below(7)] : plain);
  }
  cpu::Backend backend(workers(3));
  for (const std::uint32_t k : {0u, 1u, 3u, count / 3, count, count + 5}) {
    CAPTURE(k);
    const std::vector<std::uint32_t> expected = reference::top_k(values, k);
    std::vector<std::uint32_t> out(std::min(k, count) + 1, 777'777u);
    const TopKTask task{.values = values, .k = k, .out = out.data()};
    backend.top_k({&task, 1}, nullptr);
    REQUIRE(out.back() == 777'777u);
    out.pop_back();
    REQUIRE(out == expected);
  }
}

TEST_CASE("appending converts rows and touches no others", "[cpu][backend]") {
  const auto from = GENERATE(DType::f32, DType::f16, DType::bf16);
  const auto to = GENERATE(DType::f32, DType::f16, DType::bf16);
  CAPTURE(to_string(from), to_string(to));
  constexpr std::uint32_t kDim = 80, kRows = 5, kFirst = 3;
  constexpr std::uint64_t kStride = 2 * kDim + 7;
  const PageLayout layout{.page_tokens = 16, .head_dim = kDim, .dtype = to};
  std::vector<std::byte> k(kRows * kStride * 4), v(k.size());
  Random random(8);
  for (std::size_t i = 0; i < kRows * kStride; ++i) {
    store_element(k.data(), from, i, random.normal() * 100.0);
    store_element(v.data(), from, i, random.normal() * 1e-6);
  }
  std::vector<std::byte> page(layout.page_bytes(), std::byte{0x5a});
  std::vector<std::byte> expected = page;
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t c = 0; c < kDim; ++c) {
      const std::size_t at = (kFirst + row) * kDim + c;
      store_element(expected.data(), to, at, load_element(k.data(), from, row * kStride + c));
      store_element(expected.data() + layout.half_bytes(), to, at, load_element(v.data(), from, row * kStride + c));
    }
  }
  cpu::Backend backend(workers(1));
  const AppendTask task{.k = k.data(),
                        .v = v.data(),
                        .dtype = from,
                        .token_stride = kStride,
                        .page = page.data(),
                        .first_row = kFirst,
                        .count = kRows};
  backend.append({&task, 1}, layout, nullptr);
  REQUIRE(page == expected);
}

TEST_CASE("to_f32 widens strided rows of any length", "[cpu][backend]") {
  const auto dtype = GENERATE(DType::f32, DType::f16, DType::bf16);
  const auto head_dim = GENERATE(1u, 16u, 77u);
  std::vector<std::byte> data(4096 * bytes_of(dtype));
  Random random(2);
  for (std::size_t i = 0; i < 4096; ++i) store_element(data.data(), dtype, i, random.normal());
  const TensorView in{.data = data.data(), .dtype = dtype, .tokens = 4, .heads = 3, .head_dim = head_dim, .token_stride = 700, .head_stride = 90};
  std::vector<float> out(std::size_t{12} * head_dim + 1, 1234.f);
  cpu::Backend backend(workers(1));
  backend.to_f32(in, out.data(), nullptr);
  REQUIRE(out.back() == 1234.f);
  for (std::size_t row = 0; row < 12; ++row) {
    for (std::size_t c = 0; c < head_dim; ++c) {
      REQUIRE(out[row * head_dim + c] == load_element(data.data(), dtype, row / 3 * 700 + row % 3 * 90 + c));
    }
  }
}

TEST_CASE("prefill equals attending every query to all that came before", "[cpu][backend]") {
  struct Case {
    std::uint32_t tokens, chunk, group, head_dim;
    DType dtype;
  };
  const auto c = GENERATE(Case{1, 1, 1, 16, DType::f32}, Case{37, 1, 4, 64, DType::bf16}, Case{37, 5, 3, 80, DType::f16},
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
      for (std::uint32_t i = 0; i < c.head_dim; ++i) query.set_q(head, i, q[token * token_stride + head * head_stride + i]);
    }
    expected.push_back(reference::attend(query, attended(0, token + 1)));
  }
  for (const cpu::Kernels* kernels : cpu::available_kernels()) {
    CAPTURE(kernels->name);
    cpu::Backend backend(workers(3), kernels);
    std::vector<float> out(c.tokens * token_stride, kNan);
    for (std::uint32_t first = 0; first < c.tokens; first += c.chunk) {
      const PrefillTask task{.q = reinterpret_cast<const std::byte*>(q.data() + first * token_stride),
                             .kv = problem.kv(),
                             .first = first,
                             .count = std::min(c.chunk, c.tokens - first),
                             .out = reinterpret_cast<std::byte*>(out.data() + first * token_stride)};
      backend.prefill({&task, 1},
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

TEST_CASE("shapes without kernels are named and refused before anything is written", "[cpu][backend]") {
  cpu::Backend backend(workers(1));
  const Problem problem({.tokens = 20});
  REQUIRE(backend.unsupported_reasons(problem.shape(), problem.layout()).empty());
  const AttentionShape odd{.layers = 1, .q_heads = 66, .kv_heads = 2, .head_dim = 72};
  const auto reasons = backend.unsupported_reasons(odd, problem.layout());
  REQUIRE(reasons.size() == 3);
  REQUIRE(reasons[0].find("head_dim 72") != std::string::npos);
  REQUIRE(reasons[1].find("33 query heads") != std::string::npos);
  REQUIRE(reasons[2].find("pages of head_dim 64") != std::string::npos);

  OwnPartial out(problem);
  AttendTask task = attend_task(problem, out);
  try {
    backend.attend({&task, 1}, odd, nullptr);
    FAIL("odd shape was accepted");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::unsupported);
  }
  REQUIRE(std::isnan(out.lse[0]));
  backend.attend({}, odd, nullptr);
}

TEST_CASE("measured rates are usable rates", "[cpu][backend]") {
  cpu::Backend backend(workers(1));
  const AttentionShape shape{.layers = 1, .q_heads = 4, .kv_heads = 1, .head_dim = 128};
  const CostRates rates = cpu::measure_rates(workers(1), backend, shape, {.page_tokens = 32, .head_dim = 128, .dtype = DType::bf16});
  for (const double rate : {rates.far_runs_gbps, rates.far_tokens_gbps, rates.link_gbps, rates.near_gbps,
                            cpu::measure_read_gbps(workers(1), 8 * MiB)}) {
    REQUIRE(std::isfinite(rate));
    REQUIRE(rate > 0.0);
  }
}

}  // namespace sluice::test
