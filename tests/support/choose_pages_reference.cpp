#include "tests/support/choose_pages_reference.hpp"

#include <algorithm>
#include <limits>
#include <optional>

#include "sluice/page_rules.hpp"
#include "tests/support/random.hpp"

namespace sluice::test::page_choices {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Log of the sum of exponentials; NaN weighs nothing.
double log_sum(std::vector<double> logits) {
  std::erase_if(logits, [](double x) { return std::isnan(x); });
  if (logits.empty()) return -kInfinity;
  const double top = *std::ranges::max_element(logits);
  if (std::isinf(top)) return top;
  double sum = 0.0;
  for (const double x : logits) sum += std::exp(x - top);
  return top + std::log(sum);
}

/// What whole pages of a microbatch say of one to come.
void learn(ProgressRule rule, std::vector<double> whole, std::optional<double>& unseen) {
  if (whole.empty()) return;
  std::ranges::sort(whole);
  if (rule == ProgressRule::least) unseen = std::min(unseen.value_or(kInfinity), whole.front());
  if (rule == ProgressRule::mean) unseen = log_sum(whole) - std::log(static_cast<double>(whole.size()));
  if (rule == ProgressRule::median) unseen = whole[whole.size() / 2];
}

double share(double attended, const std::optional<double>& unseen, double left) {
  if (left == 0.0) return 1.0;
  if (!unseen || attended == -kInfinity) return 0.0;
  const double rest = *unseen + std::log(left);
  if (rest == -kInfinity) return 1.0;
  const double found = 1.0 / (1.0 + std::exp(rest - attended));
  return std::isnan(found) ? 0.0 : found;
}

}  // namespace

PageProblem::PageProblem(const Options& of) : o(of) {
  Random random(o.seed);
  page_scores.resize(std::size_t{o.group} * o.pages);
  scores.resize(std::size_t{o.group} * tokens());
  const auto level = [&] { return o.spread * static_cast<float>(random.normal()); };
  for (std::uint32_t page = 0; page * o.page_tokens < tokens(); ++page) {
    const float common = level();
    for (std::uint32_t h = 0; h < o.group; ++h) {
      const float own = common + 0.3f * level();
      if (page < o.pages) page_score(h, page) = std::round(8.f * (own + 0.2f * level())) / 8.f;
      for (std::uint32_t i = page * o.page_tokens; i < std::min(tokens(), (page + 1) * o.page_tokens); ++i)
        score(h, i) = own + 0.5f * static_cast<float>(random.normal());
    }
  }
}

Reference::Reference(const PageProblem& of) : of_(of), o_(of.o) {
  for (std::uint32_t page = 0; page < o_.pages; ++page) {
    if (far(page).size() != 0) order_.push_back(page);
  }
  std::ranges::sort(order_, [&](std::uint32_t a, std::uint32_t b) {
    const double x = sum(a), y = sum(b);
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) == std::isnan(y) ? a > b : std::isnan(y);
    return x != y ? x > y : a > b;
  });
  for (std::uint32_t h = 0; h < o_.group; ++h) walk(h);
}

bool Reference::may_take(std::uint32_t taken, double within) const {
  if (order_.empty()) return taken == 0;
  if (taken == 0 || taken > order_.size()) return false;
  if (taken % o_.microbatch != 0 && taken != order_.size()) return false;
  const std::uint32_t batch = (taken - 1) / o_.microbatch;
  for (std::uint32_t before = 0; before < batch; ++before) {
    if (least_share(before) >= static_cast<double>(o_.mass) + within && o_.mass < 1.f) return false;
  }
  return taken == order_.size() || (least_share(batch) >= static_cast<double>(o_.mass) - within && o_.mass < 1.f);
}

std::vector<std::uint32_t> Reference::far(std::uint32_t page) const {
  std::vector<std::uint32_t> tokens;
  for (std::uint32_t i = page * o_.page_tokens; i < (page + 1) * o_.page_tokens; ++i) {
    if (i >= o_.sinks && i < of_.recent_begin()) tokens.push_back(i);
  }
  return tokens;
}

double Reference::sum(std::uint32_t page) const {
  double all = 0.0;
  for (std::uint32_t h = 0; h < o_.group; ++h)
    all += static_cast<double>(of_.page_scores[std::size_t{h} * o_.pages + page]);
  return all;
}

double Reference::mass(std::uint32_t h, const std::vector<std::uint32_t>& tokens) const {
  std::vector<double> logits;
  for (const std::uint32_t token : tokens) logits.push_back(of_.logit(h, token));
  return log_sum(logits);
}

double Reference::least_share(std::uint32_t batch) const {
  double least = 1.0;
  for (const auto& shares : shares_) least = std::min(least, shares[batch]);
  return least;
}

void Reference::walk(std::uint32_t h) {
  std::vector<std::uint32_t> anyway;
  for (std::uint32_t i = 0; i < of_.tokens(); ++i)
    if (i < o_.sinks || i >= of_.recent_begin()) anyway.push_back(i);
  double attended = mass(h, anyway);
  std::optional<double> unseen;
  std::vector<double> shares;
  for (std::size_t begin = 0; begin < order_.size(); begin += o_.microbatch) {
    const std::size_t end = std::min(order_.size(), begin + o_.microbatch);
    std::vector<double> all{attended}, whole;
    for (std::size_t i = begin; i < end; ++i) {
      const auto tokens = far(order_[i]);
      all.push_back(mass(h, tokens));
      if (tokens.size() == o_.page_tokens) whole.push_back(all.back());
    }
    attended = log_sum(all);
    learn(o_.rule, whole, unseen);
    shares.push_back(share(attended, unseen, static_cast<double>(order_.size() - end)));
  }
  shares_.push_back(shares);
}

ChoosePagesTask ask(StagesUnderTest& under_test, const PageProblem& of) {
  const Options& o = of.o;
  const std::uint64_t words = (of.tokens() + 31) / 32 + 3;
  return {.page_scores = under_test.copy_of(of.page_scores).data(),
          .scores = under_test.copy_of(of.scores).data(),
          .pages = o.pages,
          .tokens = of.tokens(),
          .sinks = o.sinks,
          .recent = of.recent_begin(),
          .mass = o.mass,
          .microbatch = o.microbatch,
          .rule = o.rule,
          .masks = under_test.array(words * o.group, kUntouched).data(),
          .mask_words = words,
          .count = under_test.array(1, kUntouched).data(),
          .scratch = under_test.array(ChoosePagesTask::scratch_words(o.group, o.pages), ~0u).data()};
}

}  // namespace sluice::test::page_choices
