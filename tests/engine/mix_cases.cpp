// Forwards of any mix give every row what its sequence gives alone.
#include <algorithm>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_mixes.hpp"
#include "tests/support/random.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::mixes;

namespace {

constexpr std::uint32_t kBounded = 3;  ///< the first policies, which every bucket serves
constexpr Bucket kBuckets[] = {{.decode_rows = 1},
                               {.decode_rows = 6},
                               {.decode_rows = 6, .unbounded = true},
                               {.decode_rows = 4, .max_tokens = 48},
                               {.decode_rows = 0, .prefill_rows = 30, .prefills = 1},
                               {.decode_rows = 3, .prefill_rows = 21, .prefills = 2},
                               kLargest};

/// A sequence as the schedule knows it: the first tokens of a story.
struct Told {
  SequenceId id;
  std::uint32_t story = 0;
  std::uint32_t policy = 0;
  std::uint32_t tokens = 0;  ///< that it has, those of forwards in flight included
  std::uint32_t most = 0;    ///< that it or what it is a fork of has ever had for good
  bool busy = false;         ///< in a forward in flight
};

/// A forward in flight, and what its rows should give.
struct Flight {
  Batch batch;
  std::uint32_t tensors = 0;
  struct Part {
    std::size_t told;
    std::uint32_t at, first, right, count;  ///< the first `right` of `count` rows are the story's own tokens
    bool prefill;
  };
  std::vector<Part> parts;
};

class Schedule {
 public:
  Schedule(Engine& engine, const EngineRig& rig, std::vector<ForwardTensors>& tensors,
           const std::vector<Story>& stories, const Alone& alone, std::uint64_t seed)
      : engine_(engine), rig_(rig), tensors_(tensors), stories_(stories), alone_(alone), random_(seed) {}

  void run() {
    for (std::uint32_t i = 1 + random_.below(3); i > 0; --i) begin();
    for (int step = 0; step < 7; ++step) {
      change();
      if (flights_.size() == 2 || (!flights_.empty() && random_.below(2) == 0)) complete();
      start();
      if (!flights_.empty() && random_.below(10) == 0) give_up();
    }
    while (!flights_.empty()) complete();
    for (const Told& told : told_) {
      REQUIRE(engine_.tokens(told.id) == told.tokens);
      engine_.end(told.id);
    }
    REQUIRE(engine_.memory().far_pages_used == 0);
  }
  [[nodiscard]] std::uint64_t rows() const { return rows_; }

 private:
  void begin() {
    Told told{.id = {}, .story = random_.below(kStories), .policy = random_.below(kWays)};
    told.id = engine_.begin(parse_policy(kPolicies[told.policy]));
    told_.push_back(told);
  }

  /// Forks, truncates, imports, ends: what may happen between forwards to a sequence that rests.
  void change() {
    if (told_.empty()) return begin();
    const std::size_t i = random_.below(static_cast<std::uint32_t>(told_.size()));
    if (told_[i].busy) return;
    switch (random_.below(8)) {
      case 0:
        if (told_.size() < 4) fork(i);
        return;
      case 1:
        told_[i].tokens = fewer(told_[i]);
        if (told_[i].tokens == 0) told_[i].most = 0;
        return engine_.truncate(told_[i].id, told_[i].tokens);
      case 2:
        if (flights_.empty()) import(told_[i], 1 + random_.below(20));
        return;
      case 3:
        if (!flights_.empty() || told_.size() < 2) return;
        engine_.end(told_[i].id);
        told_.erase(told_.begin() + static_cast<std::ptrdiff_t>(i));
        return;
      default: return;
    }
  }

  /// Tokens that a sequence can be shortened to: any where layers have no windows.
  std::uint32_t fewer(const Told& told) {
    const std::uint32_t tokens = random_.below(told.tokens + 1);
    if (engine_.options().windows.empty() || tokens == 0 || tokens + kSlack >= told.most) return tokens;
    return std::min(told.tokens, told.most - kSlack);
  }

  void fork(std::size_t i) {
    Told child = told_[i];
    child.tokens = fewer(child);
    if (child.tokens == 0) child.most = 0;
    child.id = engine_.fork(told_[i].id, child.tokens);
    told_.push_back(child);
  }

  void import(Told& told, std::uint32_t tokens) {
    const std::uint32_t end = std::min(told.tokens + tokens, kTokens);
    Teller teller{.story = &stories_[told.story], .id = told.id, .at = told.tokens};
    import_story(engine_, rig_, teller, end);
    told.tokens = std::max(told.tokens, end);
    told.most = std::max(told.most, told.tokens);
  }

  /// Plans and enqueues a forward of what fits a bucket.
  void start() {
    const Bucket bucket = kBuckets[random_.below(std::size(kBuckets))];
    next_tensors_ = !flights_.empty() && flights_.front().tensors == 0 ? 1 : 0;
    Flight flight{.batch = {}, .tensors = next_tensors_, .parts = {}};
    std::vector<PlanItem> items;
    Bucket left = bucket;
    std::uint32_t at = 0;
    for (std::size_t i = 0; i < told_.size(); ++i) {
      Told& told = told_[i];
      const bool prefill = left.prefills != 0 && random_.below(2) == 0;
      const std::uint32_t end = std::min(kTokens, bucket.max_tokens == 0 ? kTokens : bucket.max_tokens);
      const std::uint32_t room = told.tokens < end ? end - told.tokens : 0;
      const std::uint32_t most = std::min({room, prefill ? left.prefill_rows : left.decode_rows, prefill ? 25u : 3u});
      if (most == 0 || random_.below(5) == 0 || (!prefill && !bucket.unbounded && told.policy >= kBounded)) continue;
      const std::uint32_t count = 1 + random_.below(most);
      const std::uint32_t right = prefill ? count : 1 + random_.below(count);
      (prefill ? left.prefill_rows : left.decode_rows) -= count;
      left.prefills -= prefill ? 1 : 0;
      items.push_back({.sequence = told.id, .tokens = count, .prefill = prefill});
      flight.parts.push_back(
          {.told = i, .at = at, .first = told.tokens, .right = right, .count = count, .prefill = prefill});
      set_rows(flight.parts.back());
      at += count;
      told.tokens += count;
      told.busy = true;
    }
    tensors().spoil();
    flight.batch = engine_.plan(items, bucket, rig_.stream);
    enqueued_ = random_.below(20) != 0;
    if (enqueued_) tensors().attend(engine_, bucket, rig_.stream);
    flights_.push_back(std::move(flight));
    if (!enqueued_) give_up();
  }

  /// Drafts that are not the story's are another story's tokens, and must leave nothing behind.
  void set_rows(const Flight::Part& part) {
    const Told& told = told_[part.told];
    for (std::uint32_t i = 0; i < part.count; ++i) {
      const std::uint32_t story = i < part.right ? told.story : (told.story + 1) % kStories;
      tensors().set(part.at + i, stories_[story], part.first + i);
    }
  }

  /// The oldest forward in flight: its rows are looked at, and drafts that were wrong are taken back.
  void complete() {
    Flight flight = std::move(flights_.front());
    flights_.erase(flights_.begin());
    engine_.finish(flight.batch);
    rig_.synchronize();
    std::uint32_t used = 0;
    for (const Flight::Part& part : flight.parts) {
      Told& told = told_[part.told];
      told.most = std::max(told.most, part.first + part.count);
      const auto& want = alone_.rows[told.story][part.prefill ? kWays : told.policy];
      // A forward that goes beyond the first page weighs by copies of keys less that page's mean, in its earlier rows
      // as well, which have none when they are alone.
      const bool crosses = part.first < kPageTokens && part.first + part.count > kPageTokens;
      for (std::uint32_t i = 0; i < part.right; ++i, ++rows_) {
        if (crosses && part.first + i < kPageTokens) continue;
        CAPTURE(flight.batch.forward, part.prefill, part.at + i, part.first + i, part.count);
        const double off = difference(tensors_[flight.tensors].out(part.at + i), want[part.first + i]);
        if (!(off < rig_.tolerance)) REQUIRE(off < rig_.tolerance);
      }
      used += part.count;
      told.busy = in_flight(part.told);
      if (part.right == part.count) continue;
      settle(part.told);
      told.tokens = part.first + part.right;
      engine_.truncate(told.id, told.tokens);
    }
    for (std::uint32_t row = used; row < flight.batch.bucket.rows(); ++row) {
      for (const float x : tensors_[flight.tensors].out(row)) {
        if (x != 0.f) REQUIRE(x == 0.f);  // Padding.
      }
    }
  }

  /// Takes forwards back until none in flight has this sequence.
  void settle(std::size_t told) {
    while (in_flight(told)) give_up();
  }

  /// Takes a forward in flight back, and those behind it.
  void give_up() {
    const std::size_t from =
        enqueued_ ? random_.below(static_cast<std::uint32_t>(flights_.size())) : flights_.size() - 1;
    engine_.cancel(flights_[from].batch);
    enqueued_ = true;
    for (; flights_.size() > from; flights_.pop_back()) {
      for (const Flight::Part& part : flights_.back().parts) told_[part.told].tokens = part.first;
    }
    for (std::size_t i = 0; i < told_.size(); ++i) told_[i].busy = in_flight(i);
    rig_.synchronize();
  }

  [[nodiscard]] bool in_flight(std::size_t told) const {
    return std::ranges::any_of(flights_, [&](const Flight& flight) {
      return std::ranges::find(flight.parts, told, &Flight::Part::told) != flight.parts.end();
    });
  }
  [[nodiscard]] ForwardTensors& tensors() { return tensors_[next_tensors_]; }

  Engine& engine_;
  const EngineRig& rig_;
  std::vector<ForwardTensors>& tensors_;
  const std::vector<Story>& stories_;
  const Alone& alone_;
  Random random_;
  std::vector<Told> told_;
  std::vector<Flight> flights_;
  std::uint32_t next_tensors_ = 0;
  bool enqueued_ = true;
  std::uint64_t rows_ = 0;
};

}  // namespace

TEST_CASE("any mix of chunks, decoded rows and drafts gives what the same sequences give alone", "[engine]") {
  const auto [near, windows] = GENERATE(grid(std::array{0u, 7u, 40u}, std::array{0u, 1u, 2u}));
  const std::uint32_t schedules = kSanitized ? 20 : runs_again() ? 100 : 400;
  CAPTURE(near, windows);
  const EngineRig rig = engine_rig();
  const std::vector<Story> told = stories(windows);
  const Alone rows = alone(rig, told, windows);
  Engine engine(mix_options(rig, near, windows), rig.device);
  std::vector<ForwardTensors> tensors;
  for (int i = 0; i < 2; ++i) tensors.emplace_back(*rig.device, kShape, kLargest.rows());
  std::uint64_t compared = 0;
  for (std::uint64_t seed = 0; seed < schedules; ++seed) {
    CAPTURE(seed);
    Schedule schedule(engine, rig, tensors, told, rows, seed + 10'000 * near);
    schedule.run();
    compared += schedule.rows();
  }
  REQUIRE(compared > 20 * schedules);
}
