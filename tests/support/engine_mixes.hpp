#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "tests/support/engine_named.hpp"
#include "tests/support/engine_rig.hpp"

/// What cases of forwards of any mix share: sequences, and what each of their tokens gives alone.
namespace sluice::test::mixes {

inline constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
inline constexpr std::uint32_t kTokens = 70;  // of a story
inline constexpr std::uint32_t kPageTokens = 8;
inline constexpr std::uint32_t kStories = 3;
inline constexpr std::size_t kRow = std::size_t{kShape.q_heads} * kShape.head_dim;
inline constexpr const char* kPolicies[] = {"exact | int4 | top_k=6 | near=0,sinks=2,recent=3",
                                            "exact | int4 | top_k=17 | near=0,sinks=9,recent=1",
                                            "none | near=0,sinks=3,recent=8",
                                            "exact | int4 | top_p=0.8 | near=0,sinks=2,recent=3",
                                            "exact | int4 | top_k=6 | near=0,sinks=2,recent=3 | dense=1",
                                            "full"};
inline constexpr std::uint32_t kWays = std::size(kPolicies);
inline constexpr Bucket kLargest{.decode_rows = 6, .prefill_rows = 30, .prefills = 4, .unbounded = true};

/// Of no layer, of the second, of both. Sequences keep little beyond them, so that pages are passed all the time.
inline const std::vector<std::uint32_t> kWindows[] = {{}, {0, 11}, {21, 9}};
inline constexpr std::uint32_t kSlack = 3;

inline EngineOptions mix_options(const EngineRig& rig, std::uint32_t near_blocks, std::uint32_t windows = 0) {
  EngineOptions options{.shape = kShape, .page_tokens = kPageTokens, .kv_dtype = rig.kv_dtype, .largest = kLargest};
  options.host_bytes = 40 * block_bytes(options);
  options.near_bytes = near_blocks * near_block_bytes(options);
  options.windows = kWindows[windows];
  options.window_slack = kSlack;
  options.sequences = 6;
  options.import_rows = 20;
  options.prefill_window = 16;
  options.threads = 2;
  options.pin_threads = false;
  return named(options, kPolicies);
}

inline std::vector<Story> stories(std::uint32_t windows = 0) {
  std::vector<Story> all;
  for (std::uint64_t i = 0; i < kStories; ++i) {
    all.emplace_back(kShape, kTokens, 300 + i, kPageTokens);
    all.back().see(kWindows[windows]);
  }
  return all;
}

/// What a story's token gives alone: decoded under a policy, or as a chunk of a prompt.
struct Alone {
  std::vector<std::vector<float>> rows[kStories][kWays + 1];  ///< the policies', then a prompt's
};

inline Alone alone(const EngineRig& rig, const std::vector<Story>& stories, std::uint32_t windows = 0) {
  Alone alone;
  Engine engine(mix_options(rig, 0, windows), rig.device);
  ForwardTensors tensors(*rig.device, kShape, kLargest.rows());
  for (std::uint32_t s = 0; s < kStories; ++s) {
    for (std::uint32_t way = 0; way <= kWays; ++way) {
      const SequenceId id = engine.begin(parse_policy(kPolicies[way % kWays]));
      const Bucket bucket = way == kWays ? Bucket{.decode_rows = 0, .prefill_rows = 1, .prefills = 1}
                                         : Bucket{.decode_rows = 1, .unbounded = true};
      for (std::uint32_t token = 0; token < kTokens; ++token) {
        const PlanItem item{.sequence = id, .tokens = 1, .prefill = way == kWays};
        tensors.set(0, stories[s], token);
        const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
        tensors.attend(engine, bucket, rig.stream);
        engine.finish(batch);
        rig.synchronize();
        alone.rows[s][way].push_back(tensors.out(0));
      }
      engine.end(id);
    }
  }
  return alone;
}

}  // namespace sluice::test::mixes
