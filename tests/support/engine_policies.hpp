#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "sluice/audit.hpp"
#include "sluice/engine.hpp"
#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_named.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/policy_reference.hpp"

/// What cases of policies that choose on the CPU share.
namespace sluice::test::policies {

inline constexpr AttentionShape kShape{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
inline constexpr std::uint32_t kChunk = 100;
inline const std::size_t kRow = std::size_t{kShape.q_heads} * kShape.head_dim;

inline EngineOptions options_for(const EngineRig& rig, std::uint32_t rows, std::uint32_t near) {
  EngineOptions options{
      .shape = kShape,
      .kv_dtype = rig.kv_dtype,
      .largest = {.decode_rows = rows, .prefill_rows = kChunk, .prefills = 2, .unbounded = true, .rehearsed = true},
      .threads = 2,
      .pin_threads = false};
  options.host_bytes = 100 * block_bytes(options);
  options.near_bytes = near * near_block_bytes(options);
  options.sequences = 8;
  options.cpu_sequences = options.cluster_sequences = 6;
  options.prefill_window = 64;
  return named(options, {kManyTokens, kOnCpu, kManyClusters});
}

/// The same for policies that rank pages, too, by such digests.
inline EngineOptions paged_options(const EngineRig& rig, std::uint32_t rows, std::uint32_t near, DigestKind digests) {
  EngineOptions options = options_for(rig, rows, near);
  options.policies.push_back(parse_policy(many_pages(digests)));
  return options;
}

/// The largest difference of a token's outputs in one layer.
inline double off_in_layer(std::span<const float> got, std::span<const double> want, std::uint32_t layer) {
  return difference(got.subspan(layer * kRow, kRow), want);
}

/// Of all layers of a token that attended everything it sees.
inline double error_of(const std::vector<float>& got, const Story& story, std::uint32_t token) {
  double error = 0.0;
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    const std::vector<double> want = story.attended(layer, token, 100'000, 1, 0);
    error = std::max(error, off_in_layer(got, want, layer));
  }
  return error;
}

/// Runs one forward of these; outputs of the first row of each.
inline std::vector<std::vector<float>> run(Engine& engine, const EngineRig& rig, const std::vector<Teller*>& tellers,
                                           const std::vector<std::uint32_t>& counts, bool prefill) {
  // Without rows of prompts where there are none: as padding they would take longer than all else.
  Bucket bucket = engine.options().largest;
  if (!prefill) bucket.prefill_rows = bucket.prefills = 0;
  ForwardTensors tensors(*rig.device, kShape, bucket.rows());
  std::vector<PlanItem> items;
  std::uint32_t row = 0;
  for (std::size_t i = 0; i < tellers.size(); ++i) {
    items.push_back({.sequence = tellers[i]->id, .tokens = counts[i], .prefill = prefill});
    for (std::uint32_t t = 0; t < counts[i]; ++t) tensors.set(row++, *tellers[i]->story, tellers[i]->at + t);
  }
  (void)run_batch(engine, rig, tensors, items, bucket);
  std::vector<std::vector<float>> out;
  row = 0;
  for (std::size_t i = 0; i < tellers.size(); ++i) {
    out.push_back(tensors.out(row));
    row += counts[i];
    tellers[i]->at += counts[i];
  }
  return out;
}

inline void prefill(Engine& engine, const EngineRig& rig, Teller& teller, std::uint32_t tokens) {
  while (teller.at < tokens) (void)run(engine, rig, {&teller}, {std::min(kChunk, tokens - teller.at)}, true);
}

inline std::vector<float> decode(Engine& engine, const EngineRig& rig, Teller& teller) {
  return run(engine, rig, {&teller}, {1}, false)[0];
}

inline double tolerance(const EngineRig& rig) { return rig.kv_dtype == DType::f32 ? 2e-5 : 2e-3; }

/// A sequence of an engine beside what its policy attends by itself.
struct Beside {
  Beside(const EngineRig& of, const Story& story, const PolicySpec& policy, const EngineOptions& options)
      : rig(of),
        reference(of, story, kShape, policy),
        engine(options, of.device),
        teller{.story = &story, .id = engine.begin(policy)} {}
  /// The next tokens are a prompt's, up to this one.
  void prefill(std::uint32_t tokens) {
    reference.prefill(tokens);
    policies::prefill(engine, rig, teller, tokens);
  }
  /// They are decoded: the same comes of both.
  void decode(std::uint32_t tokens) {
    while (teller.at < tokens) {
      const std::vector<float> want = reference.decode();
      CAPTURE(teller.at);
      REQUIRE(difference(policies::decode(engine, rig, teller), want) < tolerance(rig));
    }
  }

  const EngineRig& rig;
  Reference reference;
  Engine engine;
  Teller teller;
};

/// The same tokens were attended, wherever they were.
inline void require_same_audit(const AuditReport& got, const AuditReport& want) {
  REQUIRE(got.attended_tokens == want.attended_tokens);
  REQUIRE(got.heads.size() == want.heads.size());
  REQUIRE(!got.heads.empty());
  for (std::size_t i = 0; i < got.heads.size(); ++i) {
    CAPTURE(i);
    REQUIRE(got.heads[i].overlap == want.heads[i].overlap);
    REQUIRE(got.heads[i].coverage == Approx(want.heads[i].coverage).margin(1e-3));
  }
}

/// A sequence of a batch.
struct Mate {
  const char* policy;
  std::uint32_t prompt;
};

/// Each of these decodes `steps` tokens alone, near nothing, and then in batches of mates that change; it must attend
/// the same. options(rows, near blocks).
template <class Options>
void require_same_in_batch(const EngineRig& rig, const Options& options, std::uint32_t near, std::uint32_t steps,
                           const std::vector<Mate>& mates) {
  const auto count = static_cast<std::uint32_t>(mates.size());
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < count; ++i) stories.emplace_back(kShape, mates[i].prompt + steps, 150 + i);
  const auto begin = [&](Engine& engine, std::uint32_t i) {
    Teller teller{.story = &stories[i], .id = engine.begin(parse_policy(mates[i].policy))};
    prefill(engine, rig, teller, mates[i].prompt);
    return teller;
  };
  std::vector<std::vector<std::vector<float>>> alone(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    Engine engine(options(count, 0), rig.device);
    Teller teller = begin(engine, i);
    for (std::uint32_t s = 0; s < steps; ++s) alone[i].push_back(decode(engine, rig, teller));
  }
  Engine engine(options(count, near), rig.device);
  std::vector<Teller> tellers;
  for (std::uint32_t i = 0; i < count; ++i) tellers.push_back(begin(engine, i));
  for (std::uint32_t s = 0; s < 3 * steps; ++s) {
    std::vector<Teller*> batch;
    for (std::uint32_t i = 0; i < count; ++i) {
      Teller& teller = tellers[(i + s) % count];
      if ((i * 7 + s * 3) % 5 < 3 && teller.at < teller.story->tokens()) batch.push_back(&teller);
    }
    if (batch.empty()) continue;
    const auto out = run(engine, rig, batch, std::vector<std::uint32_t>(batch.size(), 1), false);
    for (std::size_t row = 0; row < batch.size(); ++row) {
      const auto i = static_cast<std::size_t>(batch[row] - tellers.data());
      CAPTURE(near, s, mates[i].policy);
      REQUIRE(difference(out[row], alone[i][batch[row]->at - mates[i].prompt - 1]) < tolerance(rig));
    }
  }
}

}  // namespace sluice::test::policies
