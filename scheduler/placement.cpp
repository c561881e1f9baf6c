#include "scheduler/placement.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "sluice/error.hpp"

namespace sluice {

PlacementMode parse_placement(std::string_view text) {
  constexpr PlacementMode kModes[] = {PlacementMode::hybrid, PlacementMode::stream, PlacementMode::near,
                                      PlacementMode::automatic};
  std::string known;
  for (const PlacementMode mode : kModes) {
    if (text == to_string(mode)) return mode;
    known += known.empty() ? "" : ", ";
    known += to_string(mode);
  }
  throw Error(Errc::invalid_argument, "unknown placement \"" + std::string(text) + "\"; there are " + known);
}

}  // namespace sluice

namespace sluice::scheduler {
namespace {

/// One page of a selection and what the CPU would spend on its rows.
struct PageWork {
  std::uint32_t page = 0;
  std::uint32_t rows = 0;
  double far_us = 0.0;
};

constexpr double kBytesPerUsPerGbps = 1e3;  // 1 GB/s = 1e9 byte/s = 1e3 byte/us

/// Pages of a selection, ascending, runs and tokens of one page together.
std::vector<PageWork> pages_of(const SelectionRow& selection, const PageLayout& layout, const CostRates& rates) {
  const auto row_bytes = static_cast<double>(layout.row_bytes());
  const double run_row_us = 2 * row_bytes / (rates.far_runs_gbps * kBytesPerUsPerGbps);
  // Tokens that bring their scores are attended without reading K again.
  const double token_bytes = selection.scores.empty() ? 2 * row_bytes : row_bytes;
  const double token_us = token_bytes / (rates.far_tokens_gbps * kBytesPerUsPerGbps);

  std::vector<PageWork> pages;
  std::size_t run = 0;
  std::size_t token = 0;
  while (run < selection.runs.size() || token < selection.tokens.size()) {
    const std::uint32_t run_page = run < selection.runs.size() ? selection.runs[run].page : kNone;
    const std::uint32_t token_page =
        token < selection.tokens.size() ? selection.tokens[token] / layout.page_tokens : kNone;
    PageWork work{.page = std::min(run_page, token_page)};
    if (run_page == work.page) {
      work.rows += selection.runs[run].tokens();
      work.far_us += selection.runs[run].tokens() * run_row_us;
      ++run;
    }
    for (; token < selection.tokens.size() && selection.tokens[token] / layout.page_tokens == work.page; ++token) {
      ++work.rows;
      work.far_us += token_us;
    }
    pages.push_back(work);
  }
  return pages;
}

/// How many of `pages`, densest first, go to the link. The link's time only rises with each page and the far
/// lane's only falls, so the first page that does not lower the larger of the two ends the search.
std::size_t balanced_fetches(const std::vector<PageWork>& pages, const PageLayout& layout, const CostRates& rates,
                             std::uint32_t busy_heads) {
  const double heads = std::max(busy_heads, 1u);
  const auto page_bytes = static_cast<double>(layout.page_bytes());
  const double link_page_us = page_bytes * heads / (rates.link_gbps * kBytesPerUsPerGbps);
  const double near_row_us =
      2 * static_cast<double>(layout.row_bytes()) * heads / (rates.near_gbps * kBytesPerUsPerGbps);
  double far_us = 0.0;
  for (const PageWork& page : pages) far_us += page.far_us * heads;

  double link_us = rates.link_latency_us;
  double step_us = far_us;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    link_us += link_page_us + pages[i].rows * near_row_us;
    far_us -= pages[i].far_us * heads;
    const double next_us = std::max(link_us, far_us);
    if (next_us >= step_us) return i;
    step_us = next_us;
  }
  return pages.size();
}

/// Copies the rows of `selection` to one of the two sides; `fetched` is ascending.
void split(const SelectionRow& selection, std::uint32_t group, std::uint32_t page_tokens,
           const std::vector<std::uint32_t>& fetched, Placement& out) {
  const auto side = [&](std::uint32_t page, std::size_t& at) -> SelectionRow& {
    while (at < fetched.size() && fetched[at] < page) ++at;
    return at < fetched.size() && fetched[at] == page ? out.fetch : out.far;
  };
  std::size_t at = 0;
  for (const PageRun& run : selection.runs) side(run.page, at).runs.push_back(run);
  at = 0;
  for (std::size_t i = 0; i < selection.tokens.size(); ++i) {
    SelectionRow& to = side(selection.tokens[i] / page_tokens, at);
    to.tokens.push_back(selection.tokens[i]);
    if (!selection.members.empty()) to.members.push_back(selection.members[i]);
    if (selection.scores.empty()) continue;
    const auto scores = selection.scores.begin() + static_cast<std::ptrdiff_t>(i * group);
    to.scores.insert(to.scores.end(), scores, scores + group);
  }
}

}  // namespace

void place(const SelectionRow& selection, std::uint32_t group, const PageLayout& layout, PlacementMode mode,
           const CostRates& rates, std::uint32_t busy_heads, std::uint32_t max_fetch_pages, Placement& out) {
  out.far.clear();
  out.fetch.clear();
  const bool may_fetch = mode == PlacementMode::stream || mode == PlacementMode::automatic;
  if (!may_fetch || max_fetch_pages == 0) {
    out.far = selection;
    return;
  }
  std::vector<PageWork> pages = pages_of(selection, layout, rates);
  std::stable_sort(pages.begin(), pages.end(), [](const PageWork& a, const PageWork& b) { return a.rows > b.rows; });
  pages.resize(std::min<std::size_t>(
      mode == PlacementMode::stream ? pages.size() : balanced_fetches(pages, layout, rates, busy_heads),
      max_fetch_pages));

  std::vector<std::uint32_t> fetched;
  fetched.reserve(pages.size());
  for (const PageWork& page : pages) fetched.push_back(page.page);
  std::sort(fetched.begin(), fetched.end());
  split(selection, group, layout.page_tokens, fetched, out);
}

}  // namespace sluice::scheduler
