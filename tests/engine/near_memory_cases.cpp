// What is near of each sequence, and of all together, on every device.
#include <optional>

#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

/// Sequences that come and go. Each shares pages with one other at most, so that what both hold counts twice.
class Crowd {
 public:
  Crowd(const EngineRig& rig, const EngineOptions& options, std::uint64_t seed)
      : rig_(rig), story_(kShape, 400, 77), engine_(options, rig.device), random_(seed) {}

  void turn() {
    switch (const std::uint32_t kind = random_.below(12); kind) {
      case 0:
      case 1:
      case 2: return begin();
      case 3:
      case 4: return fork();
      case 5: return end();
      case 6: return truncate();
      case 7: return live_.empty() ? begin() : engine_.preempt(any().teller.id);
      default: return decode();
    }
  }

  /// When a forward has ended since sequences ended. One that ends may let go of pages that windows have passed: then
  /// what is near of these goes with the next, which seldom passes another one.
  void check() {
    if (live_.empty()) begin();
    decode();
    for (int more = 2; more != 0 && windows() && near_of_all() != 2 * engine_.memory().near_pages_used; --more)
      decode();
    REQUIRE(near_of_all() == 2 * engine_.memory().near_pages_used);
    const EngineMemoryUse all = engine_.memory();
    REQUIRE(all.near_pages_used <= all.near_pages);
    full_ += all.near_pages_used == all.near_pages ? 1 : 0;
  }
  [[nodiscard]] int times_full() const noexcept { return full_; }
  [[nodiscard]] int times_shared() const noexcept { return shared_; }
  [[nodiscard]] std::uint64_t promoted() const { return engine_.stats().promoted; }

 private:
  struct Member {
    Teller teller;
    std::optional<SequenceId> mate{};  ///< with which it may share pages
  };

  [[nodiscard]] bool windows() const noexcept { return !engine_.options().windows.empty(); }
  /// Twice what is near of all sequences: what two share they both have.
  [[nodiscard]] std::uint64_t near_of_all() {
    std::uint64_t twice = 0;
    for (const Member& member : live_) {
      const SequenceMemoryUse use = engine_.memory(member.teller.id);
      REQUIRE(use.near_pages_shared <= use.near_pages);
      if (!member.mate) REQUIRE(use.near_pages_shared == 0);
      twice += 2 * use.near_pages - use.near_pages_shared;
      shared_ += use.near_pages_shared != 0 ? 1 : 0;
    }
    return twice;
  }
  Member& any() { return live_[random_.below(static_cast<std::uint32_t>(live_.size()))]; }
  void begin() {
    if (live_.size() == 5) return;
    const char* const policy = random_.below(2) == 0 ? "exact | int4 | top_k=12 | near=0,sinks=4,recent=20"
                                                     : "none | near=0,sinks=4,recent=60";
    Member member{.teller = {.story = &story_, .id = engine_.begin(parse_policy(policy))}};
    prefill(engine_, rig_, member.teller, 1 + random_.below(150));
    live_.push_back(member);
  }
  void fork() {
    if (live_.empty() || live_.size() == 5) return begin();
    Member& parent = any();
    if (parent.mate) return;
    Member child = parent;
    child.teller.at -= random_.below(std::min(child.teller.at, 3u));
    child.teller.id = engine_.fork(parent.teller.id, child.teller.at);
    child.mate = parent.teller.id;
    parent.mate = child.teller.id;
    live_.push_back(child);
  }
  void end() {
    if (live_.empty()) return;
    Member& member = any();
    engine_.end(member.teller.id);
    for (Member& other : live_)
      if (other.mate == member.teller.id) other.mate.reset();
    member = live_.back();
    live_.pop_back();
  }
  void truncate() {
    if (live_.empty()) return;
    Teller& teller = any().teller;
    teller.at -= random_.below(std::min(teller.at, 3u));
    engine_.truncate(teller.id, teller.at);
  }
  void decode() {
    if (live_.empty()) return;
    Teller& teller = any().teller;
    if (teller.at < story_.tokens()) (void)policies::decode(engine_, rig_, teller);
  }

  const EngineRig& rig_;
  Story story_;
  Engine engine_;
  Random random_;
  std::vector<Member> live_;
  int full_ = 0;
  int shared_ = 0;
};

}  // namespace

TEST_CASE("what is near of all sequences is what is near, whatever comes, goes and is shared", "[engine][near]") {
  const EngineRig rig = engine_rig();
  const bool windows = GENERATE(false, true);
  CAPTURE(windows);
  EngineOptions options = options_for(rig, 1, 12);
  options.host_bytes *= 2;
  options.promotions = 16;
  if (windows) options.windows = {0, 40, 40};
  Crowd crowd(rig, options, windows ? 5 : 4);
  for (int turn = 0; turn < 150; ++turn) {
    CAPTURE(turn);
    crowd.turn();
    crowd.check();
  }
  REQUIRE(crowd.times_full() > 5);
  REQUIRE(crowd.times_shared() > 20);
  REQUIRE(crowd.promoted() > 100);
}

TEST_CASE("without near memory nothing is near of a sequence", "[engine][near]") {
  const EngineRig rig = engine_rig();
  Engine engine(options_for(rig, 1, 0), rig.device);
  const Story story(kShape, 60, 78);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full"))};
  prefill(engine, rig, teller, 50);
  (void)decode(engine, rig, teller);
  REQUIRE(engine.memory(teller.id).near_pages == 0);
  REQUIRE(engine.memory(teller.id).near_pages_shared == 0);
}
