// Double Sparsity: which channels are chosen, and that tokens are ranked by them alone, against the definition in
// float64.

#include <limits>
#include <numeric>

#include "scheduler/labels/label_cache.hpp"
#include "tests/scheduler/policy_step.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

/// Small whole numbers, whose products and sums are exact in bf16 and float32; many keys are equal.
FakeKv whole_numbers(std::uint32_t tokens, std::uint32_t seed) {
  FakeKv kv(tokens, kDim, kGroup);
  std::mt19937 rng(seed);
  for (std::size_t i = 0; i < kv.k.size(); ++i) {
    const std::uint32_t channel = i % kDim, token = static_cast<std::uint32_t>(i / kDim);
    const int spread = channel % 3 == 0 ? 9 : 2;
    kv.k[i] = static_cast<float>(static_cast<int>(rng() % (2 * spread + 1)) - spread);
    if (token % 50 == 7) kv.k[i] *= 8.f;  // An outlier.
    if (token % 5 == 4) kv.k[i] = kv.k[i - kDim];
  }
  return kv;
}

std::vector<float> whole_queries(std::size_t rows, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<float> q(rows * kDim);
  for (float& x : q) x = static_cast<float>(static_cast<int>(rng() % 7) - 3);
  return q;
}

bool finite(const float* row) {
  return std::all_of(row, row + kDim, [](float x) { return std::isfinite(x); });
}

/// The mean of |q * k| over all pairs, channel by channel; the best `count`, ties to the lower.
std::vector<std::uint32_t> channels_of(const FakeKv& kv, std::uint32_t tokens, const std::vector<float>& queries,
                                       std::uint32_t count) {
  std::vector<double> means(kDim, 0.0);
  for (std::uint32_t c = 0; c < kDim; ++c) {
    for (std::uint32_t t = 0; t < tokens; ++t) {
      const float* const key = kv.k.data() + std::size_t{t} * kDim;
      if (!finite(key)) continue;
      if (queries.empty()) means[c] += std::abs(double{key[c]});
      for (std::size_t row = 0; row < queries.size(); row += kDim)
        means[c] += std::abs(double{queries[row + c]} * double{key[c]});
    }
  }
  std::vector<std::uint32_t> order = positions(0, kDim);
  std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) { return means[a] > means[b]; });
  order.resize(std::min(count, kDim));
  std::ranges::sort(order);
  return order;
}

double partial(const FakeKv& kv, const float* q, std::uint32_t h, std::uint32_t token,
               const std::vector<std::uint32_t>& channels) {
  double sum = 0.0;
  for (const std::uint32_t c : channels) sum += double{q[h * kDim + c]} * double{kv.k[std::size_t{token} * kDim + c]};
  return sum;
}

struct Prompted {
  Prompted(const std::string& text, FakeKv keys, std::uint32_t prompt, std::vector<float> last)
      : kv(std::move(keys)), last_q(std::move(last)), policy(make(text)) {
    const auto rows = static_cast<std::uint32_t>(last_q.size() / kDim / kGroup);
    policy->begin({.kv_head = 0, .tokens = prompt, .queries = rows, .last_q = last_q, .kv = &kv});
    kv.rows_scored = 0;
  }
  const SelectionRow& select(std::uint32_t tokens, const NearSet& near, const std::vector<float>& q) {
    row.clear();
    policy->select({.kv_head = 0, .tokens = tokens, .q = q.data(), .near = &near, .kv = &kv}, row, bypass, counters);
    return row;
  }
  FakeKv kv;
  std::vector<float> last_q;
  std::unique_ptr<LayerPolicy> policy;
  SelectionRow row;
  Bypass bypass;
  SelectCounters counters;
};

}  // namespace

TEST_CASE("each query head keeps its best tokens by the prompt's own channels, ties to the earlier",
          "[double_sparsity]") {
  const std::uint32_t channels = GENERATE(1u, 3u, 16u, 99u);
  const std::uint32_t prompt = GENERATE(1u, 70u, 400u);
  const std::uint32_t generated = GENERATE(1u, 30u);
  const bool known = GENERATE(true, false);  // The prompt's queries.
  CAPTURE(channels, prompt, generated, known);
  const std::uint32_t n = prompt + generated;
  const std::vector<float> last =
      known ? whole_queries(std::size_t{std::min(prompt, 32u)} * kGroup, 3) : std::vector<float>();
  Prompted run(
      "labels:channels=" + std::to_string(channels) + ",budget=20 | top_k=max(1, 100%) | near=0,sinks=4,recent=0",
      whole_numbers(n, 5), prompt, last);
  const std::vector<std::uint32_t> chosen = channels_of(run.kv, prompt, last, channels);
  const std::vector<float> q = whole_queries(kGroup, 9);
  const FakeNear near(n, 4, 0);
  const SelectionRow& row = run.select(n, near.set, q);
  const std::uint32_t sinks = std::min(n, 4u);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    REQUIRE(attended_by(row, h) == best(positions(sinks, n), 20, [&](std::uint32_t token) {
              return partial(run.kv, q.data(), h, token, chosen);
            }));
  }
  REQUIRE(run.kv.rows_scored == row.tokens.size());  // Only what is attended is read.
  REQUIRE(run.counters.estimated == (n - sinks > 20 ? n - sinks : 0));
  REQUIRE(run.counters.index_bytes == run.counters.estimated * 2 * std::min(channels, kDim));
}

TEST_CASE("with all channels it is the oracle", "[double_sparsity]") {
  const std::uint32_t n = 500;
  Prompted labels("labels:budget=40 | top_k=max(1, 100%) | near=0,sinks=4,recent=9", whole_numbers(n, 6), n - 1,
                  whole_queries(32 * kGroup, 2));
  Prompted oracle("exact | top_k=40 | near=0,sinks=4,recent=9", whole_numbers(n, 6), n - 1, {});
  const FakeNear near(n, 4, 9);
  const std::vector<float> q = whole_queries(kGroup, 10);
  const SelectionRow& a = labels.select(n, near.set, q);
  const SelectionRow& b = oracle.select(n, near.set, q);
  for (std::uint32_t h = 0; h < kGroup; ++h) REQUIRE(attended_by(a, h) == attended_by(b, h));
}

TEST_CASE("a budget that holds every token attends as dense attention does", "[double_sparsity]") {
  const std::uint32_t n = GENERATE(2u, 5u, 300u);
  const std::string budget = GENERATE("all", "299", "300");
  CAPTURE(n, budget);
  Prompted run("labels:channels=2,budget=" + budget + " | top_k=max(1, 100%) | near=0,sinks=1,recent=0",
               whole_numbers(n, 7), n - 1, whole_queries(kGroup, 8));
  const FakeNear near(n, 1, 0);
  const SelectionRow& row = run.select(n, near.set, whole_queries(kGroup, 9));
  for (std::uint32_t h = 0; h < kGroup; ++h) REQUIRE(attended_by(row, h) == positions(1, n));
  REQUIRE(run.counters.estimated == 0);
}

TEST_CASE("tokens are attended only if labels rank them high and what follows keeps them", "[double_sparsity]") {
  const std::uint32_t n = 400;
  const std::string text = "near=0,sinks=4,recent=20";
  Prompted labels("labels:channels=3,budget=60 | top_k=max(1, 100%) | " + text, whole_numbers(n, 21), n - 1,
                  whole_queries(8 * kGroup, 22));
  Prompted pruned("labels:channels=3,budget=60 | top_k=7 | " + text, whole_numbers(n, 21), n - 1,
                  whole_queries(8 * kGroup, 22));
  const std::vector<std::uint32_t> channels = channels_of(labels.kv, n - 1, labels.last_q, 3);
  const FakeNear near(n, 4, 20);
  const std::vector<float> q = whole_queries(kGroup, 23);
  const SelectionRow& all = labels.select(n, near.set, q);
  const SelectionRow& some = pruned.select(n, near.set, q);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    // The budget is of tokens that are not attended anyway.
    const std::vector<std::uint32_t> ranked = best(positions(4, n - 20), 60, [&](std::uint32_t token) {
      return partial(labels.kv, q.data(), h, token, channels);
    });
    REQUIRE(attended_by(all, h) == ranked);
    REQUIRE(attended_by(some, h) ==
            best(ranked, 7, [&](std::uint32_t token) { return labels.kv.logit(q.data(), h, token); }));
  }
}

TEST_CASE("every head that takes part gets its best, whatever the group's size", "[double_sparsity]") {
  const std::uint32_t group = GENERATE(1u, 3u, 7u), n = GENERATE(1u, 2u, 600u, 9000u), most = GENERATE(1u, 33u);
  const bool together = GENERATE(false, true);
  CAPTURE(group, n, most, together);
  FakeKv kv(n, kDim, group);
  kv.k = whole_numbers(n, 30).k;
  if (n > 100) kv.k[std::size_t{99} * kDim] = std::numeric_limits<float>::quiet_NaN();
  LabelCache labels(4, {.layers = 1, .q_heads = group, .kv_heads = 1, .head_dim = kDim});
  const std::vector<float> last = whole_queries(std::size_t{2} * group, 31), q = whole_queries(group, 32);
  labels.begin({.kv_head = 0, .tokens = n, .queries = 2, .last_q = last, .kv = &kv});
  const std::vector<std::uint32_t> channels = channels_of(kv, n, last, 4);
  REQUIRE(std::vector(labels.channels().begin(), labels.channels().end()) == channels);

  std::vector<TokenSet> sets(together ? 1 : group);
  for (TokenSet& set : sets) set.reset(n);
  SelectCounters counters;
  const std::uint32_t heads = group == 7 ? 0b1011011u : (1u << group) - 1;
  labels.propose({.q = q.data(), .begin = 0, .end = n, .most = most, .heads = heads}, kv, sets, counters);
  std::vector<std::vector<std::uint32_t>> expected(sets.size());
  for (std::uint32_t h = 0; h < group; ++h) {
    if (((heads >> h) & 1) == 0) continue;
    const auto mine = best(positions(0, n), most, [&](std::uint32_t token) {
      const double score = partial(kv, q.data(), h, token, channels);
      return std::isnan(score) ? -std::numeric_limits<double>::infinity() : score;
    });
    std::vector<std::uint32_t>& to = expected[together ? 0 : h];
    to.insert(to.end(), mine.begin(), mine.end());
  }
  for (std::size_t s = 0; s < sets.size(); ++s) {
    std::ranges::sort(expected[s]);
    expected[s].erase(std::ranges::unique(expected[s]).begin(), expected[s].end());
    std::vector<std::uint32_t> found;
    sets[s].for_each([&](std::uint32_t token) { found.push_back(token); });
    REQUIRE(found == expected[s]);
  }
}

TEST_CASE("labels are rounded to bf16, and only the prompt's newest queries count", "[double_sparsity]") {
  const std::uint32_t n = 300;
  FakeKv kv = FakeKv::random(n, kDim, kGroup, 11);
  const std::vector<float> last = random_queries(std::size_t{50} * kGroup, kDim, 12);
  LabelCache labels(5, kShape);
  labels.begin({.kv_head = 0, .tokens = n, .queries = 50, .last_q = last, .kv = &kv});
  const std::vector<float> newest(last.end() - std::ptrdiff_t{kLabelQueries} * kGroup * kDim, last.end());
  const std::vector<std::uint32_t> chosen = channels_of(kv, n, newest, 5);
  REQUIRE(std::vector(labels.channels().begin(), labels.channels().end()) == chosen);
  const std::vector<float> q = random_queries(kGroup, kDim, 13);
  const std::uint32_t begin = 7;
  std::vector<float> found((n - begin) * kGroup);
  labels.score(q.data(), begin, n, found.data());
  for (std::size_t i = 0; i < found.size(); ++i) {
    double largest = 0.0;  // An element is off by 2^-8 of itself.
    for (const std::uint32_t c : chosen)
      largest += std::abs(double{q[i % kGroup * kDim + c]} * double{kv.k[(begin + i / kGroup) * kDim + c]});
    const double want = partial(kv, q.data(), i % kGroup, begin + static_cast<std::uint32_t>(i / kGroup), chosen);
    REQUIRE(std::abs(found[i] - want) <= largest / 256.0 + 1e-6);
  }
}

TEST_CASE("a key that is no number has no say in the channels, and is ranked last", "[double_sparsity]") {
  const std::uint32_t n = 100;
  FakeKv kv = whole_numbers(n, 14);
  for (std::uint32_t c = 0; c < kDim; ++c) kv.k[std::size_t{20} * kDim + c] = std::numeric_limits<float>::quiet_NaN();
  kv.k[std::size_t{21} * kDim + 1] = std::numeric_limits<float>::infinity();  // In a channel of small numbers.
  const std::vector<float> last = whole_queries(std::size_t{8} * kGroup, 15);
  LabelCache labels(2, kShape);
  labels.begin({.kv_head = 0, .tokens = n, .queries = 8, .last_q = last, .kv = &kv});
  REQUIRE(std::vector(labels.channels().begin(), labels.channels().end()) == channels_of(kv, n, last, 2));
  Prompted run("labels:channels=2,budget=95 | top_k=max(1, 100%) | near=0,sinks=4,recent=0", kv, n - 1, last);
  const std::vector<float> q = whole_queries(kGroup, 16);
  const FakeNear near(n, 4, 0);
  const SelectionRow& row = run.select(n, near.set, q);
  for (std::uint32_t h = 0; h < kGroup; ++h) {
    const auto attended = attended_by(row, h);
    REQUIRE(attended.size() == 95);
    REQUIRE(std::ranges::find(attended, 20u) == attended.end());
  }
}

TEST_CASE("without a prompt keys are scored whole", "[double_sparsity]") {
  Prompted run("labels:channels=2,budget=5 | top_k=max(1, 100%) | near=0,sinks=0,recent=0", whole_numbers(60, 17), 0,
               {});
  for (std::uint32_t n = 1; n <= 60; ++n) {
    const FakeNear near(n, 0, 0);
    const std::vector<float> q = whole_queries(kGroup, 100 + n);
    const SelectionRow& row = run.select(n, near.set, q);
    for (std::uint32_t h = 0; h < kGroup; ++h)
      REQUIRE(attended_by(row, h) ==
              best(positions(0, n), 5, [&](std::uint32_t t) { return run.kv.logit(q.data(), h, t); }));
  }
  REQUIRE(run.policy->heap_bytes(0) == 0);
}

TEST_CASE("the newest token is labelled anew when its step comes again", "[double_sparsity]") {
  const std::uint32_t prompt = 80, n = prompt + 1;
  Prompted run("labels:channels=4,budget=8 | top_k=max(1, 100%) | near=0,sinks=0,recent=0", whole_numbers(n, 18),
               prompt, whole_queries(8 * kGroup, 19));
  const std::vector<std::uint32_t> chosen = channels_of(run.kv, prompt, run.last_q, 4);
  const std::vector<float> q = whole_queries(kGroup, 20);
  const FakeNear near(n, 0, 0);
  for (const float key : {100.f, -100.f, 100.f}) {  // A forward that failed, and comes with another token.
    for (std::uint32_t c = 0; c < kDim; ++c)
      run.kv.k[std::size_t{prompt} * kDim + c] = q[c] > 0.f ? key : q[c] < 0.f ? -key : 0.f;
    const SelectionRow& row = run.select(n, near.set, q);
    const auto of_head = [&](std::uint32_t token) { return partial(run.kv, q.data(), 0, token, chosen); };
    REQUIRE(attended_by(row, 0) == best(positions(0, n), 8, of_head));
    REQUIRE((std::ranges::count(attended_by(row, 0), prompt) == 1) == (key > 0.f));
  }
}
