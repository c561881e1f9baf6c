#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "tests/support/engine_named.hpp"
#include "tests/support/engine_rig.hpp"

/// What cases of drafts that are verified together share.
namespace sluice::test::drafts {

inline AttentionShape shape_of(std::uint32_t group, std::uint32_t layers = 3) {
  return {.layers = layers, .q_heads = 2 * group, .kv_heads = 2, .head_dim = 64};
}

inline constexpr std::uint32_t kPageTokens = 8;

/// Teams of `drafts` for `teams` sequences.
inline EngineOptions draft_options(const EngineRig& rig, const AttentionShape& shape, std::uint32_t drafts,
                            std::uint32_t teams, std::uint32_t near) {
  EngineOptions options{.shape = shape,
                        .page_tokens = kPageTokens,
                        .kv_dtype = rig.kv_dtype,
                        .largest = {.decode_rows = drafts * teams, .drafts = drafts, .unbounded = true},
                        .threads = 2,
                        .pin_threads = false};
  options.host_bytes = 90 * block_bytes(options);
  options.near_bytes = near * near_block_bytes(options);
  options.sequences = 8;
  options.import_rows = 100;
  return named(options, {kManyTokens});
}

/// Some new tokens of a sequence.
struct Part {
  Teller* teller;
  std::uint32_t count;
};
struct Row {
  std::vector<float> out, lse;
};

/// A forward of these in a bucket; the rows of each, and padding behind them, which must be 0.
inline std::vector<std::vector<Row>> run(Engine& engine, const EngineRig& rig, const Bucket& bucket,
                                  const std::vector<Part>& parts) {
  ForwardTensors tensors(*rig.device, engine.options().shape, bucket.rows());
  std::vector<PlanItem> items;
  std::uint32_t at = 0;
  for (const auto& [teller, count] : parts) {
    items.push_back({.sequence = teller->id, .tokens = count});
    for (std::uint32_t i = 0; i < count; ++i) tensors.set(at++, *teller->story, teller->at + i);
  }
  (void)run_batch(engine, rig, tensors, items, bucket);
  for (std::uint32_t row = at; row < bucket.rows(); ++row) {
    // One by one these would be most of all assertions, and of the time that they take under a sanitizer.
    REQUIRE(std::ranges::all_of(tensors.out(row), [](float x) { return x == 0.f; }));
    REQUIRE(std::ranges::all_of(tensors.lse(row), [](float x) { return x == -INFINITY; }));
  }
  std::vector<std::vector<Row>> rows;
  at = 0;
  for (const auto& [teller, count] : parts) {
    rows.emplace_back();
    for (std::uint32_t i = 0; i < count; ++i, ++at) rows.back().push_back({tensors.out(at), tensors.lse(at)});
    teller->at += count;
  }
  return rows;
}

/// Against the reference, all layers of a row of a team.
inline double error_of(const Row& row, const Story& story, const AttentionShape& shape, const Story::Together& team) {
  double error = 0.0;
  const std::size_t floats = std::size_t{shape.q_heads} * shape.head_dim;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const std::vector<double> want = story.attended_together(layer, team);
    error = std::max(error, difference(std::span(row.out).subspan(layer * floats, floats), want));
  }
  return error;
}

inline constexpr double kTolerance = 1e-3;

}  // namespace sluice::test::drafts
