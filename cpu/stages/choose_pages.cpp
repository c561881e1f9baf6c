// The choice of pages by a progressive share (PSA, arXiv 2503.00392, algorithm 1): masses of pages in float64, and what
// they come to as policies of the CPU have it.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "cpu/stages/shapes.hpp"
#include "cpu/stages/sharing.hpp"
#include "cpu/stages/stages.hpp"
#include "sluice/step/order_key.hpp"
#include "sluice/step/progress.hpp"

namespace sluice::cpu {
namespace {

/// Tokens [begin, end) of a query head.
struct TokenRange {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  [[nodiscard]] std::uint32_t size() const noexcept { return end - begin; }
};

/// One task.
class PageChoice {
 public:
  PageChoice(const ChoosePagesTask& task, const AttentionShape& shape, std::uint32_t page_tokens)
      : task_(task), shape_(shape), group_(shape.group()), page_tokens_(page_tokens) {}

  void run() {
    rank();
    const std::uint32_t taken = walk();
    mark(taken);
    if (task_.count != nullptr) *task_.count = taken;
  }

 private:
  /// What of a page is not attended anyway.
  [[nodiscard]] TokenRange far_of(std::uint32_t page) const noexcept {
    const std::uint32_t first = page * page_tokens_;
    const std::uint32_t begin = std::max(first, task_.sinks);
    return {.begin = begin, .end = std::max(begin, std::min(first + page_tokens_, task_.recent))};
  }

  void rank() {
    std::vector<std::uint32_t> keys(task_.pages);
    for (std::uint32_t page = 0; page < task_.pages; ++page) {
      float sum = 0.f;
      for (std::uint32_t h = 0; h < group_; ++h) sum += task_.page_scores[std::uint64_t{h} * task_.pages + page];
      keys[page] = order_key(sum);
    }
    for (std::uint32_t page = task_.pages; page-- > 0;) {
      if (far_of(page).size() != 0) order_.push_back(page);
    }
    std::ranges::stable_sort(order_, [&](std::uint32_t a, std::uint32_t b) { return keys[a] > keys[b]; });
  }

  /// Natural logarithm of what some tokens of a query head weigh.
  template <class Visit>
  [[nodiscard]] float mass(std::uint32_t h, const Visit& for_each_token) const {
    const float* const scores = task_.scores + std::uint64_t{h} * task_.tokens;
    const auto value = [&](std::uint32_t token) {  // -infinity weighs nothing; capped it would be a number.
      return shape_.softcap != 0.f && scores[token] != kEmptyLse ? shape_.capped(scores[token]) : scores[token];
    };
    float top = kEmptyLse;
    for_each_token([&](std::uint32_t token) { top = value(token) > top ? value(token) : top; });  // Not if NaN.
    if (std::isinf(top)) return top;
    double sum = 0.0;
    for_each_token([&](std::uint32_t token) {
      const double below = static_cast<double>(value(token)) - static_cast<double>(top);
      sum += std::isnan(below) ? 0.0 : std::exp(below);
    });
    return static_cast<float>(static_cast<double>(top) + std::log(sum));
  }

  void begin_walk() {
    for (std::uint32_t h = 0; h < group_; ++h) {
      add_mass(states_[h], mass(h, [&](const auto& visit) {
                 for (std::uint32_t token = 0; token < task_.sinks; ++token) visit(token);
                 for (std::uint32_t token = task_.recent; token < task_.tokens; ++token) visit(token);
               }));
    }
  }

  [[nodiscard]] bool enough(std::uint32_t left) const {
    return std::ranges::all_of(
        states_, [&](const ProgressState& state) { return passes(progress_share(state, left), task_.mass, left); });
  }

  /// Adds pages [begin, end) of the order to what each query head has attended.
  void take(std::uint32_t begin, std::uint32_t end) {
    std::vector<std::uint32_t> pages(order_.begin() + begin, order_.begin() + end);
    const auto whole = [&](std::uint32_t page) { return far_of(page).size() == page_tokens_; };
    const auto others = std::stable_partition(pages.begin(), pages.end(), whole);
    std::vector<float> masses(pages.size());
    for (std::uint32_t h = 0; h < group_; ++h) {
      std::ranges::transform(pages, masses.begin(), [&](std::uint32_t page) {
        return mass(h, [&](const auto& visit) {
          const TokenRange far = far_of(page);
          for (std::uint32_t token = far.begin; token < far.end; ++token) visit(token);
        });
      });
      add_pages(states_[h], task_.rule,
                {.first = masses.data(),
                 .pages = static_cast<std::uint32_t>(pages.size()),
                 .full = static_cast<std::uint32_t>(others - pages.begin())});
    }
  }

  /// How many pages of the order are taken.
  [[nodiscard]] std::uint32_t walk() {
    states_.assign(group_, {});
    begin_walk();
    const auto all = static_cast<std::uint32_t>(order_.size());
    std::uint32_t taken = 0;
    while (taken < all && !enough(all - taken)) {
      const std::uint32_t end = taken + std::min(task_.microbatch, all - taken);
      take(taken, end);
      taken = end;
    }
    return taken;
  }

  void mark(std::uint32_t taken) const {
    const std::uint64_t words = div_up(task_.tokens, 32);
    std::fill_n(task_.masks, words, 0u);
    for (const std::uint32_t page : std::span(order_).first(taken)) {
      for (std::uint32_t token = page * page_tokens_; token < (page + 1) * page_tokens_; ++token)
        task_.masks[token / 32] |= 1u << token % 32;
    }
    for (std::uint32_t h = 1; h < group_; ++h) std::copy_n(task_.masks, words, task_.masks + h * task_.mask_words);
  }

  const ChoosePagesTask& task_;
  AttentionShape shape_;
  std::uint32_t group_;
  std::uint32_t page_tokens_;
  std::vector<std::uint32_t> order_;   ///< pages
  std::vector<ProgressState> states_;  ///< [group]
};

}  // namespace

void choose_pages(const Host& host, std::span<const ChoosePagesTask> tasks, const AttentionShape& shape,
                  const PageLayout& layout) {
  if (tasks.empty()) return;
  check("choose_pages", shape, layout);
  std::uint64_t bytes = 0;
  for (const ChoosePagesTask& task : tasks) bytes += std::uint64_t{task.tokens} * shape.group() * sizeof(float);
  for_each_task(host.workers, tasks, bytes, [shape, page_tokens = layout.page_tokens](const ChoosePagesTask& task) {
    if (task.pages != 0) PageChoice(task, shape, page_tokens).run();
  });
}

}  // namespace sluice::cpu
