#include "scheduler/policy/page_order.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "scheduler/policy/scored_set.hpp"

namespace sluice::scheduler {
namespace {

constexpr std::uint32_t kPageBits = 32;

constexpr std::uint32_t page_of(std::uint64_t key) noexcept { return static_cast<std::uint32_t>(key); }

}  // namespace

PageRun far_part(const NearSet& near, std::uint32_t page, std::uint32_t tokens) noexcept {
  PageRun run{.page = page};
  const std::uint32_t first = page * near.page_tokens;
  const std::uint32_t from = std::max(first, near.sink_end);
  const std::uint32_t to = std::min({first + near.page_tokens, near.recent_begin, tokens});
  if (from >= to) return run;
  run.begin = static_cast<std::uint16_t>(from - first);
  run.end = static_cast<std::uint16_t>(to - first);
  return run;
}

void PageOrder::rank(std::span<const float> scores, std::uint32_t group, const NearSet& near, std::uint32_t tokens,
                     std::uint32_t likely) {
  scores_ = scores;
  pages_ = scores.size() / group;
  group_ = group;
  sorted_ = false;
  near_ = near;
  tokens_ = tokens;
  sums_.assign(pages_, 0.f);  // They order like the means.
  for (std::uint32_t h = 0; h < group; ++h) {
    const float* const row = scores.data() + h * pages_;
    for (std::size_t page = 0; page < pages_; ++page) sums_[page] += row[page];
  }
  heap_.clear();
  for (std::uint32_t page = 0; page < pages_; ++page) {
    if (far_part(near, page, tokens).tokens() == 0) continue;
    heap_.push_back(std::uint64_t{candidate_key(sums_[page])} << kPageBits | page);
  }
  const auto first = heap_.end() - static_cast<std::ptrdiff_t>(std::min<std::size_t>(likely, heap_.size()));
  std::nth_element(heap_.begin(), first, heap_.end());
  first_.assign(first, heap_.end());
  std::sort(first_.begin(), first_.end());
  heap_.erase(first, heap_.end());
  std::make_heap(heap_.begin(), heap_.end());
}

std::uint64_t PageOrder::pop() {
  std::vector<std::uint64_t>& from = first_.empty() ? heap_ : first_;
  if (first_.empty() && !sorted_) std::pop_heap(heap_.begin(), heap_.end());
  const std::uint64_t key = from.back();
  from.pop_back();
  return key;
}

std::uint32_t PageOrder::take(std::uint32_t count, std::vector<PageRun>& runs) {
  const auto begin = static_cast<std::ptrdiff_t>(runs.size());
  for (; count != 0 && left() != 0; --count) runs.push_back(far_part(near_, page_of(pop()), tokens_));
  const auto whole = [&](const PageRun& run) { return run.tokens() == near_.page_tokens; };
  std::sort(runs.begin() + begin, runs.end(),
            [&](const PageRun& a, const PageRun& b) { return whole(a) != whole(b) ? whole(a) : a.page < b.page; });
  return static_cast<std::uint32_t>(std::count_if(runs.begin() + begin, runs.end(), whole));
}

std::span<const float> PageOrder::bounds(const AttentionShape& shape) {
  if (!sorted_) {
    std::sort(heap_.begin(), heap_.end());
    heap_.insert(heap_.end(), first_.begin(), first_.end());
    first_.clear();
    sorted_ = true;
    bounds_.resize((heap_.size() + 1) * group_);
    for (std::uint32_t h = 0; h < group_; ++h) bound_head(h, shape);
  }
  return std::span<const float>(bounds_).subspan(heap_.size() * group_, group_);
}

void PageOrder::bound_head(std::uint32_t head, const AttentionShape& shape) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float* const scores = scores_.data() + head * pages_;
  double top = -kInfinity;
  double sum = 0.0;  // relative to `top`
  bool infinite = false;
  bounds_[head] = -kInfinity;
  const auto scale = static_cast<double>(shape.score_scale());
  for (std::size_t i = 0; i < heap_.size(); ++i) {
    const double score = shape.capped(scores[page_of(heap_[i])] * scale);
    infinite = infinite || std::isnan(score) || score == kInfinity;
    if (std::isfinite(score)) {
      sum = score > top ? sum * std::exp(top - score) + 1.0 : sum + std::exp(score - top);
      top = std::max(top, score);
    }
    const double log = sum > 0.0 ? top + std::log(sum * near_.page_tokens) : -kInfinity;
    bounds_[(i + 1) * group_ + head] = infinite ? kInfinity : static_cast<float>(log);
  }
}

}  // namespace sluice::scheduler
