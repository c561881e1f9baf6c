#include "tests/gpu/attend_support.hpp"
#include "tests/support/random.hpp"

// Tasks that are many or long: several slices each, or thread blocks that share them out.
namespace sluice::test {

TEST_CASE("device attend: many ragged tasks in one call, twice the same bits", "[gpu]") {
  AttendFixture fixture;
  const auto count = GENERATE(9u, 200u, 400u);  // 200: blocks have shares of them.
  CAPTURE(count);
  const Problem problem({.tokens = 6'000, .head_dim = 128, .group = 4});
  const AttendTask base = attend_task(fixture, problem, SharedPartial(fixture, problem));
  const auto runs = runs_over(6'000, 16);
  const auto all = all_tokens(6'000);
  std::vector<AttendTask> tasks(count, base);
  std::vector<SharedPartial> outs[2];
  std::vector<std::uint32_t> lengths;
  Random random(3);
  for (AttendTask& task : tasks) {
    lengths.push_back(count > 300 ? random.below(40) : random.below(6'001));
    if (lengths.size() == 2) lengths.back() = 0;
    const std::uint32_t pages = lengths.back() / 2 / 16;
    task.runs = std::span(runs).first(pages);
    task.tokens = std::span(all).subspan(pages * 16, lengths.back() - pages * 16);
  }
  for (auto& round : outs) {
    for (AttendTask& task : tasks) task.out = round.emplace_back(fixture, problem).view();
    fixture.stages().attend(tasks, problem.shape(), fixture.stream.get());
  }
  fixture.wait();
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    CAPTURE(i, lengths[i]);
    REQUIRE(outs[0][i].same_bits(outs[1][i]));
    if (i % 16 < 9) {
      require_close(outs[0][i], reference::attend(problem, attended(0, lengths[i])), device_tolerance(problem));
    }
  }
}

TEST_CASE("device attend: tasks so long and so many that each warp has many units of one", "[gpu]") {
  constexpr std::uint32_t kTokens = 1'205;
  const auto dtype = GENERATE(DType::bf16, DType::f16);
  const auto head_dim = GENERATE(64u, 96u, 128u, 192u, 256u);
  const auto group = GENERATE(4u, 20u);
  CAPTURE(to_string(dtype), head_dim, group);
  AttendFixture fixture;
  const Problem problem({.dtype = dtype, .tokens = kTokens, .head_dim = head_dim, .group = group});
  const auto runs = runs_over(kTokens, 16);
  const auto all = all_tokens(kTokens);
  std::vector<std::uint32_t> members;
  std::vector<Attended> pairs;
  for (const std::uint32_t token : all) {
    members.push_back(token % 7 == 0 ? 1u : 0xffff'ffffu << token % 3);
    pairs.push_back({.token = token, .members = members.back()});
  }
  const AttendTask base = attend_task(fixture, problem, SharedPartial(fixture, problem));
  std::vector<SharedPartial> outs;
  std::vector<AttendTask> tasks(260, base);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    if (i % 2 == 0) {
      tasks[i].runs = runs;
    } else {
      tasks[i].tokens = all;
      tasks[i].members = members;
    }
    tasks[i].out = outs.emplace_back(fixture, problem).view();
  }
  fixture.stages().attend(tasks, problem.shape(), fixture.stream.get());
  fixture.wait();
  const Attention by_runs = reference::attend(problem, attended(0, kTokens));
  const Attention by_members = reference::attend(problem, pairs);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    CAPTURE(i);
    require_close(outs[i], i % 2 == 0 ? by_runs : by_members, device_tolerance(problem));
  }
}

TEST_CASE("device attend: 100,000 tokens, in device memory too", "[gpu]") {
  AttendFixture fixture;
  const Problem problem({.tokens = 100'000, .head_dim = 128, .group = 4, .page_tokens = 32});
  const SharedPartial pinned(fixture, problem);
  const SharedPartial device(fixture, problem);
  const SharedPartial tokens(fixture, problem);
  std::vector<AttendTask> tasks(3, attend_task(fixture, problem, pinned));
  const auto runs = runs_over(100'000, 32);
  const auto all = all_tokens(100'000);
  const std::uint64_t bytes = (std::uint64_t{*std::max_element(problem.frames().begin(), problem.frames().end())} + 1) *
                              tasks[0].kv.layout.page_bytes();
  const std::unique_ptr<Buffer> near = fixture.device->allocate(bytes);
  const Copy copy{.to = near->data(), .from = tasks[0].kv.base, .bytes = bytes};
  fixture.stream->copy({&copy, 1});
  tasks[0].runs = runs;
  tasks[1].runs = runs;
  tasks[1].kv.base = near->data();
  tasks[1].out = device.view();
  tasks[2].tokens = all;
  tasks[2].kv.base = near->data();
  tasks[2].out = tokens.view();
  fixture.stages().attend(tasks, problem.shape(), fixture.stream.get());
  fixture.wait();
  const Attention whole = reference::attend(problem, attended(0, 100'000));
  require_close(pinned, whole, device_tolerance(problem));
  require_close(device, whole, device_tolerance(problem));
  require_close(tokens, whole, device_tolerance(problem));
}

}  // namespace sluice::test
