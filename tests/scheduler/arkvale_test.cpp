// ArkVale's pages, ranked once for a layer, against the definition in float64.

#include <algorithm>
#include <limits>
#include <set>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tests/scheduler/attended.hpp"
#include "tests/scheduler/complaints.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr std::uint32_t kDim = 16;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// A layer in one step, of which pages have scores.
class Layer final : public LayerReader {
 public:
  Layer(const std::string& text, std::uint32_t kv_heads, std::uint32_t group, std::uint32_t tokens)
      : spec(parse_policy(text)),
        shape{.layers = 1, .q_heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = kDim},
        n(tokens),
        pages(tokens == 0 ? 0 : (tokens - 1) / kPageTokens),
        near(tokens, spec.near.sink_tokens, spec.near.recent_tokens) {
    for (std::uint32_t kv = 0; kv < kv_heads; ++kv)
      scores.push_back(random_queries(group, std::max(pages, 1u), 7 * kv + tokens));
    for (std::vector<float>& of : scores) of.resize(std::size_t{group} * pages);
  }
  [[nodiscard]] std::uint64_t step() const noexcept override { return 1; }
  [[nodiscard]] const float* q(std::uint32_t) const noexcept override { return nullptr; }
  [[nodiscard]] const float* rehearsed(std::uint32_t) const noexcept override { return nullptr; }
  [[nodiscard]] KvReader& kv(std::uint32_t) override { throw Error(Errc::internal, "no key is read"); }
  [[nodiscard]] std::span<const float> page_scores(std::uint32_t kv) const noexcept override { return scores[kv]; }

  /// Far tokens of a KV head.
  std::vector<std::uint32_t> select(std::uint32_t kv, bool alone = false) {
    const auto policy = make_layer_policy(spec, shape, kPageTokens, LayerId{0});
    SelectionRow row;
    Bypass bypass;
    SelectCounters counters;
    policy->select(
        {.kv_head = kv, .tokens = n, .page_scores = scores[kv], .near = &near.set, .layer = alone ? nullptr : this},
        row, bypass, counters);
    REQUIRE(bypass.heads == 0);
    REQUIRE(row.tokens.empty());
    REQUIRE(std::is_sorted(row.runs.begin(), row.runs.end(),
                           [](const PageRun& a, const PageRun& b) { return a.page < b.page; }));
    REQUIRE(counters.candidates == row.attended());
    return attended_by(row, 0);
  }

  /// Far tokens of the `picks` pages of the largest mean score, the first of equal ones, and of the open page.
  [[nodiscard]] std::vector<std::uint32_t> defined(std::uint32_t picks) const {
    std::vector<std::pair<double, std::uint32_t>> order;
    for (std::uint32_t page = 0; page < pages; ++page) {
      double sum = 0.0;
      for (const std::vector<float>& of : scores)
        for (std::size_t at = page; at < of.size(); at += pages) sum += of[at];
      order.emplace_back(sum == sum ? -sum : std::numeric_limits<double>::infinity(), page);
    }
    std::ranges::sort(order);
    std::set<std::uint32_t> taken{pages};
    for (std::uint32_t i = 0; i < std::min(picks, pages); ++i) taken.insert(order[i].second);
    std::vector<std::uint32_t> tokens;
    for (std::uint32_t t = 0; t < n; ++t)
      if (taken.contains(t / kPageTokens) && !near.set.contains(t)) tokens.push_back(t);
    return tokens;
  }

  PolicySpec spec;
  AttentionShape shape;
  std::uint32_t n, pages;
  FakeNear near;
  std::vector<std::vector<float>> scores;  ///< of each KV head: [group, pages]
};

std::string text_of(std::uint32_t pages) {
  return "pages:rank=layer,pages=" + std::to_string(pages) + " | top_k=all | near=0,sinks=5,recent=11";
}

}  // namespace

TEST_CASE("all heads of a layer attend the pages of the largest mean score", "[arkvale]") {
  const std::uint32_t group = GENERATE(1u, 3u, 7u), kv_heads = GENERATE(1u, 2u, 5u);
  const std::uint32_t tokens = GENERATE(1u, 2u, 32u, 33u, 65u, 340u, 352u, 353u);
  CAPTURE(group, kv_heads, tokens);
  Layer layer(text_of(6), kv_heads, group, tokens);
  for (std::uint32_t kv = 0; kv < kv_heads; ++kv) REQUIRE(layer.select(kv) == layer.defined(6));
  if (kv_heads == 1) REQUIRE(layer.select(0, true) == layer.defined(6));
}

TEST_CASE("one head that wants a page less than the layer does attends it all the same", "[arkvale]") {
  Layer layer(text_of(1), 2, 3, 321);
  for (std::vector<float>& of : layer.scores) std::ranges::fill(of, 0.f);
  layer.scores[0][4] = 1.f;   // Page 4 for one query head of the first KV head,
  layer.scores[1][7] = 1.5f;  // page 7 for one of the second.
  REQUIRE(layer.select(0) == layer.select(1));
  REQUIRE(layer.select(0) == layer.defined(1));
  REQUIRE(std::ranges::count(layer.select(0), 7 * kPageTokens) == 1);
  REQUIRE(std::ranges::count(layer.select(0), 4 * kPageTokens) == 0);
}

TEST_CASE("equal pages are taken in order, and those whose score is no number last", "[arkvale]") {
  Layer layer(text_of(3), 2, 2, 161);
  for (std::vector<float>& of : layer.scores) std::ranges::fill(of, 1.f);
  layer.scores[1][0] = kNaN;
  REQUIRE(layer.select(0) == layer.defined(3));
  REQUIRE(std::ranges::count(layer.select(1), kPageTokens) == 1);
  REQUIRE(std::ranges::count(layer.select(1), 5u) == 0);
}

TEST_CASE("pages of a layer keep to a budget of far tokens, the open one among them", "[arkvale][far]") {
  const std::uint32_t tokens = GENERATE(161u, 168u, 192u);
  CAPTURE(tokens);
  Layer layer("pages:rank=layer,pages=6 | top_k=all | near=0,sinks=0,recent=0 | far=384", 2, 2, tokens);
  REQUIRE(layer.select(1) == layer.defined(2));  // 96 tokens for each of four query heads.
  REQUIRE(layer.select(1).size() <= 96);
  const Bucket any{.pages = true};
  const ForwardLimits limits{
      .shape = row_shape(layer.shape, kPageTokens), .max_window = 99, .digests = layer.spec.pages.digest};
  REQUIRE(forward_unserved(layer.spec, any, limits).empty());
  layer.spec.far.min_tokens = 255;
  REQUIRE(forward_unserved(layer.spec, any, limits).find("far=256") != std::string::npos);
}

TEST_CASE("a step that gives one of several heads is refused, for it cannot be ranked by", "[arkvale]") {
  Layer layer(text_of(3), 2, 2, 161);
  REQUIRE_THROWS_AS(layer.select(0, true), Error);
}

TEST_CASE("whose ranking pages have is said where pages are attended as they are", "[arkvale][policy_text]") {
  const PolicySpec spec = parse_policy("arkvale:rank=layer,dense=0");
  REQUIRE(spec.pages.rank == PageRank::layer);
  REQUIRE(spec.dense_layers == 0);
  REQUIRE(to_string(spec) == "pages:rank=layer,budget=1280 | top_k=all | near=0%,sinks=64,recent=64 | page=32");
  REQUIRE(chooser(spec) == Chooser::cpu);
  REQUIRE(chooser(parse_policy("arkvale:rank=head")) == Chooser::device);
  REQUIRE(parse_policy("arkvale:rank=head") == parse_policy("arkvale"));
  for (const char* const text : {"psa:rank=layer", "pages:rank=layer", "twilight:rank=layer",
                                 "arkvale:rank=layer | bypass=0.9", "pages:rank=layer+history | top_k=all"})
    expect(complaint(text), {"rank=layer", "top_k=all"});
  expect(complaint("arkvale:rank=group"), {"\"group\"", "head and layer"});
}
