// What traced forwards tell of the pipeline in which the CPU chooses, and what a layer may take by that.
#include "tools/cli/bench/pipeline_times.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::tools;

namespace {

TraceSpan span(Stage stage, std::uint32_t layer, std::uint32_t thread, double begin_us, double end_us) {
  return {
      .stage = stage, .lane = lane_of(stage), .layer = layer, .thread = thread, .begin_us = begin_us, .end_us = end_us};
}

TraceStall stall(Actor actor, StallCause cause, double begin_us, double end_us) {
  return {.actor = actor, .cause = cause, .begin_us = begin_us, .end_us = end_us};
}

/// Two layers, the second of which lists rows to come near. In the first two threads choose, the second one later.
ForwardTrace two_layers() {
  ForwardTrace trace{.forward = 7, .done = true};
  trace.spans = {span(Stage::split, 0, 0, 0, 10),         span(Stage::fetch, 0, 0, 20, 100),
                 span(Stage::fetch, 1, 0, 130, 208),      span(Stage::promote, 1, 0, 208, 210),
                 span(Stage::choose_far, 0, 1, 40, 70),   span(Stage::choose_far, 0, 0, 12, 50),
                 span(Stage::choose_far, 1, 0, 125, 145), span(Stage::attend_far, 0, 1, 70, 500)};
  trace.stalls = {
      stall(Actor::device, StallCause::unseen, 10, 12),     stall(Actor::device, StallCause::choosing, 20, 70),
      stall(Actor::device, StallCause::arriving, 70, 100),  stall(Actor::device, StallCause::choosing, 130, 145),
      stall(Actor::device, StallCause::arriving, 145, 208), stall(Actor::device, StallCause::enqueuing, 100, 120),
      stall(Actor::workers, StallCause::computing, 0, 12),  stall(Actor::host, StallCause::computing, 0, 210)};
  return trace;
}

}  // namespace

TEST_CASE("a layer's choice is from its first part to its last, and the link's time what the device waits", "[cli]") {
  const PipelineTimes times = pipeline_times(two_layers(), 2);
  CHECK(times.choice_us == Approx((58.0 + 20.0) / 2));
  CHECK(times.waited_us == Approx((2.0 + 50.0 + 15.0) / 2));
  CHECK(times.exposed_us == Approx((30.0 + 63.0) / 2));
  const PipelineTimes none = pipeline_times({}, 2);
  CHECK(none.choice_us == 0.0);
  CHECK(none.exposed_us == 0.0);
}

TEST_CASE("bytes are exposed while they are waited for, and a slow link earns no time", "[cli]") {
  const PipelineTimes times{.choice_us = 100.0, .exposed_us = 40.0};
  // At 50 GB/s 1 MB takes 20 us of the 40.
  const PipelineGoal slow = pipeline_goal(times, 1e6, 50.0);
  CHECK(slow.exposed_bytes == Approx(1e6));
  CHECK(slow.us == Approx(1.15 * (100.0 + 20.0) + 12.0));
  // Of 5 MB, 100 us, the device waits for two fifths: the others crossed while the CPU chose.
  const PipelineGoal hidden = pipeline_goal(times, 5e6, 50.0);
  CHECK(hidden.exposed_bytes == Approx(2e6));
  CHECK(hidden.us == Approx(1.15 * (100.0 + 40.0) + 12.0));
  CHECK(pipeline_goal(times, 0.0, 50.0).us == Approx(1.15 * 100.0 + 12.0));
}
