#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>

#include "tests/support/catch.hpp"
#include "tests/support/draw_reference.hpp"
#include "tests/support/engine_policies.hpp"

/// What cases of drawn tokens share.
namespace sluice::test::draws {

using namespace policies;

inline constexpr const char* kSample = "exact | int4 | sample=12 | near=0,sinks=4,recent=20";
inline constexpr DrawPolicy kDraws{.sinks = 4, .recent = 20, .drawn = 12};
inline constexpr const char* kSampleError = "exact | int4 | sample=6,error=20%,most=24 | near=0,sinks=4,recent=20";
inline constexpr DrawPolicy kErrorDraws{.sinks = 4, .recent = 20, .drawn = 6, .error = 0.2, .most = 24};

inline Story story_of(const EngineRig& rig, std::uint32_t tokens, std::uint64_t seed) {
  Story story(kShape, tokens, seed);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  return story;
}

/// How many layers were held against the reference, and how many were too close to call.
struct Held {
  std::uint32_t layers = 0;
  std::uint32_t close = 0;
  /// Most were, and some at all.
  void require() const {
    CAPTURE(layers, close);
    REQUIRE(layers > 4 * close);
  }
};

/// Outputs of all layers, and their lse, are what the reference says.
inline void require_drawn(const EngineRig& rig, std::span<const float> out, std::span<const float> lse,
                          const Story& story, const AttentionShape& shape, const DrawTeam& team,
                          const DrawPolicy& policy, Held& held) {
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    CAPTURE(team.first, team.draft, layer);
    const std::optional<Attention> want = attended_with_draws(story, shape, layer, team, policy);
    held.layers += want ? 1 : 0;
    held.close += want ? 0 : 1;
    if (!want) continue;
    REQUIRE(off_in_layer(out, want->out, layer) < tolerance(rig));
    // A sum whose logarithm is some hundred has fewer digits behind the point.
    double largest = 0.0;
    for (const double each : want->lse) largest = std::isfinite(each) ? std::max(largest, std::abs(each)) : largest;
    REQUIRE(difference(lse.subspan(layer * shape.q_heads, shape.q_heads), want->lse) <
            2 * tolerance(rig) + 0x1p-22 * largest);
  }
}

/// The next tokens of a sequence, each held against the reference.
inline void goes_on(Engine& engine, const EngineRig& rig, Teller& teller, const DrawPolicy& policy,
                    std::uint32_t tokens, Held& held) {
  AttentionShape shape = kShape;
  shape.softcap = engine.options().softcap;
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  bucket.unbounded = false;  // Else a GPU does not attend where it chooses.
  ForwardTensors tensors(*rig.device, kShape, bucket.rows());
  for (std::uint32_t i = 0; i < tokens; ++i, ++teller.at) {
    tensors.set(0, *teller.story, teller.at);
    const std::array items{PlanItem{.sequence = teller.id}};
    (void)run_batch(engine, rig, tensors, items, bucket);
    require_drawn(rig, tensors.out(0), tensors.lse(0), *teller.story, shape, {.first = teller.at}, policy, held);
  }
}

/// `story` has ties, then keys that stand out by `scale`, then keys that are no numbers.
inline void require_hard_keys(const EngineRig& rig, const EngineOptions& options, Story story, float scale,
                              std::string_view text, const DrawPolicy& policy) {
  const auto kind = GENERATE(0, 1, 2);
  CAPTURE(kind);
  if (kind == 0) story.repeat_keys(9);
  if (kind == 1) story.scale_queries(205, scale);
  if (kind == 2) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) story.poison(layer, 60 + layer);
  }
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
  import_story(engine, rig, teller, 200);  // A prompt would attend keys that are no numbers.
  Held held;
  goes_on(engine, rig, teller, policy, 20, held);
  held.require();
}

/// On a GPU four blocks and more share a row of `story`, which has 5,016 tokens. `options`: room for a row or two.
inline Held over_many_tokens(const EngineRig& rig, EngineOptions options, const Story& story, std::string_view text,
                             const DrawPolicy& policy) {
  options.host_bytes = 700 * block_bytes(options);
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
  import_story(engine, rig, teller, 5006);
  Held held;
  goes_on(engine, rig, teller, policy, 6, held);
  return held;
}

inline Teller begun(Engine& engine, const EngineRig& rig, const Story& story, const char* text, std::uint32_t tokens) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
  prefill(engine, rig, teller, tokens);
  return teller;
}

}  // namespace sluice::test::draws
