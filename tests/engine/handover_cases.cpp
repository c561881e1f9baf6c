// Who waits for the CPU's part of a layer, on every device: tokens are the same, and what is late costs one forward.
#include <atomic>
#include <thread>

#include "sluice/error.hpp"
#include "sluice/step/handover_facts.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"
#include "tests/support/forwarding.hpp"
#include "tests/support/pause.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::plain;
using namespace std::chrono_literals;

namespace {

constexpr Handover kModes[] = {Handover::device, Handover::stream, Handover::host};
constexpr const char* kPolicy = "exact | int4 | top_k=10 | near=0,sinks=2,recent=6";
/// The CPU chooses.
constexpr const char* kChosenHere = "exact | top_k=10 | near=0,sinks=2,recent=6";

/// A device that says other things of itself.
class OtherFacts final : public ForwardingDevice {
 public:
  OtherFacts(std::shared_ptr<Device> inner, Handover handover, bool stream_waits)
      : ForwardingDevice(std::move(inner)), info_(inner_->info()) {
    info_.handover = handover;
    info_.stream_waits = stream_waits;
  }
  [[nodiscard]] const DeviceInfo& info() const noexcept override { return info_; }
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return inner_->forward_verbs(); }

 private:
  DeviceInfo info_;
};

struct Stories {
  Story first{kShape, 120, 5};
  Story second{kShape, 110, 7};
};

/// Outputs of ten forwards of two sequences, in order.
std::vector<float> tell(Engine& engine, const EngineRig& rig, const Stories& stories, const PolicySpec& policy) {
  Teller tellers[] = {{.story = &stories.first, .id = engine.begin(policy)},
                      {.story = &stories.second, .id = engine.begin(policy)}};
  for (Teller& teller : tellers) import_story(engine, rig, teller, 90, kNone, 60);
  ForwardTensors tensors(*rig.device, kShape, 2);
  std::vector<float> all;
  for (int step = 0; step < 10; ++step) {
    for (const auto& out : run_forward(engine, rig, tensors, {&tellers[0], &tellers[1]}))
      all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

}  // namespace

TEST_CASE("tokens are the same whoever waits for the CPU", "[engine][handover]") {
  const EngineRig rig = engine_rig();
  const auto [policy, placement, near, share] = GENERATE(table<std::string, PlacementMode, std::uint32_t, float>(
      {{kPolicy, PlacementMode::hybrid, 0u, 0.f},
       {kPolicy, PlacementMode::hybrid, 6u, 0.4f},
       {kPolicy, PlacementMode::stream, 4u, 0.f},
       {kChosenHere, PlacementMode::hybrid, 6u, 0.f},
       {kChosenHere, PlacementMode::hybrid, 0u, 1.f},  // The device attends all that it chose; this it has not.
       {kChosenHere, PlacementMode::stream, 0u, 0.f},
       {"exact | int4 | top_p=0.8 | near=0,sinks=2,recent=6", PlacementMode::hybrid, 4u, 0.f}}));
  CAPTURE(policy, to_string(placement), near, share);
  const PolicySpec spec = parse_policy(policy);
  const Stories stories;
  std::vector<float> want;
  std::uint64_t asked = 0;
  for (const Handover mode : kModes) {
    CAPTURE(to_string(mode));
    EngineOptions options = options_for(rig, 2, 60, near);
    options.placement = placement;
    options.fetch_share = share;
    options.handover = mode;
    options.policies = {spec};
    Engine engine(options, rig.device);
    REQUIRE(engine.options().handover == mode);
    const auto got = tell(engine, rig, stories, spec);
    const EngineStats stats = engine.stats();
    if (want.empty()) {
      want = got;
      asked = stats.asked;
    }
    REQUIRE(got == want);
    REQUIRE(stats.asked == asked);
    if (mode == Handover::host) REQUIRE((stats.waited_ns > 0) == (asked > 0));
    if (mode == Handover::stream && placement == PlacementMode::hybrid && !rig.on_gpu) REQUIRE(stats.waited_ns == 0);
  }
  REQUIRE((asked > 0) == (placement == PlacementMode::hybrid || policy == kChosenHere));
}

TEST_CASE("an answer that is late costs one forward, whoever waits, and its other layers nothing",
          "[engine][handover]") {
  const EngineRig rig = engine_rig();
  const Handover mode = GENERATE(from_range(std::begin(kModes), std::end(kModes)));
  const bool chosen_here = GENERATE(false, true);  // And fetched over the link.
  CAPTURE(to_string(mode), chosen_here);
  const PolicySpec spec = parse_policy(chosen_here ? kChosenHere : kPolicy);
  EngineOptions options = options_for(rig, 2, 60, 0);
  options.handover = mode;
  if (chosen_here) options.placement = PlacementMode::stream;
  options.policies = {spec};
  constexpr auto kStall = 1500ms;
  std::atomic<bool> stalls{false};
  options.answer_timeout = 400ms;
  options.before_answer = [&] {
    if (stalls.exchange(false)) pause_for(kStall);
  };
  Engine engine(options, rig.device);
  const Stories stories;
  Teller tellers[] = {{.story = &stories.first, .id = engine.begin(spec)},
                      {.story = &stories.second, .id = engine.begin(spec)}};
  for (Teller& teller : tellers) import_story(engine, rig, teller, 90, kNone, 60);
  ForwardTensors tensors(*rig.device, kShape, 2);
  const SequenceId ids[] = {tellers[0].id, tellers[1].id};
  int failures = 0;
  for (std::uint32_t step = 0; step < 8; ++step) {
    if (step % 4 == 1) {
      stalls = true;
      for (std::uint32_t row = 0; row < 2; ++row) tensors.set(row, *tellers[row].story, tellers[row].at);
      const std::uint64_t asked = engine.stats().asked;
      const auto begin = RunClock::now();
      const Batch batch = engine.plan(one_each(ids), engine.options().largest, rig.stream);
      tensors.attend(engine, rig.stream);
      rig.synchronize();
      const auto took = RunClock::now() - begin;
      REQUIRE(took >= options.answer_timeout);
      // Nothing has waited for the thread, nor once more in each of the two layers that follow.
      REQUIRE(took < options.answer_timeout * 5 / 2);
      REQUIRE(engine.stats().asked == asked + 1);
      for (const std::uint32_t row : {0u, 1u}) REQUIRE(std::isnan(tensors.out(row).back()));
      REQUIRE(code_of([&] { engine.finish(batch); }) == Errc::device);
      REQUIRE(engine.tokens(ids[0]) == tellers[0].at);
      ++failures;
    }
    const auto out = run_forward(engine, rig, tensors, {&tellers[0], &tellers[1]});
    for (const auto& each : out) REQUIRE_FALSE(std::isnan(each.back()));
    if (chosen_here) continue;
    REQUIRE(error_of(out[0], stories.first, tellers[0].at - 1, 2, 6, 10) < kTolerance);
    REQUIRE(error_of(out[1], stories.second, tellers[1].at - 1, 2, 6, 10) < kTolerance);
  }
  REQUIRE(failures == 2);
}

TEST_CASE("with handover host a stream that stands still ends the call, and the forward can be cancelled",
          "[engine][handover]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = options_for(rig, 1, 40, 0);
  options.handover = Handover::host;
  options.timeout = 300ms;
  Engine engine(options, rig.device);
  REQUIRE_FALSE(engine.captures());
  const Story story(kShape, 110, 8);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const auto flags = rig.device->allocate_pinned(sizeof(Flag));
  Flag& flag = *new (flags->data()) Flag;
  tensors.set(0, story, teller.at);
  const Batch batch = engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream);
  rig.queue->wait(flag, 1);
  REQUIRE(code_of([&] { tensors.attend(engine, rig.stream); }) == Errc::timeout);
  flag.signal(1);
  engine.cancel(batch);
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(error_of(out[0], story, teller.at - 1, 2, 6, 10) < kTolerance);
  }
}

TEST_CASE("who waits is as the device says, or as it can be", "[engine][handover]") {
  const EngineRig rig = engine_rig();
  for (const Handover says : kModes) {
    const auto device = std::make_shared<OtherFacts>(rig.device, says, true);
    EngineOptions options = options_for(rig, 1, 10, 0);
    REQUIRE(Engine(options, device).options().handover == says);
    options.handover = Handover::host;
    REQUIRE(Engine(options, device).options().handover == Handover::host);
  }
  const auto device = std::make_shared<OtherFacts>(rig.device, Handover::device, false);
  EngineOptions options = options_for(rig, 1, 10, 0);
  options.handover = Handover::stream;
  REQUIRE(code_of([&] { Engine(options, device); }) == Errc::unsupported);
  options.handover = static_cast<Handover>(4);
  REQUIRE(code_of([&] { Engine(options, device); }) == Errc::invalid_argument);
}

TEST_CASE("what a device waits by goes by what it is", "[handover]") {
  REQUIRE(advised_handover({.stream_waits = true}) == Handover::device);
  REQUIRE(advised_handover({.shared = true, .stream_waits = true, .captures_waits = true}) == Handover::host);
  REQUIRE(advised_handover({.kernel_limit = true, .stream_waits = true}) == Handover::stream);
  REQUIRE(advised_handover({.kernel_limit = true}) == Handover::host);
  REQUIRE(std::string(handover_reason({})).empty());
  for (const HandoverFacts& facts : {HandoverFacts{.shared = true}, HandoverFacts{.kernel_limit = true}})
    REQUIRE(std::string(handover_reason(facts)).size() > 10);
  for (const Handover each : {Handover::automatic, Handover::device, Handover::stream, Handover::host})
    REQUIRE(parse_handover(to_string(each)) == each);
  REQUIRE(code_of([] { (void)parse_handover("kernel"); }) == Errc::invalid_argument);
}
