// What policies keep of the heap per token: against their bound, and against keys and values.
#include <string>

#include "scheduler/undo.hpp"
#include "tests/scheduler/fakes.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::scheduler::test;

namespace {

const AttentionShape kShape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 128};
/// Of a token in one KV head: keys and values in bf16.
constexpr double kKvBytes = 2.0 * 128 * 2;

/// Attention of head `h` to position `j`: heavy keys, a slash band, recency, noise of its own per step.
double habit(std::uint32_t h, std::uint32_t p, std::uint32_t j) {
  const double heavy = noise(j * 4 + h) > 0.49 ? 6.0 : 0.0;
  return heavy + ((p - j) % 211 == 9 ? 3.0 : 0.0) - 0.5 * std::log(1.0 + (p - j)) + noise(p * 7919 + j * 31 + h);
}

/// Keys that policies may cluster and hash without computing long: the pattern's logits, keys by position.
class LongKv final : public KvReader {
 public:
  void score(const float* q, std::span<const std::uint32_t> tokens, float* out) override {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      for (std::uint32_t h = 0; h < 4; ++h)
        out[i * 4 + h] = static_cast<float>(habit(h, static_cast<std::uint32_t>(q[h * 128]), tokens[i]));
    }
  }
  void key(std::uint32_t token, float* out) override { keys(token, 1, out); }
  void value(std::uint32_t token, float* out) override { keys(token, 1, out); }
  void keys(std::uint32_t first, std::uint32_t count, float* out) override {
    for (std::size_t i = 0; i < std::size_t{count} * 128; ++i)
      out[i] = static_cast<float>((first * 128 + i) * 2654435761u % 1024) / 512.f - 1.f;
  }
  void cluster(const ClusterRequest& request, float* centroids, std::uint32_t* assignment) override {
    std::fill_n(centroids, std::size_t{request.clusters} * 128, 0.5f);
    for (std::uint32_t i = 0; i < request.count; ++i) assignment[i] = i % request.clusters;
  }
  void score_rows(const float* x, std::uint32_t columns, const float* rows, std::uint32_t count, float* out) override {
    // Of a few of the elements: products are wanted that differ, not these.
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t j = 0; j < columns; ++j) {
        float sum = 0.f;
        for (std::size_t c = 0; c < 8; ++c) sum += x[j * 128 + c] * rows[i * 128 + c];
        out[i * columns + j] = sum;
      }
    }
  }
};

std::vector<float> queries(std::uint32_t first, std::uint32_t count) {
  std::vector<float> q(std::size_t{count} * 4 * 128, 0.5f);
  for (std::size_t i = 0; i < q.size(); i += 128) q[i] = static_cast<float>(first + i / (4 * 128));
  return q;
}

/// One policy's two KV heads from a prompt on; most of what it held per token and KV head after any step.
struct Life {
  Life(const std::string& text, std::uint32_t prompt, std::uint32_t steps)
      : spec(parse_policy(text)), policy(make_layer_policy(spec, kShape, kPageTokens, LayerId{1})) {
    LongKv kv;
    const std::uint32_t count = std::min(prompt, 32u);
    const std::vector<float> last = queries(prompt - count, count);
    for (std::uint32_t head = 0; head < 2; ++head) {
      policy->begin({.kv_head = head, .tokens = prompt, .queries = count, .last_q = last, .kv = &kv});
      policy->forecast(head, prompt + 1);
    }
    for (n = prompt + 1; n <= prompt + steps; ++n) {
      for (std::uint32_t head = 0; head < 2; ++head) step(head, kv);
    }
    --n;
  }
  void step(std::uint32_t head, LongKv& kv) {
    const FakeNear near(n, spec.near.sink_tokens, spec.near.recent_tokens);
    const std::vector<float> q = queries(n - 1, 1);
    SelectionRow row;
    Bypass bypass;
    SelectCounters counters;
    policy->select({.kv_head = head, .tokens = n, .q = q.data(), .near = &near.set, .kv = &kv}, row, bypass, counters);
    if (policy->wants_observation(head)) {
      policy->observe(head, kv);
      policy->forecast(head, n + 1);
    }
    const std::uint64_t held = policy->heap_bytes(head);
    per_token = std::max(per_token, static_cast<double>(held) / n);
    within = within && held <= policy_state_bytes(spec, kShape, n + 1) / sparse_planes();
  }
  [[nodiscard]] std::uint64_t sparse_planes() const {
    return std::uint64_t{kShape.kv_heads} * (spec.dense(0) ? 1 : 2);
  }
  PolicySpec spec;
  std::unique_ptr<LayerPolicy> policy;
  std::uint32_t n = 0;
  double per_token = 0.0;
  bool within = true;
};

}  // namespace

TEST_CASE("what policies keep is a bounded share of keys and values", "[state_bytes]") {
  struct Case {
    const char* policy;
    std::uint32_t tokens;
    double most;  ///< percent of keys and values
  };
  // MagicPIG's 150 tables list every token: 4 bytes each, and 150 * 1025 places where lists begin.
  const auto [text, tokens, most] = GENERATE(
      Case{"lfps", 8192, 5.0}, Case{"lfps", 65536, 5.0}, Case{"tactic", 8192, 5.0}, Case{"tactic", 65536, 5.0},
      Case{"magicpig", 8192, 135.0}, Case{"magicpig", 65536, 122.0}, Case{"double_sparsity", 8192, 6.7},
      Case{"double_sparsity", 65536, 6.7}, Case{"exact | hadamard", 8192, 6.7}, Case{"exact | hadamard", 65536, 6.7});
  CAPTURE(text, tokens);
  const Life life(text, tokens, 40);
  const double percent = 100.0 * life.per_token / kKvBytes;
  const double planes = static_cast<double>(life.sparse_planes());
  const double bound =
      100.0 * static_cast<double>(policy_state_bytes(life.spec, kShape, tokens)) / planes / tokens / kKvBytes;
  CAPTURE(percent, bound);
  CHECK(percent <= most);
  CHECK(percent > 0.5);  // Something was looked at.
  CHECK(life.within);
  // What an engine counts on beforehand is not much more.
  CHECK(bound <= most);
  // And is enough to take back what was learnt from the newest tokens.
  for (std::uint32_t head = 0; head < 2; ++head) CHECK(life.policy->can_truncate(head, life.n - kUndoTokens));
}

TEST_CASE("the bound of policy state holds from the first token on, in every kind of policy", "[state_bytes]") {
  const std::string text =
      GENERATE("lfps", "lfps:observe_every=4,share_group=on", "history+clusters | top_k=64 | near=0",
               "history | top_p=0.9 | near=0", "exact | top_k=64 | near=0", "clusters | top_p=0.9 | near=0",
               "lsh | top_p=0.95 | near=0", "tactic", "magicpig", "double_sparsity",
               "clusters+labels:channels=100 | top_k=64 | near=0", "adamas | dense=0", "snapkv:budget=300",
               "pyramidkv:budget=300", "adakv:budget=300", "adakv:budget=3000,floor=0%,pyramid=9");
  const std::uint32_t prompt = GENERATE(0u, 1u, 5u, 900u, 3000u);
  CAPTURE(text, prompt);
  const Life life(text, prompt, 200);
  CHECK(life.within);
}

TEST_CASE("policies without state are told so", "[state_bytes]") {
  for (const char* text : {"full", "streaming", "psa", "vattention"})
    CHECK(policy_state_bytes(parse_policy(text), kShape, 65536) == 0);
  const PolicySpec lfps = parse_policy("lfps");
  // One of two layers is dense: half.
  PolicySpec half = lfps;
  half.dense_layers = 1;
  CHECK(policy_state_bytes(half, kShape, 4096) * 2 == policy_state_bytes(lfps, kShape, 4096));
}
