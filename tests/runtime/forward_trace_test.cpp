// How the stamps of a device with a clock of its own lie to what threads of the host did.
#include "runtime/engine/forward_trace.hpp"

#include <algorithm>
#include <iterator>

#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::runtime;

namespace {

constexpr std::uint64_t kForward = 11;
constexpr std::int64_t kHost = 5'000'000;  // When it was planned, by the host's clock.

/// Two layers, by the host's clock: append, split, attend and merge of 10 us each, from 100 us behind the plan on.
/// Each question is seen `seen` ns after split has begun, and answered `early` ns before merge ends.
TraceNotes notes_of(std::int64_t ahead, std::int64_t seen, std::int64_t early) {
  TraceNotes notes{.forward = kForward,
                   .planned = Clock::time_point(std::chrono::nanoseconds(kHost)),
                   .ended = Clock::time_point(std::chrono::nanoseconds(kHost + 1'000'000))};
  notes.stamps.resize(2 * kStampedStages);
  notes.far.answers.resize(2);
  std::int64_t now = kHost + 100'000;
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    const auto stamp = [&](Stage stage) {
      notes.stamps[layer * kStampedStages + static_cast<std::size_t>(stage)] = {
          .forward = kForward, .ns = static_cast<std::uint64_t>(now - ahead)};
      now += 10'000;
    };
    for (const Stage stage : {Stage::start, Stage::append, Stage::split, Stage::attend, Stage::merge}) stamp(stage);
    now -= 10'000;
    notes.far.answers[layer] = {.seen_ns = now - 30'000 + seen, .answered_ns = now - early};
  }
  return notes;
}

/// Tasks of which those that the notes have stamps of are some.
scheduler::TaskGraph all_stages() {
  return scheduler::TaskGraph(scheduler::kind_of({.prefills = 1}, true, kWholeFetchShare));
}

/// A wait of a trace, in microseconds.
struct Wait {
  Actor actor{};
  StallCause cause{};
  double begin_us = 0.0;
  double end_us = 0.0;
};

void require_stalls(const std::vector<TraceStall>& stalls, const std::vector<Wait>& want) {
  REQUIRE(stalls.size() == want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i, to_string(stalls[i].cause), to_string(want[i].cause));
    REQUIRE(stalls[i].actor == want[i].actor);
    REQUIRE(stalls[i].cause == want[i].cause);
    REQUIRE(stalls[i].begin_us == Approx(want[i].begin_us));
    REQUIRE(stalls[i].end_us == Approx(want[i].end_us));
  }
}

/// Of the device, for workers.
std::vector<TraceStall> for_answers(const ForwardTrace& trace) {
  std::vector<TraceStall> stalls;
  std::ranges::copy_if(trace.stalls, std::back_inserter(stalls), [](const TraceStall& stall) {
    return stall.actor == Actor::device && waited_for(stall.cause) == Actor::workers;
  });
  return stalls;
}

}  // namespace

TEST_CASE("clocks are aligned by what must have come one after the other", "[trace]") {
  const std::int64_t ahead = GENERATE(0, 123'456'789, -987'654'321'000);
  const ClockOffset exact = align(notes_of(ahead, 0, 0));
  REQUIRE(exact.ahead_ns == ahead);
  REQUIRE(exact.error_ns == 0);
  // An answer that took 4 us to be seen and one that was given 2 us before it was.
  const ClockOffset bracket = align(notes_of(ahead, 4'000, 2'000));
  REQUIRE(bracket.error_ns == 3'000);
  REQUIRE(std::abs(bracket.ahead_ns - ahead) <= bracket.error_ns);
  // Where the device fetches what is chosen, that ends before the answer.
  TraceNotes fetching = notes_of(ahead, 0, 0);
  fetching.fetches_chosen = true;
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    const ForwardStamp* const stamps = fetching.stamps.data() + layer * kStampedStages;
    ForwardStamp& fetched = fetching.stamps[layer * kStampedStages + static_cast<std::size_t>(Stage::fetch)];
    fetched = stamps[static_cast<std::size_t>(Stage::attend)];
    fetched.ns += 1'000;
  }
  REQUIRE(align(fetching).ahead_ns == ahead);
  REQUIRE(align(fetching).error_ns == 0);
  // No question: the plan and the look at the end are all there is.
  TraceNotes alone = notes_of(ahead, 0, 0);
  for (FarAnswer& answer : alone.far.answers) answer = {};
  const ClockOffset wide = align(alone);
  REQUIRE(wide.error_ns == (100'000 + 820'000) / 2);
  REQUIRE(std::abs(wide.ahead_ns - ahead) <= wide.error_ns);
}

TEST_CASE("nothing that was stamped tells of no offset, and older stamps are not its own", "[trace]") {
  TraceNotes notes = notes_of(77, 0, 0);
  for (ForwardStamp& stamp : notes.stamps) stamp.forward = kForward - kMostForwards;
  notes.far.answers.assign(2, {});
  REQUIRE(align(notes).ahead_ns == 0);
  REQUIRE(trace_of(notes, {}, all_stages(), {}, true).spans.empty());
}

TEST_CASE("where the device fetches what is chosen, it waits for choices there and for the answer in merge",
          "[trace]") {
  TraceNotes notes = notes_of(0, 0, 0);
  const auto at = [](double us) { return kHost + static_cast<std::int64_t>(1e3 * us); };
  notes.fetches_chosen = true;
  // Attention ends at 130 us, the fetch at 136, when it was chosen at 134, and the merge at 140.
  notes.stamps[static_cast<std::size_t>(Stage::fetch)] = {.forward = kForward,
                                                          .ns = static_cast<std::uint64_t>(at(136))};
  notes.far.answers[0] = {.seen_ns = at(131), .answered_ns = at(139)};
  notes.far.answers[1] = {.seen_ns = at(155), .answered_ns = at(165)};
  notes.far.pieces = {{.stage = Stage::choose_far, .layer = 0, .thread = 1, .begin_ns = at(131), .end_ns = at(134)}};
  const ForwardTrace trace = trace_of(notes, {}, all_stages(), {}, true);
  require_stalls(for_answers(trace), {{Actor::device, StallCause::unseen, 130, 131},
                                      {Actor::device, StallCause::choosing, 131, 134},
                                      {Actor::device, StallCause::attending, 136, 139}});
  // What is left of the fetch is the link's.
  const auto arriving = std::ranges::find(trace.stalls, StallCause::arriving, &TraceStall::cause);
  REQUIRE(arriving != trace.stalls.end());
  REQUIRE(arriving->begin_us == Approx(134));
  REQUIRE(arriving->end_us == Approx(136));
}

TEST_CASE("a stall is the part of a wait that the answer takes, by what it waits for", "[trace]") {
  TraceNotes notes = notes_of(0, 0, 0);
  const auto at = [](double us) { return kHost + static_cast<std::int64_t>(1e3 * us); };
  // Layer 0 merges from 130 to 140 us. Layer 1, from 170 to 180, is answered before.
  notes.far.answers[0] = {.seen_ns = at(132), .answered_ns = at(139)};
  notes.far.answers[1] = {.seen_ns = at(155), .answered_ns = at(165)};
  notes.far.pieces = {{.stage = Stage::choose_far, .layer = 0, .thread = 1, .begin_ns = at(132), .end_ns = at(135)},
                      {.stage = Stage::choose_far, .layer = 0, .thread = 0, .begin_ns = at(132), .end_ns = at(134)},
                      {.stage = Stage::attend_far, .layer = 0, .thread = 0, .begin_ns = at(135), .end_ns = at(139)}};
  const std::vector<WorkItem> work{{.stage = Stage::attend_far, .lane = Lane::cpu, .rows = 2, .read = 30},
                                   {.stage = Stage::split, .lane = Lane::device, .rows = 3, .written = 4},
                                   {.stage = Stage::split, .lane = Lane::link, .rows = 3, .written = 5}};
  const ForwardTrace trace = trace_of(notes, {}, all_stages(), work, true);
  const std::vector<TraceStall> stalls = for_answers(trace);
  require_stalls(stalls, {{Actor::device, StallCause::unseen, 130, 132},
                          {Actor::device, StallCause::choosing, 132, 135},
                          {Actor::device, StallCause::attending, 135, 139}});
  for (const TraceStall& stall : stalls) REQUIRE(stall.layer == 0);
  REQUIRE(trace.spans.size() == 8 + 3);
  REQUIRE(trace.spans[1].stage == Stage::split);
  REQUIRE(trace.spans[1].bytes == 9);
  REQUIRE(trace.spans[1].rows == 3);
  REQUIRE(trace.spans.back().stage == Stage::attend_far);
  REQUIRE(trace.spans.back().bytes == 30);
}

TEST_CASE("who waits for whom is told of the device, of workers and of the calling thread", "[trace]") {
  TraceNotes notes = notes_of(0, 0, 0);
  const auto at = [](double us) { return kHost + static_cast<std::int64_t>(1e3 * us); };
  const auto host = [&](double us) { return Clock::time_point(std::chrono::nanoseconds(at(us))); };
  const auto stamp = [&](std::uint32_t layer, Stage stage, double us) {
    notes.stamps[layer * kStampedStages + static_cast<std::size_t>(stage)] = {.forward = kForward,
                                                                              .ns = static_cast<std::uint64_t>(at(us))};
  };
  // The first layer reads a prompt, too: it is gathered from 110 to 112 us and attended until 115. The second one
  // begins late, at 143 instead of 140, and fetches behind its attention, from 165 to 168.
  stamp(0, Stage::gather, 112);
  stamp(0, Stage::prefill, 115);
  stamp(1, Stage::start, 143);
  stamp(1, Stage::attend, 165);
  stamp(1, Stage::fetch, 168);
  notes.far.answers[0] = {.seen_ns = at(121), .answered_ns = at(125)};
  notes.far.answers[1] = {.seen_ns = at(155), .answered_ns = at(159)};
  notes.looks = {
      {.sequence = 1, .begin = host(-50), .end = host(-10), .waited_from = host(-30), .waited_until = host(-9)}};
  notes.awaited_from = host(90);
  notes.awaited_until = host(190);
  const std::vector<Wait> others{{Actor::device, StallCause::arriving, 110, 112},
                                 {Actor::device, StallCause::enqueuing, 140, 143},
                                 {Actor::device, StallCause::arriving, 165, 168}};
  const std::vector<Wait> ends{{Actor::workers, StallCause::computing, 125, 155},
                               {Actor::workers, StallCause::computing, 159, 180},
                               {Actor::host, StallCause::looking, -30, -9},
                               {Actor::host, StallCause::computing, 90, 190}};
  const auto joined = [](std::vector<Wait> all, const std::vector<Wait>& more) {
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  // Where it is not known when the device was free, what comes before the first layer is nobody's.
  require_stalls(trace_of(notes, {}, all_stages(), {}, true).stalls, joined(others, ends));
  // The forward before ended 40 us behind the plan: until then the device did not wait.
  notes.idle = host(40);
  require_stalls(trace_of(notes, {}, all_stages(), {}, true).stalls,
                 joined(joined(joined({{Actor::device, StallCause::enqueuing, 40, 100}}, others),
                               {{Actor::workers, StallCause::computing, 40, 121}}),
                        ends));
  // It was free before.
  notes.idle = host(-40);
  const ForwardTrace trace = trace_of(notes, {}, all_stages(), {}, true);
  REQUIRE(trace.stalls.front().begin_us == Approx(0).margin(1e-9));
  REQUIRE(end_of(trace) == host(180));
  REQUIRE(trace.spans[1].stage == Stage::gather);
  REQUIRE(trace.spans[1].lane == Lane::link);
}
