#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sluice/engine.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"

/// A small sequence that was parked, for tests of what becomes of it.
namespace sluice::test::parked {

using Area = std::vector<std::byte>;

inline constexpr AttentionShape kShape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
inline constexpr const char* kPolicy = "lfps";

inline EngineOptions options() {
  EngineOptions options{.shape = kShape,
                        .page_tokens = 8,
                        .kv_dtype = DType::f32,
                        .policies = {parse_policy(kPolicy)},
                        .largest = {.decode_rows = 1, .unbounded = true},
                        .sequences = 2,
                        .cpu_sequences = 2,
                        .threads = 1,
                        .pin_threads = false};
  options.host_bytes = 2400 * block_bytes(options);
  options.import_rows = 512;
  return options;
}

/// An engine, and what was parked of one of its sequences, which has ended. It has names and queries.
struct Parked {
  explicit Parked(std::uint32_t tokens) : story(kShape, tokens + 10, 401), engine(options(), rig.device) {
    std::vector<std::int32_t> ids;
    for (std::uint32_t i = 0; i < 9; ++i) ids.push_back(static_cast<std::int32_t>(i));
    Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy), ids, 5)};
    import_story(engine, rig, teller, tokens, kNone, tokens - 3);
    area.resize(engine.park_bytes(teller.id, "model"));
    (void)engine.park(teller.id, area, "model");
    id = teller.id;
    before = engine.memory();
  }

  /// Why it was refused. Nothing has changed.
  Errc refused(std::span<const std::byte> bytes) {
    const Errc code = code_of([&] { (void)engine.resume(bytes, "model"); });
    const EngineMemoryUse after = engine.memory();
    REQUIRE(after.far_pages_used == before.far_pages_used);
    REQUIRE(after.far_pages_cached == before.far_pages_cached);
    REQUIRE(after.host() == before.host());
    REQUIRE(after.device() == before.device());
    return code;
  }

  EngineRig rig = engine_rig();
  Story story;
  Engine engine;
  SequenceId id;
  Area area;
  EngineMemoryUse before;
};

}  // namespace sluice::test::parked
