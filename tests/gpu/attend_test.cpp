#include "tests/gpu/attend_support.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

/// Runs with ragged ends, and the tokens that they cover.
std::vector<PageRun> ragged_runs(const Problem& problem, std::vector<Attended>& covered, std::uint64_t seed) {
  Random random(seed);
  const std::uint32_t page_tokens = problem.options().page_tokens;
  std::vector<PageRun> runs = runs_over(problem.options().tokens, page_tokens);
  for (PageRun& run : runs) {
    if (random.uniform() < 0.5 && run.end > 1) {
      run.begin = static_cast<std::uint16_t>(random.below(run.end));
      run.end = static_cast<std::uint16_t>(run.begin + 1 + random.below(run.end - run.begin));
    }
    for (std::uint32_t row = run.begin; row < run.end; ++row)
      covered.push_back({.token = run.page * page_tokens + row});
  }
  return runs;
}

}  // namespace

TEST_CASE("device attend: runs, tokens and both together", "[gpu]") {
  struct Case {
    DType dtype;
    std::uint32_t tokens, head_dim, group, page_tokens;
  };
  const auto c = GENERATE(Case{DType::bf16, 1, 128, 4, 16}, Case{DType::bf16, 40, 64, 1, 8},
                          Case{DType::f16, 100, 128, 3, 32}, Case{DType::bf16, 700, 128, 8, 16},
                          Case{DType::f16, 1'000, 64, 32, 256}, Case{DType::bf16, 333, 128, 32, 24},
                          Case{DType::bf16, 515, 128, 12, 8}, Case{DType::bf16, 4'096, 128, 4, 16},
                          Case{DType::bf16, 700, 96, 5, 16}, Case{DType::f16, 4'096, 96, 32, 8},
                          Case{DType::f16, 515, 192, 12, 24}, Case{DType::bf16, 4'096, 192, 3, 16},
                          Case{DType::bf16, 1'000, 256, 32, 256}, Case{DType::f16, 9'000, 256, 8, 16});
  CAPTURE(to_string(c.dtype), c.tokens, c.head_dim, c.group, c.page_tokens);
  AttendFixture fixture;
  const Problem problem({.dtype = c.dtype,
                         .tokens = c.tokens,
                         .head_dim = c.head_dim,
                         .group = c.group,
                         .page_tokens = c.page_tokens,
                         .seed = c.tokens});
  const SharedPartial by_runs(fixture, problem);
  const SharedPartial by_tokens(fixture, problem);
  const SharedPartial mixed(fixture, problem);
  const auto all = all_tokens(c.tokens);
  const auto runs = runs_over(c.tokens, c.page_tokens);
  const auto first_runs = runs_over(c.tokens / 2, c.page_tokens);
  std::vector<AttendTask> tasks(3, attend_task(fixture, problem, by_runs));
  tasks[0].runs = runs;
  tasks[1].tokens = all;
  tasks[1].out = by_tokens.view();
  tasks[2].runs = first_runs;
  tasks[2].tokens = std::span(all).subspan(c.tokens / 2);
  tasks[2].out = mixed.view();
  fixture.stages().attend(tasks, problem.shape(), fixture.stream.get());
  fixture.wait();
  const Attention whole = reference::attend(problem, attended(0, c.tokens));
  require_close(by_runs, whole, device_tolerance(problem));
  require_close(by_tokens, whole, device_tolerance(problem));
  require_close(mixed, whole, device_tolerance(problem));
}

TEST_CASE("device attend: scores are scaled and soft-capped as a model says, those that are given are not", "[gpu]") {
  const auto dtype = GENERATE(DType::bf16, DType::f16);
  const auto head_dim = GENERATE(64u, 128u);
  const auto group = GENERATE(1u, 5u, 12u);
  const auto softcap = GENERATE(0.f, 0.5f, 20.f);
  CAPTURE(to_string(dtype), head_dim, group, softcap);
  AttendFixture fixture;
  const Problem problem({.dtype = dtype,
                         .tokens = 700,
                         .head_dim = head_dim,
                         .group = group,
                         .seed = 71,
                         .scale = 0.3f,
                         .softcap = softcap});
  const auto all = all_tokens(700);
  std::vector<float> scores;
  for (const std::uint32_t token : all) {
    for (std::uint32_t head = 0; head < group; ++head)
      scores.push_back(static_cast<float>(reference::score(problem, head, token)));
  }
  const auto runs = runs_over(700, 16);
  const SharedPartial plain(fixture, problem);
  const SharedPartial scored(fixture, problem);
  const SharedPartial beside(fixture, problem);
  std::vector<AttendTask> tasks(3, attend_task(fixture, problem, plain));
  tasks[0].runs = runs;
  tasks[1].tokens = all;
  tasks[1].scores = scores;
  tasks[1].out = scored.view();
  tasks[2].tokens = all;
  tasks[2].out = beside.view();
  // The first alone runs the kernel for unscored tokens, then all together the one for scored ones.
  fixture.stages().attend(std::span(tasks).first(1), problem.shape(), fixture.stream.get());
  fixture.wait();
  const Attention expected = reference::attend(problem, attended(0, 700));
  // Before the cap scores are as long as those of any other problem.
  Problem uncapped({.dtype = dtype, .tokens = 700, .head_dim = head_dim, .group = group, .seed = 71, .scale = 0.3f});
  const double within = device_tolerance(uncapped) + 1e-5 * softcap;
  require_close(plain, expected, within);
  fixture.stages().attend(tasks, problem.shape(), fixture.stream.get());
  fixture.wait();
  require_close(plain, expected, within);
  require_close(scored, expected, within);
  require_close(beside, expected, within);
}

TEST_CASE("device attend: ragged runs leave the rows between them alone", "[gpu]") {
  const auto page_tokens = GENERATE(8u, 16u, 32u, 256u);
  const auto head_dim = GENERATE(96u, 128u, 192u, 256u);
  CAPTURE(page_tokens, head_dim);
  AttendFixture fixture;
  Problem problem({.tokens = 900, .head_dim = head_dim, .group = 5, .page_tokens = page_tokens, .seed = page_tokens});
  std::vector<Attended> covered;
  const auto runs = ragged_runs(problem, covered, 9);
  // Rows that no run covers are poisoned: a read that counts would show.
  std::vector<bool> attended_rows(problem.options().tokens, false);
  for (const Attended& row : covered) attended_rows[row.token] = true;
  const SharedPartial out(fixture, problem);
  AttendTask task = attend_task(fixture, problem, out);
  for (std::uint32_t token = 0; token < problem.options().tokens; ++token) {
    if (attended_rows[token]) continue;
    for (std::uint32_t i = 0; i < head_dim; ++i) {
      store_element(task.kv.k_row(token), DType::bf16, i, std::nan(""));
      store_element(task.kv.v_row(token), DType::bf16, i, std::nan(""));
    }
  }
  task.runs = runs;
  fixture.stages().attend({&task, 1}, problem.shape(), fixture.stream.get());
  fixture.wait();
  require_close(out, reference::attend(problem, covered), device_tolerance(problem));
}

TEST_CASE("device attend: members and given scores", "[gpu]") {
  const auto group = GENERATE(1u, 4u, 7u, 20u);
  const auto head_dim = GENERATE(96u, 128u, 192u, 256u);
  CAPTURE(group, head_dim);
  AttendFixture fixture;
  const Problem problem({.tokens = 3'000, .head_dim = head_dim, .group = group});
  const auto tokens = random_tokens(3'000, 0.6, 4);
  std::vector<std::uint32_t> members(tokens.size());
  std::vector<float> scores;
  std::vector<Attended> pairs;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    members[i] = i % 5 == 0 ? 0xffff'ffffu : 0x5'5550u + static_cast<std::uint32_t>(i % 2);
    if (group > 2) members[i] &= ~4u;  // Head 2 attends nothing.
    pairs.push_back({.token = tokens[i], .members = members[i]});
    for (std::uint32_t head = 0; head < group; ++head) {
      scores.push_back(static_cast<float>(reference::score(problem, head, tokens[i])));
    }
  }
  const SharedPartial with_members(fixture, problem);
  const SharedPartial with_scores(fixture, problem);
  const SharedPartial with_both(fixture, problem);
  std::vector<AttendTask> tasks(3, attend_task(fixture, problem, with_members));
  for (AttendTask& task : tasks) task.tokens = tokens;
  tasks[0].members = members;
  tasks[1].q = nullptr;
  tasks[1].scores = scores;
  tasks[1].out = with_scores.view();
  tasks[2].members = members;
  tasks[2].scores = scores;
  tasks[2].out = with_both.view();
  // The first alone runs the kernel for unscored tokens, then all together the one for scored ones.
  fixture.stages().attend(std::span(tasks).first(1), problem.shape(), fixture.stream.get());
  fixture.wait();
  const Attention some = reference::attend(problem, pairs);
  require_close(with_members, some, device_tolerance(problem));
  fixture.stages().attend(tasks, problem.shape(), fixture.stream.get());
  fixture.wait();
  require_close(with_members, some, device_tolerance(problem));
  require_close(with_both, some, device_tolerance(problem));
  require_close(with_scores, reference::attend(problem, attended(tokens)), device_tolerance(problem));
  if (group > 2) {
    REQUIRE(with_both.lse[2] == kEmptyLse);
    REQUIRE(std::count(with_both.out.begin() + 2 * head_dim, with_both.out.begin() + 3 * head_dim, 0.f) == head_dim);
  }
}

TEST_CASE("device attend: scored tokens beside runs", "[gpu]") {
  AttendFixture fixture;
  const Problem problem({.tokens = 400, .head_dim = 64, .group = 4, .page_tokens = 8});
  const auto runs = runs_over(203, 8);
  std::vector<std::uint32_t> tokens;
  std::vector<float> scores;
  for (std::uint32_t token = 203; token < 400; ++token) {
    tokens.push_back(token);
    for (std::uint32_t head = 0; head < 4; ++head) {
      scores.push_back(static_cast<float>(reference::score(problem, head, token)));
    }
  }
  const SharedPartial out(fixture, problem);
  AttendTask task = attend_task(fixture, problem, out);
  task.runs = runs;
  task.tokens = tokens;
  task.scores = scores;
  fixture.stages().attend({&task, 1}, problem.shape(), fixture.stream.get());
  fixture.wait();
  require_close(out, reference::attend(problem, attended(0, 400)), device_tolerance(problem));
}

TEST_CASE("device attend: outliers", "[gpu]") {
  const auto dtype = GENERATE(DType::bf16, DType::f16);
  CAPTURE(to_string(dtype));
  AttendFixture fixture;
  const Problem problem({.dtype = dtype, .tokens = 1'000, .head_dim = 128, .group = 8, .outlier = 1e3});
  const SharedPartial out(fixture, problem);
  AttendTask task = attend_task(fixture, problem, out);
  const auto runs = runs_over(1'000, 16);
  task.runs = runs;
  fixture.stages().attend({&task, 1}, problem.shape(), fixture.stream.get());
  fixture.wait();
  require_close(out, reference::attend(problem, attended(0, 1'000)), device_tolerance(problem));
}

TEST_CASE("device merge: the two sides of any cut equal the whole", "[gpu]") {
  const auto tokens = GENERATE(1u, 33u, 700u);
  const auto share = GENERATE(0.0, 0.3, 1.0);
  CAPTURE(tokens, share);
  AttendFixture fixture;
  const Problem problem({.tokens = tokens, .seed = tokens});
  const auto all = all_tokens(tokens);
  const auto cut = static_cast<std::size_t>(share * tokens);
  const SharedPartial near(fixture, problem);
  const SharedPartial far(fixture, problem);
  const SharedPartial merged(fixture, problem);
  std::vector<AttendTask> tasks(2, attend_task(fixture, problem, near));
  tasks[0].tokens = std::span(all).first(cut);
  tasks[1].tokens = std::span(all).subspan(cut);
  tasks[1].out = far.view();
  fixture.stages().attend(tasks, problem.shape(), fixture.stream.get());
  const Partial parts[] = {near.view(), far.view()};
  const tools::MergeTask merge{
      .parts = parts, .out = reinterpret_cast<std::byte*>(merged.out.data()), .lse = merged.lse.data()};
  fixture.stages().merge({&merge, 1}, problem.shape(), DType::f32, fixture.stream.get());
  fixture.wait();
  require_close(merged, reference::attend(problem, attended(0, tokens)), device_tolerance(problem));
}

TEST_CASE("device merge: empty partials, many partials, many tasks, every dtype", "[gpu]") {
  AttendFixture fixture;
  const Problem problem({.tokens = 5});
  const SharedPartial empty(fixture, problem);
  const SharedPartial some(fixture, problem);
  std::vector<AttendTask> attends(2, attend_task(fixture, problem, empty));
  const std::vector<std::uint32_t> tokens{1, 3};
  attends[1].tokens = tokens;
  attends[1].out = some.view();
  fixture.stages().attend(attends, problem.shape(), fixture.stream.get());
  const auto empties = GENERATE(2u, 3u, 9u);
  const auto count = GENERATE(1u, 100u);
  const auto dtype = GENERATE(DType::f32, DType::f16, DType::bf16);
  CAPTURE(empties, count, to_string(dtype));
  std::vector<Partial> parts(empties, empty.view());
  const std::size_t bytes = some.out.size() * bytes_of(dtype);
  const auto nothing = fixture.memory<std::byte>(bytes);
  const auto out = fixture.memory<std::byte>(bytes * count);
  const auto lse = fixture.memory<float>(some.lse.size() * count);
  std::vector<tools::MergeTask> tasks{{.parts = parts, .out = nothing.data()}};
  fixture.stages().merge(tasks, problem.shape(), dtype, fixture.stream.get());
  std::vector<Partial> one = parts;
  one.insert(one.begin() + empties / 2, some.view());
  tasks.clear();
  for (std::uint32_t i = 0; i < count; ++i) {
    tasks.push_back({.parts = one, .out = out.data() + i * bytes, .lse = lse.data() + i * some.lse.size()});
  }
  fixture.stages().merge(tasks, problem.shape(), dtype, fixture.stream.get());
  fixture.wait();
  REQUIRE(std::count(empty.lse.begin(), empty.lse.end(), kEmptyLse) == 4);
  REQUIRE(std::count(empty.out.begin(), empty.out.end(), 0.f) == 4 * 64);
  REQUIRE(std::count(nothing.begin(), nothing.end(), std::byte{0}) == static_cast<std::ptrdiff_t>(bytes));
  std::vector<std::byte> rounded(bytes);
  for (std::size_t i = 0; i < some.out.size(); ++i) store_element(rounded.data(), dtype, i, some.out[i]);
  for (std::uint32_t i = 0; i < count; ++i) {
    REQUIRE(std::equal(rounded.begin(), rounded.end(), out.begin() + static_cast<std::ptrdiff_t>(i * bytes)));
    REQUIRE(
        std::equal(some.lse.begin(), some.lse.end(), lse.begin() + static_cast<std::ptrdiff_t>(i * some.lse.size())));
  }
}

}  // namespace sluice::test
