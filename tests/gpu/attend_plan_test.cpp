#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "sluice/units.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/reference.hpp"
#include "tools/stages/attend_plan.hpp"

namespace sluice::test {
namespace {

/// Appends the K rows of a slice.
void list_rows(const gpu::AttendSlice& slice, std::vector<std::uint32_t>& rows) {
  const std::uint32_t* const pages = slice.lists + slice.first_page;
  for (std::uint32_t octet = slice.octet_skip; octet < slice.octet_skip + slice.page_octets; ++octet) {
    REQUIRE(octet >> slice.octet_shift < slice.pages);
    const std::uint32_t first = pages[octet >> slice.octet_shift] + octet % (1u << slice.octet_shift) * 8;
    for (std::uint32_t row = first; row < first + 8; ++row) rows.push_back(row);
  }
  const std::uint32_t* piece = slice.lists + slice.first_piece;
  for (std::uint32_t p = 0; p < slice.pieces; ++p, piece += 2) {
    for (std::uint32_t row = piece[0]; row < piece[0] + piece[1]; ++row) rows.push_back(row);
  }
  const std::uint32_t* const tokens = slice.lists + slice.first_token;
  rows.insert(rows.end(), tokens, tokens + slice.tokens);
}

}  // namespace

TEST_CASE("attend plan: every row of every task once, in launches that fill the device", "[gpu]") {
  struct Case {
    std::uint32_t tasks, tokens, page_tokens, groups, least_slices;
  };
  // 264 blocks at once, as on a machine of 132 multiprocessors.
  const auto c = GENERATE(Case{8, 131'072, 16, 1, 250}, Case{8, 524'288, 16, 2, 500}, Case{8, 4'096, 16, 1, 100},
                          Case{1, 100'000, 24, 1, 250}, Case{3, 5'000, 8, 1, 50}, Case{1'500, 50, 32, 2, 1'500});
  CAPTURE(c.tasks, c.tokens, c.page_tokens);
  const AttentionShape shape{.layers = 1, .q_heads = 4, .kv_heads = 1, .head_dim = 128};
  const PageLayout layout{.page_tokens = c.page_tokens, .head_dim = 128};
  std::vector<std::uint32_t> frames(div_up(c.tokens, c.page_tokens) + 1);
  std::iota(frames.rbegin(), frames.rend(), 5u);
  std::vector<PageRun> runs = runs_over(c.tokens, c.page_tokens);
  runs[0].begin = 3;
  const std::vector<std::uint32_t> tokens{0, 2, c.tokens + 1};
  std::vector<AttendTask> tasks(c.tasks);
  for (AttendTask& task : tasks) {
    task.kv = {.base = nullptr, .frames = frames.data(), .layout = layout};
    task.runs = runs;
    task.tokens = tokens;
  }
  tools::AttendPlan plan;
  plan.build(tasks, shape, gpu::attend_variant(shape, layout, false), 264, 1 * MiB);
  REQUIRE(plan.group_ends().size() == c.groups);
  REQUIRE(plan.group_ends().back() == c.tasks);
  std::uint32_t slices = 0;
  for (const tools::AttendPlan::Task& task : plan.tasks()) slices += task.slices;
  REQUIRE(slices >= c.least_slices);
  REQUIRE(slices <= std::max(264u * c.groups, c.tasks));

  const tools::AttendPlan::Task& task = plan.tasks().back();
  gpu::AttendJob job = plan.job(task);
  std::vector<std::uint32_t> words(job.words());
  plan.write_words(task, words.data());
  job.lists = words.data();
  std::vector<std::uint32_t> rows;
  std::uint32_t shortest = job.units();
  std::uint32_t longest = 0;
  for (std::uint32_t i = 0; i < task.slices; ++i) {
    const gpu::AttendSlice slice = gpu::cut(job, i);
    REQUIRE(slice.words() <= gpu::kAttend.stage_words);
    shortest = std::min(shortest, slice.units());
    longest = std::max(longest, slice.units());
    list_rows(slice, rows);
  }
  REQUIRE(longest <= shortest + 1);
  std::vector<std::uint32_t> expected;
  const auto row_of = [&](std::uint32_t token) {
    return frames[token / c.page_tokens] * 2 * c.page_tokens + token % c.page_tokens;
  };
  for (std::uint32_t token = 0; token < c.tokens; ++token) {
    if (token != 1) expected.push_back(row_of(token));
  }
  expected.push_back(row_of(c.tokens + 1));
  std::sort(rows.begin(), rows.end());
  std::sort(expected.begin(), expected.end());
  REQUIRE(rows == expected);
}

TEST_CASE("attend plan: tasks of many lengths are shared out, every row to one block", "[gpu]") {
  const AttentionShape shape{.layers = 1, .q_heads = 4, .kv_heads = 1, .head_dim = 128};
  const PageLayout layout{.page_tokens = 16, .head_dim = 128};
  // From 100 tokens to 100,000; none; what is less than a unit.
  std::vector<std::uint32_t> lengths;
  for (std::uint32_t i = 0; i < 100; ++i) lengths.push_back(100 + i * i * 10);
  lengths[3] = 0;
  lengths[99] = 5;
  std::vector<std::uint32_t> frames(10'000);
  std::iota(frames.begin(), frames.end(), 0u);
  std::vector<std::vector<PageRun>> runs;
  std::vector<AttendTask> tasks(lengths.size());
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    runs.push_back(runs_over(lengths[i], 16));
    tasks[i].kv = {.base = nullptr, .frames = frames.data(), .layout = layout};
  }
  for (std::size_t i = 0; i < tasks.size(); ++i) tasks[i].runs = runs[i];
  gpu::AttendVariant variant = gpu::attend_variant(shape, layout, false);
  tools::AttendPlan plan;
  plan.build(tasks, shape, variant, 264, 1 * MiB);
  REQUIRE(plan.group_shares().front() == 0);  // Other kernels know of no shares.
  variant.ring = true;
  plan.build(tasks, shape, variant, 264, 1 * MiB);
  REQUIRE(plan.group_shares().size() == 1);
  const std::uint32_t share = plan.group_shares().front();
  REQUIRE(share != 0);
  std::vector<std::uint32_t> of_block(264, 0);
  std::uint32_t next_unit = 0;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    CAPTURE(i, lengths[i]);
    const tools::AttendPlan::Task& task = plan.tasks()[i];
    gpu::AttendJob job = plan.job(task);
    std::vector<std::uint32_t> words(job.words());
    plan.write_words(task, words.data());
    job.lists = words.data();
    job.first_unit = next_unit;
    job.first_slice = job.first_unit / share;
    job.slices = (job.end_unit() - 1) / share + 1 - job.first_slice;
    next_unit = job.next_unit();
    REQUIRE(job.slices <= task.slices);
    std::vector<std::uint32_t> rows;
    for (std::uint32_t index = 0; index < job.slices; ++index) {
      const gpu::AttendSlice slice = gpu::cut_share(job, job.first_slice + index, share);
      REQUIRE(slice.index == index);
      REQUIRE((slice.units() > 0 || lengths[i] == 0));
      REQUIRE(slice.words() <= gpu::kAttend.ring_words);
      of_block.at(job.first_slice + index) += slice.units();
      list_rows(slice, rows);
    }
    std::vector<std::uint32_t> expected;
    for (std::uint32_t token = 0; token < lengths[i]; ++token) expected.push_back(token / 16 * 32 + token % 16);
    std::sort(rows.begin(), rows.end());
    REQUIRE(rows == expected);
  }
  const auto [fewest, most] = std::ranges::minmax(of_block);
  REQUIRE(fewest > 0);
  REQUIRE(most == share);
  // Of one length and in numbers that fit, they have slices.
  tasks.resize(64, tasks[50]);
  std::fill(tasks.begin(), tasks.end(), tasks[50]);
  plan.build(tasks, shape, variant, 264, 1 * MiB);
  REQUIRE(plan.group_shares().front() == 0);
}

}  // namespace sluice::test
