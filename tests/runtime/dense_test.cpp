// With a budget of everything, every way through the runtime is dense attention.
#include "sluice/error.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 6, .kv_heads = 2, .head_dim = 64};
constexpr double kTolerance = 2e-5;

}  // namespace

TEST_CASE("full attention is dense for every page size, near share and placement", "[runtime]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::uint32_t page_tokens = kSanitized ? 16u : GENERATE(8u, 16u, 32u, 64u);
  const std::string near = GENERATE("1%", "10%", "50%", "100%");
  const PlacementMode placement =
      GENERATE(PlacementMode::hybrid, PlacementMode::stream, PlacementMode::near, PlacementMode::automatic);
  CAPTURE(page_tokens, near, to_string(placement));
  const Toy toy(kShape, 300, 11);
  RuntimeOptions options = toy_options(kShape, 400);
  options.page_tokens = page_tokens;
  options.placement = placement;
  Runtime runtime(options, device_of(drive));
  const SequenceId id = runtime.begin(parse_policy("full:near=" + near));
  REQUIRE(worst_error(decode(runtime, id, toy, 270, drive), toy, 270) < kTolerance);

  const Stats stats = runtime.stats(id);
  REQUIRE(stats.attended_tokens == stats.dense_tokens);
  REQUIRE(stats.attended_tokens == stats.near_tokens + stats.far_tokens + stats.fetched_tokens);
  REQUIRE(stats.steps == 30);
  REQUIRE(stats.prefill_tokens == 270);
  if (placement == PlacementMode::hybrid) REQUIRE(stats.fetched_tokens == 0);
  if (placement == PlacementMode::stream) REQUIRE(stats.far_tokens == 0);
  if (placement == PlacementMode::near) REQUIRE(stats.near_tokens == stats.dense_tokens);
}

TEST_CASE("a policy whose budget is everything is dense", "[runtime]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::string policy = GENERATE("topk:budget=100%", "lfps:budget=100%,bypass=0,alpha=0.000001,min_tokens=100000",
                                      "history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(100000, 100%) | near=3%", "streaming:recent=100000");
  CAPTURE(policy);
  const Toy toy(kShape, 200, 12);
  Runtime runtime(toy_options(kShape, 250), device_of(drive));
  const SequenceId id = runtime.begin(parse_policy(policy));
  REQUIRE(worst_error(decode(runtime, id, toy, 170, drive), toy, 170) < kTolerance);
}

TEST_CASE("the audit reports every head of every audited step, and dense attention covers all", "[runtime]") {
  const Toy toy(kShape, 210, 19);
  RuntimeOptions options = toy_options(kShape, 250);
  options.audit_every = 3;
  Runtime runtime(options);
  const SequenceId dense = runtime.begin(parse_policy("full:near=20%"));
  decode(runtime, dense, toy, 200);
  const std::uint64_t audited_steps = 4;  // Of ten: 0, 3, 6 and 9.
  const ShareHistogram all = runtime.stats(dense).coverage;
  REQUIRE(all.count() == audited_steps * kShape.layers * kShape.q_heads);
  REQUIRE(all.min() > 0.9999);
  runtime.end(dense);

  const SequenceId sparse = runtime.begin(parse_policy("streaming:recent=20"));
  decode(runtime, sparse, toy, 200);
  const ShareHistogram some = runtime.stats(sparse).coverage;
  REQUIRE(some.count() == audited_steps * kShape.layers * kShape.q_heads);
  REQUIRE(some.mean() < 0.9);
  REQUIRE(some.min() > 0.0);
}

TEST_CASE("a sequence may start from nothing and from one token", "[runtime]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::string policy = GENERATE("full", "topk", "streaming", "lfps:bypass=0", "sluice");
  const std::uint32_t prompt = GENERATE(0u, 1u, 2u);
  CAPTURE(policy, prompt);
  const Toy toy(kShape, 20, 13);
  Runtime runtime(toy_options(kShape, 600), device_of(drive));
  const SequenceId id = runtime.begin(parse_policy(policy));
  REQUIRE(worst_error(decode(runtime, id, toy, prompt, drive), toy, prompt) < kTolerance);
  REQUIRE(runtime.tokens(id) == 20);
}

TEST_CASE("the same policy gives the same attention under every placement", "[runtime]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::string policy = GENERATE("topk:budget=5%", "lfps:bypass=0", "sluice");
  CAPTURE(policy);
  const Toy toy(kShape, 460, 14);
  std::vector<std::vector<float>> outputs;
  for (const PlacementMode mode : {PlacementMode::hybrid, PlacementMode::stream, PlacementMode::automatic}) {
    RuntimeOptions options = toy_options(kShape, 500);
    options.placement = mode;
    Runtime runtime(options, device_of(drive));
    outputs.push_back(decode(runtime, runtime.begin(parse_policy(policy)), toy, 400, drive));
  }
  REQUIRE(worst_difference(outputs[0], outputs[1]) < kTolerance);
  REQUIRE(worst_difference(outputs[0], outputs[2]) < kTolerance);
}

TEST_CASE("the same run gives the same bits", "[runtime]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const Toy toy(kShape, 420, 15);
  RuntimeOptions options = toy_options(kShape, 450);
  options.near_bytes = options.host_bytes / 5;  // Sequences compete for slots.
  std::vector<float> first;
  for (int run = 0; run < 3; ++run) {
    Runtime runtime(options, device_of(drive));
    const std::vector<float> out = decode(runtime, runtime.begin(parse_policy("history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=15%,recent=16")), toy, 380, drive);
    if (run == 0) first = out;
    REQUIRE(out == first);
  }
}

TEST_CASE("an imported prefix decodes like a computed one", "[runtime]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::string policy = GENERATE("full", "lfps", "sluice");
  CAPTURE(policy);
  const std::uint32_t prompt = 150;
  const Toy toy(kShape, 170, 16);
  Runtime runtime(toy_options(kShape, 400), device_of(drive));
  const SequenceId computed = runtime.begin(parse_policy(policy));
  const std::vector<float> want = decode(runtime, computed, toy, prompt, drive);
  runtime.end(computed);

  const SequenceId imported = runtime.begin(parse_policy(policy));
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    runtime.import_prefix({.sequence = imported,
                           .layer = LayerId{layer},
                           .k = toy.k(layer, 0, prompt),
                           .v = toy.v(layer, 0, prompt),
                           .last_q = toy.q(layer, prompt - 32, 32)});
  }
  REQUIRE(decode_rest(runtime, imported, toy, prompt, drive) == want);
}

TEST_CASE("prompt attention is dense whatever the chunk", "[runtime]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::uint32_t chunk = GENERATE(1u, 7u, 16u, 33u, 150u);
  CAPTURE(chunk);
  const Toy toy(kShape, 150, 17);
  Runtime runtime(toy_options(kShape, 200), device_of(drive));
  const SequenceId id = runtime.begin(parse_policy("full"));
  const std::vector<float> out = prefill(runtime, id, toy, 150, chunk, drive);
  double worst = 0.0;
  for (const std::uint32_t token : {0u, 1u, 15u, 16u, 63u, 64u, 149u}) {
    const std::vector<double> want = toy.dense(kShape.layers - 1, token);
    for (std::size_t i = 0; i < want.size(); ++i) worst = std::max(worst, std::abs(want[i] - out[token * want.size() + i]));
  }
  REQUIRE(worst < kTolerance);
}

TEST_CASE("a second prompt may follow decoded tokens", "[runtime]") {
  const Drive drive = GENERATE(Drive::waiting, Drive::queued);
  CAPTURE(to_string(drive));
  const std::string policy = GENERATE("full:near=30%", "history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(100000, 100%) | near=3%");
  CAPTURE(policy);
  const Toy toy(kShape, 200, 18);
  Runtime runtime(toy_options(kShape, 250), device_of(drive));
  const SequenceId id = runtime.begin(parse_policy(policy));
  prefill(runtime, id, toy, 90, 64, drive);
  std::vector<float> between(std::size_t{11} * kShape.layers * kShape.q_heads * kShape.head_dim);
  for (std::uint32_t i = 0; i < 11; ++i) {
    step_into(runtime, id, toy, 90 + i, between.data() + between.size() / 11 * i, drive);
  }
  prefill_range(runtime, id, toy, 101, 151, 50, drive);
  REQUIRE(worst_error(decode_rest(runtime, id, toy, 151, drive), toy, 151) < kTolerance);
}

TEST_CASE("a batch of different lengths decodes like its sequences alone", "[runtime]") {
  const std::string policy = GENERATE("full", "topk:budget=10%", "sluice");
  CAPTURE(policy);
  const std::vector<std::uint32_t> prompts{1, 17, 130};
  RuntimeOptions options = toy_options(kShape, 600);
  std::vector<Toy> toys;
  std::vector<std::vector<float>> alone;
  for (std::uint32_t i = 0; i < prompts.size(); ++i) {
    toys.emplace_back(kShape, prompts[i] + 8, 20 + i);
    Runtime runtime(options);
    alone.push_back(decode(runtime, runtime.begin(parse_policy(policy)), toys[i], prompts[i]));
  }

  Runtime runtime(options);
  std::vector<SequenceId> ids;
  for (std::uint32_t i = 0; i < prompts.size(); ++i) {
    ids.push_back(runtime.begin(parse_policy(policy)));
    prefill(runtime, ids[i], toys[i], prompts[i], 64);
  }
  const std::size_t q_size = std::size_t{kShape.q_heads} * kShape.head_dim;
  const std::size_t kv_size = std::size_t{kShape.kv_heads} * kShape.head_dim;
  for (std::uint32_t s = 0; s < 8; ++s) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      std::vector<float> q, k, v, out(ids.size() * q_size);
      for (std::uint32_t i = 0; i < ids.size(); ++i) {
        const auto add = [](std::vector<float>& to, const TensorView& from, std::size_t count) {
          const auto* data = reinterpret_cast<const float*>(from.data);
          to.insert(to.end(), data, data + count);
        };
        add(q, toys[i].q(layer, prompts[i] + s, 1), q_size);
        add(k, toys[i].k(layer, prompts[i] + s, 1), kv_size);
        add(v, toys[i].v(layer, prompts[i] + s, 1), kv_size);
      }
      const auto batch = static_cast<std::uint32_t>(ids.size());
      runtime.step({.layer = LayerId{layer},
                    .sequences = ids,
                    .q = dense_view(std::as_const(q).data(), DType::f32, batch, kShape.q_heads, kShape.head_dim),
                    .k = dense_view(std::as_const(k).data(), DType::f32, batch, kShape.kv_heads, kShape.head_dim),
                    .v = dense_view(std::as_const(v).data(), DType::f32, batch, kShape.kv_heads, kShape.head_dim),
                    .out = dense_view(out.data(), DType::f32, batch, kShape.q_heads, kShape.head_dim)});
      for (std::uint32_t i = 0; i < ids.size(); ++i) {
        double worst = 0.0;
        for (std::size_t c = 0; c < q_size; ++c) {
          worst = std::max<double>(worst, std::abs(out[i * q_size + c] - alone[i][(s * kShape.layers + layer) * q_size + c]));
        }
        CAPTURE(s, layer, i);
        REQUIRE(worst < kTolerance);
      }
    }
  }
}
