// Choices that threads of the CPU share, on every device.
#include <map>
#include <set>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"

using namespace sluice;
using namespace sluice::test;

TEST_CASE("threads that have nothing to choose for help one that has, and it chooses the same",
          "[engine][shared_calls]") {
  constexpr AttentionShape kOne{.layers = 2, .q_heads = 4, .kv_heads = 1, .head_dim = 64};
  constexpr std::uint32_t kPrompt = 4'500;
  const EngineRig rig = engine_rig();
  const Story story(kOne, kPrompt + 200, 96);
  EngineOptions options = plain::options_for(rig, 1, 300, 0);
  options.shape = kOne;
  options.host_bytes = 300 * block_bytes(options);
  options.largest.unbounded = options.largest.trace = true;
  options.policies = {parse_policy("exact | top_k=10 | near=0,sinks=2,recent=6")};
  const auto tell = [&](std::uint32_t threads) {
    options.threads = threads;
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(options.policies.front())};
    import_story(engine, rig, teller, kPrompt);
    ForwardTensors tensors(*rig.device, kOne, 1);
    std::vector<std::vector<float>> out;
    bool helped = false;
    while (teller.at < story.tokens() && !(helped && out.size() >= 8)) {
      tensors.set(0, story, teller.at++);
      const PlanItem item{.sequence = teller.id};
      const Batch batch = run_batch(engine, rig, tensors, {&item, 1}, options.largest);
      out.push_back(tensors.out(0));
      std::map<std::uint32_t, std::set<std::uint32_t>> choosing;
      for (const TraceSpan& span : engine.trace(batch).spans) {
        if (span.stage == Stage::choose_far) choosing[span.layer].insert(span.thread);
      }
      REQUIRE(choosing.size() == kOne.layers);
      for (const auto& [layer, by] : choosing) helped = helped || by.size() > 1;
    }
    REQUIRE(helped == (threads > 1));
    return out;
  };
  const auto want = tell(1);
  const auto got = tell(3);
  for (std::size_t i = 0; i < got.size(); ++i) REQUIRE(got[i] == want[i]);
}
