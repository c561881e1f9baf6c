#pragma once

#include <algorithm>
#include <cmath>

#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/rest_reference.hpp"

/// What cases of rests share: what is not attended is one token more, of an estimated weight and a mean value.
namespace sluice::test::rests {

using namespace policies;

inline constexpr const char* kTopK = "exact | int4 | top_k=12 | rest=mean | near=0,sinks=4,recent=20";
inline constexpr const char* kTopP = "exact | int4 | top_p=0.6 | rest=mean | near=0,sinks=4,recent=20";
inline constexpr RestPolicy kPicks{.sinks = 4, .recent = 20, .picks = 12};
/// As the parser reads 0.6.
inline constexpr RestPolicy kMass{.sinks = 4, .recent = 20, .mass = static_cast<double>(0.6f)};

inline EngineOptions resting(const EngineRig& rig, std::uint32_t rows = 1, std::uint32_t near = 0) {
  EngineOptions options = options_for(rig, rows, near);
  options.value_means = true;
  return options;
}

inline Story story_of(const EngineRig& rig, std::uint32_t tokens, std::uint64_t seed, std::uint32_t page_tokens = 16) {
  Story story(kShape, tokens, seed, page_tokens);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  return story;
}

/// The next token, all of whose layers are held against the reference: outputs, and their lse.
inline void goes_on(Engine& engine, const EngineRig& rig, Teller& teller, const RestPolicy& policy) {
  AttentionShape shape = kShape;
  shape.softcap = engine.options().softcap;
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  bucket.unbounded = policy.mass != 0.0;  // Else a GPU may attend where it chooses.
  ForwardTensors tensors(*rig.device, kShape, bucket.rows());
  tensors.set(0, *teller.story, teller.at);
  const std::array items{PlanItem{.sequence = teller.id}};
  (void)run_batch(engine, rig, tensors, items, bucket);
  const std::vector<float> out = tensors.out(0);
  const std::vector<float> lse = tensors.lse(0);
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    CAPTURE(teller.at, layer);
    const Attention want = attended_with_rest(*teller.story, shape, layer, teller.at, policy);
    REQUIRE(off_in_layer(out, want.out, layer) < tolerance(rig));
    const auto of_layer = std::span(lse).subspan(layer * kShape.q_heads, kShape.q_heads);
    const double largest = std::abs(*std::ranges::max_element(want.lse, {}, [](double x) { return std::abs(x); }));
    REQUIRE(difference(of_layer, want.lse) < tolerance(rig) * std::max(1.0, largest));
  }
  ++teller.at;
}

inline void goes_on(Engine& engine, const EngineRig& rig, Teller& teller, const RestPolicy& policy,
                    std::uint32_t tokens) {
  for (std::uint32_t i = 0; i < tokens; ++i) goes_on(engine, rig, teller, policy);
}

inline Teller begun(Engine& engine, const EngineRig& rig, const Story& story, const char* text, std::uint32_t tokens) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy(text))};
  prefill(engine, rig, teller, tokens);
  return teller;
}

}  // namespace sluice::test::rests
