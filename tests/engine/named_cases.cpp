// Engines that are told of their policies, and of nothing else that these want.
#include <array>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_named.hpp"
#include "tests/support/engine_policies.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

constexpr const char* kClustered = "tactic:least=64,size=4,recluster=64 | int4";

/// What every engine is told: shape, rows and memory.
EngineOptions bare(const EngineRig& rig) {
  EngineOptions options{.shape = kShape,
                        .kv_dtype = rig.kv_dtype,
                        .largest = {.decode_rows = 1, .prefill_rows = kChunk, .prefills = 1},
                        .sequences = 3,
                        .threads = 2,
                        .pin_threads = false};
  options.host_bytes = 60 * block_bytes(options);
  return options;
}

/// What `call` is refused with holds all of these.
template <class Call>
void require_refused(Call&& call, Errc code, std::initializer_list<const char*> words) {
  const Refusal refusal = refusal_of(call);
  CAPTURE(refusal.text);
  REQUIRE(refusal.code == code);
  for (const char* const word : words) {
    CAPTURE(word);
    REQUIRE(refusal.text.find(word) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("an engine that is told of a policy serves it, whoever chooses", "[engine][named]") {
  constexpr std::array kPolicies{"lfps",
                                 "magicpig",
                                 "history:observe_every=4 | int4 | top_k=24 | near=0,sinks=4,recent=20",
                                 "snapkv:budget=90,window=40",
                                 "exact | top_p=0.8 | near=0,sinks=2,recent=7",
                                 "pages:quest,budget=96 | top_k=9 | near=0,sinks=4,recent=20",
                                 "labels:channels=8,budget=40 | top_k=max(1, 100%) | near=0,sinks=4,recent=0"};
  const auto* const text = GENERATE_COPY(from_range(kPolicies));
  CAPTURE(text);
  const EngineRig rig = engine_rig();
  Story story(kShape, 300, 77);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  Beside both(rig, story, parse_policy(text), named(bare(rig), {text}));
  both.prefill(270);
  both.decode(286);
}

TEST_CASE("an engine is for the default policy unless it is told otherwise", "[engine][named]") {
  const EngineRig rig = engine_rig();
  Engine engine(bare(rig), rig.device);
  REQUIRE(engine.options().largest.top_k);
  REQUIRE_FALSE(engine.options().largest.unbounded);
  REQUIRE(engine.sizes().cpu_sequences == 0);
  REQUIRE(engine.sizes().cluster_sequences == 0);
  REQUIRE(engine.sizes().code_bits == 4);
  const Story story(kShape, 200, 78);
  Teller sampled{.story = &story, .id = engine.begin(parse_policy("sluice"))};
  prefill(engine, rig, sampled, 190);
  const std::vector<float> out = decode(engine, rig, sampled);
  REQUIRE(error_of(out, story, 190) < tolerance(rig));  // So few tokens are all drawn.
  require_refused([&] { (void)engine.begin(parse_policy("full")); }, Errc::unsupported, {"EngineOptions::policies"});
  require_refused([&] { (void)engine.begin(parse_policy("topk")); }, Errc::out_of_capacity,
                  {"EngineOptions::policies"});
  require_refused([&] { (void)engine.begin(parse_policy("lfps")); }, Errc::unsupported, {"EngineOptions::policies"});
  require_refused([&] { (void)engine.begin(parse_policy("pages:quest,budget=96 | top_k=9 | near=0")); },
                  Errc::unsupported, {"EngineOptions::policies", "ranks pages"});
}

TEST_CASE("room is made for what policies want of the longest sequence, and for as many sequences", "[engine][named]") {
  const EngineRig rig = engine_rig();
  const EngineOptions options = named(bare(rig), {kClustered, "lfps", "quest | near=0"});
  const EngineOptions made = resolved(options);
  REQUIRE(made.largest.max_tokens == 60 * made.page_tokens);
  REQUIRE((made.largest.pages && made.largest.unbounded));
  REQUIRE(made.cpu_sequences == 3);
  REQUIRE(made.cluster_sequences == 3);
  REQUIRE(resolved(made).largest == made.largest);  // It can be built once more of what it was.
  Engine engine(options, rig.device);
  REQUIRE(engine.options().largest == made.largest);
  // The bounds stay as they were given, for engines of other policies that are made of these options.
  REQUIRE(engine.options().cpu_sequences == kAllSequences);
  REQUIRE(engine.options().cluster_sequences == kAllSequences);
  const EngineSizes& sizes = engine.sizes();
  REQUIRE((sizes.cpu_sequences == 3 && sizes.cluster_sequences == 3));
  REQUIRE(sizes.digests == DigestKind::box);
  REQUIRE(sizes.max_clusters >= made.largest.max_tokens / 4);
  REQUIRE(sizes.max_clusters < 4096);
  for (std::uint32_t i = 0; i < 3; ++i) (void)engine.begin(parse_policy(i == 0 ? kClustered : "lfps"));
  // A bound costs less, and is kept to.
  EngineOptions bounded = options;
  bounded.cpu_sequences = bounded.cluster_sequences = 1;
  REQUIRE(memory_needed(bounded, rig.device.get()).pinned < memory_needed(options, rig.device.get()).pinned);
  REQUIRE(memory_needed(bounded, rig.device.get()).buffers < memory_needed(options, rig.device.get()).buffers);
  Engine few(bounded, rig.device);
  (void)few.begin(parse_policy("lfps"));
  require_refused([&] { (void)few.begin(parse_policy("lfps")); }, Errc::out_of_capacity, {"cpu_sequences", "1"});
}

TEST_CASE("policies that no engine serves, or not beside each other, are refused when it is built", "[engine][named]") {
  const EngineRig rig = engine_rig();
  const auto refused = [&](const EngineOptions& options, Errc code, std::initializer_list<const char*> words) {
    require_refused([&] { Engine engine(options, rig.device); }, code, words);
    require_refused([&] { (void)memory_needed(options, rig.device.get()); }, code, words);
  };
  refused(named(bare(rig), {"lfps | near=5%"}), Errc::unsupported, {"EngineOptions::policies", "near=0"});
  refused(named(bare(rig), {"sluice", "exact | int3 | sample=9 | near=0"}), Errc::unsupported,
          {"EngineOptions::policies", "3 bits", "an engine of its own"});
  refused(named(bare(rig), {"quest | near=0", "arkvale | near=0"}), Errc::unsupported,
          {"EngineOptions::policies", "digest", "an engine of its own"});
  EngineOptions none = named(bare(rig), {"lfps"});
  none.cpu_sequences = 0;
  refused(none, Errc::invalid_argument, {"cpu_sequences is 0", "on the CPU"});
  none = named(bare(rig), {kClustered});
  none.cluster_sequences = 0;
  refused(none, Errc::invalid_argument, {"cluster_sequences is 0", "clusters"});
  EngineOptions unknown = bare(rig);
  unknown.policies.front().budget.share = 7.f;
  refused(unknown, Errc::invalid_argument, {"EngineOptions::policies"});
}

TEST_CASE("copies of keys are of the width that policies name", "[engine][named]") {
  const EngineRig rig = engine_rig();
  Engine few(named(bare(rig), {"exact | int3 | sample=12 | near=0"}), rig.device);
  REQUIRE(few.sizes().code_bits == 3);
  (void)few.begin(parse_policy("exact | int3 | sample=12 | near=0"));
  require_refused([&] { (void)few.begin(parse_policy("sluice")); }, Errc::unsupported,
                  {"3", "4", "an engine of its own"});
  Engine scored(named(bare(rig), {"scores | top_k=9 | near=0"}), rig.device);
  REQUIRE(scored.sizes().code_bits == 0);
  REQUIRE(scored.options().largest.scores);
  REQUIRE(scored.memory().codes == 0);
}

TEST_CASE("room is made for several policies in any order", "[engine][named]") {
  const EngineRig rig = engine_rig();
  constexpr std::array kBoth{"exact | int4 | top_k=9 | near=0", kClustered};
  for (const auto& [first, second] : {std::pair(0, 1), std::pair(1, 0)}) {
    CAPTURE(first);
    const EngineOptions made = resolved(named(bare(rig), {kBoth[first], kBoth[second]}));
    REQUIRE(made.cluster_sequences == made.sequences);
    REQUIRE((made.largest.top_k && made.largest.unbounded));
  }
}

TEST_CASE("a policy that wants more than an engine may have is named, and what helps", "[engine][named]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = named(bare(rig), {"exact | int4 | top_k=2% | near=0,recent=1048576"});
  require_refused([&] { (void)resolved(options); }, Errc::invalid_argument,
                  {"EngineOptions::policies: `", "sinks and recent tokens", "lower largest.max_tokens"});
}
