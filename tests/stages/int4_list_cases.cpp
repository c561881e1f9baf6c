// Estimates from copies, in codes, of listed pages, on any device.

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/int4_support.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

namespace sluice::test {

using namespace int4_copies;

TEST_CASE("with lists every head has its own pages, and the tail is minus infinity", "[stages][int4]") {
  const std::uint32_t bits = GENERATE(4u, 3u);
  const auto [head_dim, group, page_tokens, listed] =
      GENERATE(grid(std::array{64u, 96u, 128u, 192u, 256u}, std::array{1u, 4u, 7u, 32u}, std::array{8u, 16u, 40u},
                    std::array{1u, 5u, 29u}));
  CAPTURE(bits, head_dim, group, page_tokens, listed);
  const auto under_test = stages_under_test();
  const std::uint32_t pages = 30;
  const std::uint32_t tokens = pages * page_tokens - 5;  // The last page is open.
  const Problem problem({.tokens = tokens, .head_dim = head_dim, .group = group, .page_tokens = page_tokens});
  const Placed placed = place(*under_test, problem);
  const Copies copies(*under_test, problem, placed, bits);
  const auto lists = under_test->array<std::uint32_t>(std::size_t{group} * listed);
  Random random(listed + group);
  for (std::uint32_t head = 0; head < group; ++head) {  // Ascending; every other head has the open page.
    const std::uint32_t room = pages - listed;
    std::uint32_t page = head % 2 == 0 ? room : 0;
    for (std::uint32_t i = 0; i < listed; ++i) {
      lists[head * listed + i] = page + i;
      if (head % 2 == 1 && i + page + 1 < room + i) page += random.below(2);
    }
  }
  const std::size_t row = std::size_t{listed} * page_tokens;
  const auto out = under_test->array(group * row + 1, kUntouched);
  std::vector<ScoreInt4Task> tasks(1, {.q = placed.q,
                                       .copies = copies.data.data(),
                                       .mean = copies.mean.data(),
                                       .frames = placed.device_frames,
                                       .tokens = tokens,
                                       .lists = lists.data(),
                                       .listed = listed,
                                       .bits = bits,
                                       .out = out.data()});
  under_test->stages().score_int4(tasks, problem.shape(), problem.layout(), under_test->stream());
  under_test->finish();
  REQUIRE(out.back() == kUntouched);
  for (std::uint32_t head = 0; head < group; ++head) {
    for (std::uint32_t i = 0; i < row; ++i) {
      const std::uint32_t token = lists[head * listed + i / page_tokens] * page_tokens + i % page_tokens;
      const float got = out[head * row + i];
      const bool is_tail = token >= tokens;
      if (is_tail ? got == -kInf : close(got, copies.estimate(problem, token, head))) continue;
      CAPTURE(head, i, token, got);
      FAIL((is_tail ? "the tail counts" : "not the product with the copy"));
    }
  }
}

TEST_CASE("lists of pages without visible tokens are minus infinity, and no copy is read", "[stages][int4]") {
  const auto group = GENERATE(1u, 7u);
  CAPTURE(group);
  constexpr std::uint32_t kListed = 5;
  constexpr std::uint32_t kPageTokens = 16;
  const auto under_test = stages_under_test();
  const Problem problem({.tokens = kPageTokens, .head_dim = 64, .group = group, .page_tokens = kPageTokens});
  const Placed placed = place(*under_test, problem);
  const auto lists = under_test->array<std::uint32_t>(std::size_t{group} * kListed);
  std::ranges::fill(lists, 0u);
  const std::size_t row = std::size_t{kListed} * kPageTokens;
  const auto out = under_test->array(group * row + 1, kUntouched);
  const std::vector<ScoreInt4Task> tasks(
      1, {.q = placed.q, .frames = placed.device_frames, .lists = lists.data(), .listed = kListed, .out = out.data()});
  under_test->stages().score_int4(tasks, problem.shape(), problem.layout(), under_test->stream());
  under_test->finish();
  REQUIRE(out.back() == kUntouched);
  REQUIRE(std::ranges::all_of(out.first(group * row), [](float score) { return score == -kInf; }));
}

TEST_CASE("with lists, what is attended anyway has one place, listed or not", "[stages][int4]") {
  struct Window {
    std::uint32_t sinks, recent;  ///< `recent` of the tokens are recent
  };
  constexpr auto kWindows =
      std::to_array<Window>({{0, 0}, {4, 0}, {0, 5}, {9, 130}, {40, 80}, {300, 0}, {150, 83}, {3, 230}, {0, 10'000}});
  const auto [head_dim, group, page_tokens, listed, window] =
      GENERATE_COPY(grid(std::array{64u, 96u, 128u, 256u}, std::array{1u, 4u, 32u}, std::array{8u, 16u, 40u},
                         std::array{1u, 7u, 29u}, kWindows));
  const std::uint32_t pages = 29, tokens = pages * page_tokens;
  CAPTURE(head_dim, group, page_tokens, listed, window.sinks, window.recent);
  const auto under_test = stages_under_test();
  const Problem problem({.tokens = tokens + 3, .head_dim = head_dim, .group = group, .page_tokens = page_tokens});
  const Placed placed = place(*under_test, problem);
  const Copies copies(*under_test, problem, placed);
  const std::uint32_t recent = tokens - std::min(window.recent, tokens);
  const std::uint32_t sinks = std::min(window.sinks, recent);
  const auto lists = under_test->array<std::uint32_t>(std::size_t{group} * listed);
  for (std::uint32_t head = 0; head < group; ++head) {  // Ascending, from the first page on or up to the last.
    for (std::uint32_t i = 0; i < listed; ++i) {
      lists[head * listed + i] = head % 2 == 0 ? i : pages - listed + i;
    }
  }
  ScoreInt4Task task{.q = placed.q,
                     .copies = copies.data.data(),
                     .mean = copies.mean.data(),
                     .frames = placed.device_frames,
                     .tokens = tokens,
                     .lists = lists.data(),
                     .listed = listed,
                     .sinks = sinks,
                     .recent = recent,
                     .tail = placed.kv.page(pages),
                     .tail_rows = 3};
  const std::size_t row = task.row(page_tokens);
  const auto out = under_test->array(group * row + 1, kUntouched);
  task.out = out.data();
  under_test->stages().score_int4({&task, 1}, problem.shape(), problem.layout(), under_test->stream());
  under_test->finish();
  REQUIRE(out.back() == kUntouched);
  for (std::uint32_t head = 0; head < group; ++head) {
    std::vector<std::uint32_t> row_pages(lists.begin() + head * listed, lists.begin() + (head + 1) * listed);
    for (std::uint32_t page = 0; page * page_tokens < sinks; ++page) row_pages.push_back(page);
    const std::size_t before_recent = row_pages.size();
    for (std::uint32_t page = recent / page_tokens; recent < tokens && page < pages; ++page) row_pages.push_back(page);
    REQUIRE(row == row_pages.size() * page_tokens + 3);
    std::vector<std::uint32_t> places(tokens);
    for (std::uint32_t i = 0; i < row; ++i) {
      const float got = out[head * row + i];
      CAPTURE(head, i, got);
      const std::size_t at = i / page_tokens;
      if (at >= row_pages.size()) {
        if (!close(got, exact(problem, tokens + i % page_tokens, head))) FAIL("not the product with the key");
        continue;
      }
      const std::uint32_t token = row_pages[at] * page_tokens + i % page_tokens;
      const bool is_sink = token < sinks, is_recent = token >= recent;
      const bool there = at < listed ? !is_sink && !is_recent : at < before_recent ? is_sink : is_recent;
      places[token] += there ? 1 : 0;
      if (there ? close(got, copies.estimate(problem, token, head)) : got == -kInf) continue;
      FAIL((there ? "not the product with the copy" : "a token counts twice"));
    }
    for (std::uint32_t token = 0; token < tokens; ++token) {
      if (token < sinks || token >= recent) REQUIRE(places[token] == 1);
    }
  }
}

}  // namespace sluice::test
