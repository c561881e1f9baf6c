// Embeds the engine as a serving stack would: a prompt in chunks beside a sequence that decodes, drafts verified.
#include <cstdio>
#include <random>
#include <vector>

#include "sluice/engine.hpp"

int main() {
  constexpr sluice::AttentionShape kShape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  sluice::EngineOptions options;
  options.shape = kShape;
  options.host_bytes = 64 * sluice::MiB;
  options.near_bytes = 4 * sluice::MiB;
  const auto policy = sluice::parse_policy("exact | int4 | top_p=0.95 | near=0");
  options.policies = {policy};  // What sequences will be begun with.
  options.largest = {.decode_rows = 4, .prefill_rows = 256, .prefills = 1};
  sluice::Engine engine(options);  // No device given: no GPU needed, and a null stream computes at once.

  // A model computes q, k and v; here they are random.
  std::mt19937 random(7);
  const auto rows = [&](std::uint32_t heads) {
    std::vector<float> data(options.largest.rows() * heads * kShape.head_dim);
    for (float& x : data) x = std::normal_distribution<float>(0.f, 2.f)(random);
    return data;
  };
  const std::vector<float> q = rows(kShape.q_heads), k = rows(kShape.kv_heads), v = rows(kShape.kv_heads);
  std::vector<float> out(q.size());

  // One forward: planned once, attended layer by layer. On a GPU, capture the loop once per bucket and replay it.
  const auto forward = [&](const std::vector<sluice::PlanItem>& items, const sluice::Bucket& bucket) {
    const sluice::Batch batch = engine.plan(items, bucket, nullptr);
    const auto view = [&](auto& data, std::uint32_t heads) {
      return sluice::dense_view(data.data(), sluice::DType::f32, bucket.rows(), heads, kShape.head_dim);
    };
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      engine.attend(bucket, {layer}, view(q, kShape.q_heads), view(k, kShape.kv_heads), view(v, kShape.kv_heads),
                    view(out, kShape.q_heads), nullptr);
    }
    engine.finish(batch);  // Its sequences have their new tokens; or it throws, none has, and it may be planned again.
  };

  const sluice::SequenceId a = engine.begin(policy), b = engine.begin(policy);
  const sluice::Bucket mixed{.decode_rows = 1, .prefill_rows = 256, .prefills = 1, .unbounded = true};
  forward({{.sequence = a, .tokens = 256, .prefill = true}}, mixed);
  for (int chunk = 0; chunk < 4; ++chunk)  // The prompt of b, while a decodes.
    forward({{.sequence = a}, {.sequence = b, .tokens = 256, .prefill = true}}, mixed);

  const sluice::SequenceId c = engine.fork(b, 1000);  // Another answer to most of b's prompt: its blocks are shared.
  forward({{.sequence = a}, {.sequence = c}, {.sequence = b, .tokens = 2}}, {.decode_rows = 4, .unbounded = true});
  engine.truncate(b, 1025);  // The second draft was not accepted.

  std::printf("a has %u tokens, b %u, c %u; %.1f of %.1f MiB in use\n", engine.tokens(a), engine.tokens(b),
              engine.tokens(c), static_cast<double>(engine.memory().far_pages_used) / sluice::MiB,
              static_cast<double>(engine.memory().far_pages) / sluice::MiB);
}
