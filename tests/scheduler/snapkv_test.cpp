// SnapKV, PyramidKV and Ada-KV against their definitions in float64; and that what was lost stays lost.

#include <cmath>
#include <limits>

#include "scheduler/snapshot/snapshot_source.hpp"
#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

constexpr std::uint32_t kHeads = 3;  // KV heads.
const AttentionShape kLayers{.layers = 4, .q_heads = kHeads * kGroup, .kv_heads = kHeads, .head_dim = kDim};

/// Scores of the tokens before the window: softmax rows of the window's queries over what each sees, summed, pooled per
/// query head, averaged over the group.
std::vector<double> scores(const FakeKv& kv, std::uint32_t n, const std::vector<float>& last_q,
                           const SnapshotOptions& options) {
  const auto known = static_cast<std::uint32_t>(last_q.size() / kGroup / kDim);
  const std::uint32_t rows = std::min(known, options.window);
  const std::uint32_t prefix = n - options.window;
  const int half = static_cast<int>(options.kernel) / 2;
  std::vector<double> out(prefix, 0.0);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    std::vector<double> sums(n, 0.0);
    for (std::uint32_t p = n - rows; p < n; ++p) {
      const float* const q = last_q.data() + std::size_t{p - (n - known)} * kGroup * kDim;
      double all = 0.0;
      std::vector<double> weights(p + 1);
      for (std::uint32_t j = 0; j <= p; ++j) all += weights[j] = std::exp(kv.logit(q, h, j));
      for (std::uint32_t j = 0; j <= p; ++j) sums[j] += weights[j] / all;
    }
    for (int i = 0; i < static_cast<int>(prefix); ++i) {
      double pooled = 0.0;
      for (int j = std::max(i - half, 0); j <= std::min(i + half, static_cast<int>(prefix) - 1); ++j)
        pooled = options.pooling == Pooling::max ? std::max(pooled, sums[j]) : pooled + sums[j];
      out[i] += options.pooling == Pooling::max ? pooled : pooled / options.kernel;
    }
  }
  return out;
}

/// The highest, ties to the earlier; with some leave for what float32 cannot tell apart.
void require_best(const std::vector<std::uint32_t>& kept, const std::vector<double>& score, std::uint32_t count) {
  REQUIRE(kept.size() == count);
  REQUIRE(std::ranges::is_sorted(kept));
  REQUIRE(std::ranges::adjacent_find(kept) == kept.end());
  if (count == 0 || count == score.size()) return;
  double least = HUGE_VAL;
  for (const std::uint32_t token : kept) least = std::min(least, score[token]);
  for (std::uint32_t token = 0; token < score.size(); ++token) {
    if (std::ranges::binary_search(kept, token)) continue;
    REQUIRE(score[token] <= least * (1.0 + 1e-4));
  }
}

struct Prompt {
  Prompt(std::uint32_t n, std::uint32_t rows, std::uint32_t seed, float sharpness = 1.f)
      : kv(FakeKv::random(n + 300, kDim, kGroup, seed)),
        last_q(random_queries(std::size_t{rows} * kGroup, kDim, seed + 1, sharpness)),
        tokens(n),
        queries(rows) {}
  [[nodiscard]] PromptContext context(std::uint32_t kv_head = 0) {
    return {.kv_head = kv_head, .tokens = tokens, .queries = queries, .last_q = last_q, .kv = &kv};
  }
  FakeKv kv;
  std::vector<float> last_q;
  std::uint32_t tokens, queries;
};

std::vector<std::uint32_t> attended_in(LayerPolicy& policy, FakeKv& kv, std::uint32_t n, std::uint32_t kv_head = 0,
                                       std::uint32_t seed = 7) {
  const FakeNear near(n, 0, 0);
  const std::vector<float> q = random_queries(kGroup, kDim, seed);
  const SelectionRow row = select(policy, kv, n, q, near.set, kv_head).row;
  for (std::uint32_t h = 1; h < kGroup; ++h) REQUIRE(attended_by(row, h) == attended_by(row, 0));
  return attended_by(row, 0);
}

}  // namespace

TEST_CASE("a KV head keeps what the window's queries attended most, pooled, and the window", "[snapkv]") {
  const std::uint32_t n = GENERATE(40u, 200u, 900u);
  const std::uint32_t queries = GENERATE(1u, 5u, 16u, 40u);
  SnapshotOptions options;
  options.pooling = GENERATE(Pooling::max, Pooling::mean);
  options.kernel = GENERATE(1u, 7u);
  options.window = 16;
  options.budget = 36;
  CAPTURE(n, queries, options.kernel);
  Prompt prompt(n, queries, n + queries);
  SnapshotSource source(options, kShape, LayerId{0}, std::make_shared<SharedBudget>(1));
  source.begin(prompt.context());
  source.settle();
  REQUIRE(source.prefix() == n - 16);
  require_best({source.kept().begin(), source.kept().end()}, scores(prompt.kv, n, prompt.last_q, options), 20);
}

TEST_CASE("what was lost stays lost, and all that is generated is attended", "[snapkv]") {
  const std::uint32_t n = 400;
  Prompt prompt(n, 32, 3);
  const auto policy = make("snapkv:budget=100");
  policy->begin(prompt.context());
  std::vector<std::uint32_t> first;
  for (std::uint32_t generated = 1; generated <= 200; ++generated) {
    std::vector<std::uint32_t> attended = attended_in(*policy, prompt.kv, n + generated, 0, generated);
    REQUIRE_FALSE(policy->wants_observation(0));
    REQUIRE(attended.size() == 100 + generated);
    REQUIRE(std::equal(attended.end() - 32 - generated, attended.end(), positions(n - 32, n + generated).begin()));
    attended.resize(68);
    if (generated == 1) first = attended;
    REQUIRE(attended == first);
  }
  policy->truncate(0, n);
  std::vector<std::uint32_t> again = attended_in(*policy, prompt.kv, n + 1);
  again.resize(68);
  REQUIRE(again == first);
}

TEST_CASE("a needle that the window's queries asked for is kept, one that a later query asks for is lost", "[snapkv]") {
  const std::uint32_t n = 500;
  Prompt prompt(n, 32, 5, 0.3f);
  const std::vector<float> asked = random_queries(1, kDim, 50, 2.f);
  for (std::size_t i = 0; i < prompt.last_q.size(); ++i) prompt.last_q[i] += asked[i % kDim];
  for (std::uint32_t c = 0; c < kDim; ++c) {
    prompt.kv.k[100 * kDim + c] = 3.f * asked[c];
    prompt.kv.k[300 * kDim + c] = -3.f * asked[c];
  }
  const auto policy = make("snapkv:budget=48,kernel=1");
  policy->begin(prompt.context());
  std::vector<float> later(kGroup * kDim);
  for (std::size_t i = 0; i < later.size(); ++i) later[i] = -3.f * asked[i % kDim];
  REQUIRE(best(positions(0, n + 1), 1, [&](std::uint32_t t) { return prompt.kv.logit(later.data(), 0, t); }).front() ==
          300);
  const FakeNear near(n + 1, 0, 0);
  const SelectionRow row = select(*policy, prompt.kv, n + 1, later, near.set).row;
  REQUIRE(std::ranges::count(row.tokens, 100u) == 1);
  REQUIRE(std::ranges::count(row.tokens, 300u) == 0);
}

TEST_CASE("of equal scores the earlier tokens are kept, and NaN weighs nothing", "[snapkv]") {
  const std::uint32_t n = 100;
  Prompt prompt(n, 16, 6);
  std::ranges::fill(prompt.kv.k, 0.f);
  std::fill_n(prompt.kv.k.begin() + 3 * kDim, kDim, std::numeric_limits<float>::quiet_NaN());
  SnapshotSource source({.budget = 26, .window = 16, .kernel = 1}, kShape, LayerId{0},
                        std::make_shared<SharedBudget>(1));
  source.begin(prompt.context());
  REQUIRE(std::vector(source.kept().begin(), source.kept().end()) ==
          std::vector<std::uint32_t>{0, 1, 2, 4, 5, 6, 7, 8, 9, 10});
}

TEST_CASE("a prompt that fits, or whose queries are not known, is kept whole; none at all is fine", "[snapkv]") {
  const auto [tokens, queries] = GENERATE(std::pair{0u, 0u}, std::pair{1u, 1u}, std::pair{32u, 32u},
                                          std::pair{33u, 32u}, std::pair{100u, 32u}, std::pair{700u, 0u});
  const std::string text = GENERATE("snapkv:budget=100", "adakv:budget=100", "pyramidkv:budget=100");
  CAPTURE(tokens, queries, text);
  Prompt prompt(tokens, queries, 8);
  const auto policy = make(text);
  policy->begin(prompt.context());
  for (std::uint32_t n = tokens + 1; n < tokens + 70; n += 17)
    REQUIRE(attended_in(*policy, prompt.kv, n) == positions(0, n));
}

TEST_CASE("a budget of the window alone keeps the window alone, and a short context is evicted, too", "[snapkv]") {
  Prompt prompt(40, 32, 9);
  const auto policy = make("snapkv:budget=8,window=8");
  policy->begin(prompt.context());
  REQUIRE(attended_in(*policy, prompt.kv, 45) == positions(32, 45));
}

TEST_CASE("sinks are attended as near tokens, not twice", "[snapkv]") {
  const std::uint32_t n = 300;
  Prompt prompt(n, 32, 10);
  const auto policy = make("snapkv:budget=150 | near=0,sinks=64,recent=16");
  policy->begin(prompt.context());
  const FakeNear near(n + 1, 64, 16);
  const std::vector<float> q = random_queries(kGroup, kDim, 1);
  const SelectionRow row = select(*policy, prompt.kv, n + 1, q, near.set).row;
  REQUIRE_FALSE(row.tokens.empty());
  for (const std::uint32_t token : row.tokens) REQUIRE_FALSE(near.set.contains(token));
  for (std::size_t i = 0; i < row.scores.size(); ++i)
    REQUIRE(row.scores[i] == static_cast<float>(prompt.kv.logit(q.data(), i % kGroup, row.tokens[i / kGroup])));
}

TEST_CASE("PyramidKV's budgets fall by equal steps, and keep as many tokens as equal ones would", "[snapkv]") {
  const std::uint32_t layers = GENERATE(1u, 2u, 8u, 32u);
  const std::uint32_t pyramid = GENERATE(1u, 2u, 20u, 1000u);
  const std::uint32_t prefix = GENERATE(0u, 500u, 1000u, 1500u, 100'000u);
  CAPTURE(layers, pyramid, prefix);
  const SnapshotOptions options{.budget = 1032, .window = 32, .pyramid = pyramid};
  const std::uint32_t mean = std::min(1000u, prefix);
  double sum = 0.0;
  std::vector<std::uint32_t> budgets;
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    budgets.push_back(snapshot_budget(options, layer, layers, prefix));
    REQUIRE(budgets.back() <= prefix);
    sum += budgets.back();
  }
  REQUIRE(std::abs(sum / layers - mean) <= 0.5);
  REQUIRE(std::ranges::is_sorted(budgets, std::greater<>()));
  if (prefix <= 1000 || pyramid == 1 || layers == 1) {
    REQUIRE(budgets.front() == mean);
  } else {
    const std::uint32_t most = std::min(2000 - 1000 / pyramid, prefix);
    REQUIRE(budgets.front() == most);
    REQUIRE(budgets.back() == 2000 - most);
    for (std::uint32_t layer = 1; layer < layers; ++layer) {
      const double step = 2.0 * (most - 1000.0) / (layers - 1);
      REQUIRE(std::abs(budgets[layer] - (most - layer * step)) <= 0.5);
    }
  }
  REQUIRE(snapshot_budget({.budget = 10, .window = 32, .pyramid = pyramid}, 0, layers, prefix) == 0);
}

TEST_CASE("Ada-KV shares a layer's budget by how many of a head's scores are among its highest", "[snapkv]") {
  const std::uint32_t n = GENERATE(90u, 600u);
  const float floor = GENERATE(0.f, 0.2f, 1.f);
  CAPTURE(n, floor);
  const std::uint32_t budget = 24;
  const std::string text = "snapkv:budget=40,window=16,floor=" + std::to_string(floor);
  const auto policy = make_layer_policy(parse_policy(text), kLayers, kPageTokens, LayerId{2});
  const SnapshotOptions options = parse_policy(text).snapshot;
  std::vector<Prompt> prompts;
  std::vector<std::vector<double>> score;
  for (std::uint32_t head = 0; head < kHeads; ++head) {
    prompts.emplace_back(n, 16, 20 + head, head == 0 ? 0.1f : head == 1 ? 1.f : 3.f);  // Flat to sharp.
    score.push_back(scores(prompts.back().kv, n, prompts.back().last_q, options));
  }
  for (std::uint32_t head = 0; head < kHeads; ++head) policy->begin(prompts[head].context(head));
  std::vector<std::pair<double, std::uint32_t>> all;
  for (std::uint32_t head = 0; head < kHeads; ++head) {
    for (const double x : score[head]) all.emplace_back(-x, head);
  }
  std::ranges::sort(all);
  std::vector<std::uint32_t> counts(kHeads, 0);
  for (std::uint32_t i = 0; i < budget * kHeads; ++i) ++counts[all[i].second];
  std::uint32_t sum = 0;
  for (std::uint32_t head = 0; head < kHeads; ++head) {
    std::vector<std::uint32_t> kept = attended_in(*policy, prompts[head].kv, n + 1, head);
    kept.resize(kept.size() - 17);
    const double part = static_cast<double>(floor);
    const auto want = static_cast<std::uint32_t>(std::floor(part * budget) + std::round((1.0 - part) * counts[head]));
    CAPTURE(head, counts[head]);
    require_best(kept, score[head], want);
    sum += want;
  }
  REQUIRE(std::abs(static_cast<double>(sum) - budget * kHeads) <= kHeads);
  if (floor < 1.f) REQUIRE(*std::ranges::max_element(counts) > *std::ranges::min_element(counts) + 5);
}

TEST_CASE("shares do not depend on which head asks first, nor on copies", "[snapkv]") {
  const std::uint32_t n = 300;
  const PolicySpec spec = parse_policy("adakv:budget=50,window=16");
  std::vector<Prompt> prompts;
  for (std::uint32_t head = 0; head < kHeads; ++head)
    prompts.emplace_back(n, 16, 30 + head, 1.f + static_cast<float>(head));
  const auto kept = [&](bool backwards, bool copied) {
    std::unique_ptr<LayerPolicy> policy = make_layer_policy(spec, kLayers, kPageTokens, LayerId{0});
    std::vector<std::vector<std::uint32_t>> lists(kHeads);
    for (std::uint32_t i = 0; i < kHeads; ++i) {
      const std::uint32_t head = backwards ? kHeads - 1 - i : i;
      policy->begin(prompts[head].context(head));
    }
    for (std::uint32_t i = 0; i < kHeads; ++i) {
      if (copied) policy = policy->clone();
      const std::uint32_t head = backwards ? i : kHeads - 1 - i;
      lists[head] = attended_in(*policy, prompts[head].kv, n + 1, head);
      REQUIRE(policy->heap_bytes(head) <= policy_state_bytes(spec, kLayers, n) / kHeads / kLayers.layers);
    }
    return lists;
  };
  const auto want = kept(false, false);
  REQUIRE(kept(true, false) == want);
  REQUIRE(kept(false, true) == want);
}
