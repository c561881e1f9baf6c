#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/engine_prefix.hpp"

/// What cases of parked sequences share.
namespace sluice::test::parks {

using namespace policies;

inline constexpr const char* kExact = "exact | int4 | top_k=20 | near=0,sinks=4,recent=6";

using Area = std::vector<std::byte>;

inline Area parked(const Engine& engine, SequenceId id, std::string_view model = {}) {
  Area area(engine.park_bytes(id, model));
  REQUIRE(engine.park(id, area, model) == area.size());
  return area;
}

inline EngineOptions room_for(const EngineRig& rig, const PolicySpec& policy, std::uint32_t near = 0) {
  EngineOptions options = options_for(rig, 2, near);
  options.policies.push_back(policy);
  options.cpu_sequences = 6;
  return options;
}

inline Teller told(Engine& engine, const EngineRig& rig, const Story& story, const PolicySpec& policy,
                   std::uint32_t tokens) {
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, tokens);
  return teller;
}

inline Teller resumed(Engine& engine, const Area& area, const Teller& as) {
  Teller teller{.story = as.story, .id = engine.resume(area), .at = as.at};
  REQUIRE(engine.tokens(teller.id) == as.at);
  return teller;
}

/// Of all that an engine has, but for what is near.
inline bool same_memory(const EngineMemoryUse& a, const EngineMemoryUse& b) {
  return a.far_pages_used == b.far_pages_used && a.far_pages_cached == b.far_pages_cached && a.pinned == b.pinned &&
         a.partials == b.partials && a.policies == b.policies && a.prefixes == b.prefixes && a.codes == b.codes &&
         a.digests == b.digests && a.buffers == b.buffers;
}

}  // namespace sluice::test::parks
