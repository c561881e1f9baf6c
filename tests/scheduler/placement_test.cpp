#include "scheduler/placement.hpp"

#include <algorithm>
#include <random>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;

namespace {

constexpr std::uint32_t kGroup = 2;
constexpr PageLayout kLayout{.page_tokens = 32, .head_dim = 64, .dtype = DType::bf16};

/// Runs on even pages, tokens on odd pages and on the rest of some run pages; ever denser with the page number.
SelectionRow mixed(std::uint32_t pages, std::uint32_t seed) {
  std::mt19937 rng(seed);
  SelectionRow row;
  for (std::uint32_t page = 0; page < pages; ++page) {
    if (page % 2 == 0) row.runs.push_back({.page = page, .begin = 0, .end = 16});
    for (std::uint32_t r = page % 4 == 2 ? 32 : 16; r < 32; ++r) {
      if (rng() % pages > page) continue;
      row.tokens.push_back(page * 32 + r);
      row.members.push_back(1 + static_cast<std::uint32_t>(rng() % 3));
      row.scores.push_back(static_cast<float>(page));
      row.scores.push_back(static_cast<float>(r));
    }
  }
  return row;
}

struct Limits {
  std::uint32_t busy_heads = 1;
  std::uint32_t max_fetch_pages = 1u << 20;
};

Placement placed(const SelectionRow& row, PlacementMode mode, const CostRates& rates = {}, Limits limits = {}) {
  Placement out;
  out.far.tokens = {1, 2, 3};  // Stale from another row.
  out.fetch.runs = {{.page = 9, .begin = 0, .end = 1}};
  place(row, kGroup, kLayout, mode, rates, limits.busy_heads, limits.max_fetch_pages, out);
  return out;
}

std::vector<std::uint32_t> pages_of(const SelectionRow& row) {
  std::vector<std::uint32_t> pages;
  for (const PageRun& run : row.runs) pages.push_back(run.page);
  for (const std::uint32_t token : row.tokens) pages.push_back(token / 32);
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  return pages;
}

std::uint64_t rows_on(const SelectionRow& row, std::uint32_t page) {
  std::uint64_t rows = 0;
  for (const PageRun& run : row.runs) rows += run.page == page ? run.tokens() : 0;
  for (const std::uint32_t token : row.tokens) rows += token / 32 == page;
  return rows;
}

/// Disjoint by page, together the selection, order kept, each token with its own members and scores.
void check_split(const SelectionRow& row, const Placement& out) {
  const auto far = pages_of(out.far), fetch = pages_of(out.fetch);
  std::vector<std::uint32_t> both;
  std::set_intersection(far.begin(), far.end(), fetch.begin(), fetch.end(), std::back_inserter(both));
  REQUIRE(both.empty());
  REQUIRE(out.far.attended() + out.fetch.attended() == row.attended());
  for (const SelectionRow* part : {&out.far, &out.fetch}) {
    REQUIRE(std::is_sorted(part->tokens.begin(), part->tokens.end()));
    REQUIRE(part->members.size() == (row.members.empty() ? 0 : part->tokens.size()));
    REQUIRE(part->scores.size() == (row.scores.empty() ? 0 : part->tokens.size() * kGroup));
    for (const PageRun& run : part->runs) REQUIRE(std::count(row.runs.begin(), row.runs.end(), run) == 1);
    for (std::size_t i = 0; i < part->tokens.size(); ++i) {
      const auto at = std::lower_bound(row.tokens.begin(), row.tokens.end(), part->tokens[i]) - row.tokens.begin();
      REQUIRE(row.tokens[at] == part->tokens[i]);
      if (!row.members.empty()) REQUIRE(part->members[i] == row.members[at]);
      for (std::uint32_t h = 0; h < kGroup && !row.scores.empty(); ++h) {
        REQUIRE(part->scores[i * kGroup + h] == row.scores[at * kGroup + h]);
      }
    }
  }
}

}  // namespace

TEST_CASE("placement names are read back, others are refused with the list", "[placement]") {
  for (const auto mode :
       {PlacementMode::hybrid, PlacementMode::stream, PlacementMode::near, PlacementMode::automatic}) {
    REQUIRE(parse_placement(to_string(mode)) == mode);
  }
  REQUIRE_THROWS_WITH(parse_placement("far"), "unknown placement \"far\"; there are hybrid, stream, near, auto");
}

TEST_CASE("any placement is a split of the selection", "[placement]") {
  const auto mode =
      GENERATE(PlacementMode::hybrid, PlacementMode::stream, PlacementMode::near, PlacementMode::automatic);
  const std::uint32_t pages = GENERATE(0u, 1u, 2u, 50u);
  const std::uint32_t cap = GENERATE(0u, 1u, 7u, 1000u);
  CAPTURE(to_string(mode), pages, cap);
  SelectionRow row = mixed(pages, 3);
  SECTION("with members and scores") {}
  SECTION("united, without scores") {
    row.members.clear();
    row.scores.clear();
  }
  SECTION("runs only") {
    const auto runs = row.runs;
    row.clear();
    row.runs = runs;
  }
  const Placement out = placed(row, mode, {.link_latency_us = 0.01}, {.busy_heads = 8, .max_fetch_pages = cap});
  check_split(row, out);
  const auto fetched = pages_of(out.fetch);
  REQUIRE(fetched.size() <= cap);
  if (mode == PlacementMode::hybrid || mode == PlacementMode::near) REQUIRE(fetched.empty());
  if (mode == PlacementMode::stream) REQUIRE(fetched.size() == std::min<std::size_t>(cap, pages_of(row).size()));
  // Densest first: no page that stayed far has more rows than one that was fetched.
  for (const std::uint32_t far : pages_of(out.far)) {
    for (const std::uint32_t page : fetched) REQUIRE(rows_on(row, far) <= rows_on(row, page));
  }
}

TEST_CASE("automatic placement fetches when the link is the faster lane, and only then", "[placement]") {
  const SelectionRow row = mixed(50, 1);
  const auto fetched = [&](const CostRates& rates, Limits limits = {}) {
    return pages_of(placed(row, PlacementMode::automatic, rates, limits).fetch).size();
  };
  REQUIRE(fetched({.link_latency_us = 1e6}) == 0);
  REQUIRE(fetched({.link_gbps = 1e-3}) == 0);
  REQUIRE(fetched({.far_runs_gbps = 1e-6,
                   .far_tokens_gbps = 1e-6,
                   .link_gbps = 1e3,
                   .link_latency_us = 0.0,
                   .near_gbps = 1e3}) == pages_of(row).size());
  // Comparable lanes share the work; a faster link takes more of it.
  const auto some = fetched({.link_gbps = 50, .link_latency_us = 1.0, .near_gbps = 500});
  const auto more = fetched({.link_gbps = 100, .link_latency_us = 1.0, .near_gbps = 500});
  REQUIRE(some > 0);
  REQUIRE(some < more);
  REQUIRE(more < pages_of(row).size());
  // Busy lanes make the fixed latency matter less.
  REQUIRE(fetched({.link_latency_us = 50.0}, {.busy_heads = 1}) == 0);
  REQUIRE(fetched({.link_latency_us = 50.0}, {.busy_heads = 256}) > 0);
}
