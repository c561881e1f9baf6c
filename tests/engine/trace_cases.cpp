// Traces of forwards, on every device.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/pause.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace std::chrono_literals;

namespace {

/// One forward of the largest bucket, traced: plans it, enqueues it, finishes it.
struct Traced {
  ForwardTrace trace;
  std::vector<float> out;
  EngineStats counted;  ///< by this forward
};

Traced run_traced(Engine& engine, const EngineRig& rig, ForwardTensors& tensors, Teller& teller) {
  const EngineStats before = engine.stats();
  tensors.set(0, *teller.story, teller.at++);
  const PlanItem item{.sequence = teller.id};
  const Batch batch = run_batch(engine, rig, tensors, {&item, 1}, engine.options().largest);
  Traced traced{.trace = engine.trace(batch), .out = tensors.out(0), .counted = engine.stats()};
  traced.counted.near_tokens -= before.near_tokens;
  traced.counted.far_tokens -= before.far_tokens;
  traced.counted.fetched_tokens -= before.fetched_tokens;
  traced.counted.asked -= before.asked;
  return traced;
}

/// What holds of every trace: times rise, and nobody does two things at a time.
void require_sound(const ForwardTrace& trace, double clock_error_us) {
  std::map<std::tuple<bool, std::uint32_t>, std::vector<TraceSpan>> rows;
  for (const TraceSpan& span : trace.spans) {
    REQUIRE(span.begin_us <= span.end_us);
    REQUIRE(span.begin_us >= -clock_error_us);
    rows[{span.lane == Lane::cpu, span.thread}].push_back(span);
  }
  for (auto& [row, spans] : rows) {
    std::ranges::stable_sort(spans, {}, &TraceSpan::begin_us);
    for (std::size_t i = 1; i < spans.size(); ++i) {
      CAPTURE(i, to_string(spans[i].stage));
      REQUIRE(spans[i].begin_us >= spans[i - 1].end_us - 1e-6);
      REQUIRE(spans[i].layer >= spans[i - 1].layer);
    }
  }
  std::map<Actor, double> until;
  for (const TraceStall& stall : trace.stalls) {
    CAPTURE(to_string(stall.actor), to_string(stall.cause));
    REQUIRE(stall.begin_us <= stall.end_us);
    REQUIRE(stall.actor != waited_for(stall.cause));
    // Nobody waits twice at a time.
    if (until.contains(stall.actor)) REQUIRE(stall.begin_us >= until[stall.actor] - 1e-6 - 2 * clock_error_us);
    until[stall.actor] = stall.end_us;
  }
}

std::vector<Stage> device_stages(const ForwardTrace& trace, std::uint32_t layer) {
  std::vector<Stage> stages;
  for (const TraceSpan& span : trace.spans) {
    if (span.layer == layer && span.lane != Lane::cpu) stages.push_back(span.stage);
  }
  return stages;
}

std::uint64_t bytes_of(const ForwardTrace& trace, Stage stage) {
  std::uint64_t bytes = 0;
  for (const WorkItem& item : trace.work) bytes += item.stage == stage ? item.bytes() : 0;
  return bytes;
}

EngineOptions traced(EngineOptions options) {
  options.largest.trace = true;
  return options;
}

}  // namespace

TEST_CASE("a trace has every stage of every layer, and attention is what it is without", "[engine]") {
  const PlacementMode placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const std::uint32_t near = GENERATE(0u, 6u, 40u);
  CAPTURE(to_string(placement), near);
  const EngineRig rig = engine_rig();
  EngineOptions options = plain::options_for(rig, 1, 40, near);
  options.placement = placement;
  Engine engine(traced(options), rig.device);
  Engine untraced(options, rig.device);
  const Story story(plain::kShape, 330, 91);
  const PolicySpec policy = parse_policy("exact | int4 | top_k=24 | near=0,sinks=4,recent=16");
  Teller teller{.story = &story, .id = engine.begin(policy)};
  Teller other{.story = &story, .id = untraced.begin(policy)};
  import_story(engine, rig, teller, 300);
  import_story(untraced, rig, other, 300);
  ForwardTensors tensors(*rig.device, plain::kShape, 1);
  std::vector<Stage> want{Stage::append, Stage::score, Stage::choose, Stage::split, Stage::attend};
  if (placement == PlacementMode::stream) want.push_back(Stage::fetch);
  if (near != 0) want.push_back(Stage::promote);
  want.push_back(Stage::merge);
  const PageLayout far{.head_dim = plain::kShape.head_dim, .dtype = rig.kv_dtype};
  const std::uint64_t token = 2 * far.near().row_bytes();
  const std::uint64_t far_token = far.page_bytes() / far.page_tokens;
  for (std::uint64_t last = 0; teller.at < story.tokens();) {
    const Traced ran = run_traced(engine, rig, tensors, teller);
    REQUIRE(ran.out == run_forward(untraced, rig, tensors, {&other})[0]);
    REQUIRE(ran.trace.done);
    REQUIRE(std::exchange(last, ran.trace.forward) < ran.trace.forward);
    require_sound(ran.trace, ran.trace.clock_error_us);
    for (std::uint32_t layer = 0; layer < plain::kShape.layers; ++layer)
      REQUIRE(device_stages(ran.trace, layer) == want);
    // What is planned is what was counted; a layer's tokens are rounded.
    const double margin = static_cast<double>(token * plain::kShape.layers);
    REQUIRE(static_cast<double>(bytes_of(ran.trace, Stage::attend)) ==
            Approx(static_cast<double>(ran.counted.near_tokens * token)).margin(margin));
    REQUIRE(static_cast<double>(bytes_of(ran.trace, Stage::attend_far)) ==
            Approx(static_cast<double>(ran.counted.far_tokens * far_token)).margin(margin));
    REQUIRE(static_cast<double>(bytes_of(ran.trace, Stage::fetch)) ==
            Approx(static_cast<double>(ran.counted.fetched_tokens * far_token)).margin(margin));
    // The CPU answers as many layers as asked it.
    std::set<std::uint32_t> answered;
    for (const TraceSpan& span : ran.trace.spans) {
      if (span.lane == Lane::cpu) answered.insert(span.layer);
    }
    REQUIRE(answered.size() == ran.counted.asked);
    REQUIRE(ran.trace.dropped == 0);
  }
  REQUIRE(untraced.memory().pinned < engine.memory().pinned);
}

TEST_CASE("a trace shows who chose, and what the device waited for", "[engine]") {
  using namespace policies;
  const PlacementMode placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  CAPTURE(to_string(placement));
  const EngineRig rig = engine_rig();
  constexpr auto kStall = 20ms;  // Longer than a busy machine keeps the device from waiting.
  std::atomic<bool> stalls{false};
  EngineOptions options = traced(options_for(rig, 1, 0));
  options.placement = placement;
  options.before_answer = [&] {
    if (stalls) std::this_thread::sleep_for(kStall);
  };
  Engine engine(options, rig.device);
  const Story story(kShape, 210, 92);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("topk"))};
  policies::prefill(engine, rig, teller, 200);
  ForwardTensors tensors(*rig.device, kShape, options.largest.rows());
  stalls = true;
  const Traced ran = run_traced(engine, rig, tensors, teller);
  require_sound(ran.trace, ran.trace.clock_error_us);
  REQUIRE(ran.trace.looks.size() == 1);  // By the plan, at the prompt.
  REQUIRE(ran.trace.looks[0].sequence == teller.id.value);
  REQUIRE(ran.trace.looks[0].begin_us + std::chrono::duration<double, std::micro>(kStall).count() <
          ran.trace.looks[0].end_us);
  REQUIRE(ran.trace.looks[0].end_us <= 0.0);
  const auto pieces = [&](Stage stage, std::uint32_t layer) {
    return std::ranges::count_if(ran.trace.spans, [&](const TraceSpan& span) {
      return span.stage == stage && span.layer == layer && span.lane == Lane::cpu;
    });
  };
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    CAPTURE(layer);
    REQUIRE(pieces(Stage::choose_far, layer) == kShape.kv_heads);
    REQUIRE((pieces(Stage::attend_far, layer) == 0) == (placement == PlacementMode::stream));
    double choosing = 0.0, attending = 0.0;
    for (const TraceStall& stall : ran.trace.stalls) {
      if (stall.layer != layer) continue;
      REQUIRE((stall.actor == Actor::device || stall.cause == StallCause::computing));
      if (stall.cause == StallCause::choosing) choosing += stall.end_us - stall.begin_us;
      if (stall.cause == StallCause::attending) attending += stall.end_us - stall.begin_us;
    }
    // A thread slept at least as long before it attended, while the device had nothing else to do.
    REQUIRE(choosing > 0.0);
    if (placement == PlacementMode::hybrid) REQUIRE(attending > 1000.0);
  }
  const auto waits = [&](Actor actor, StallCause cause) {
    return std::ranges::count_if(ran.trace.stalls,
                                 [&](const TraceStall& stall) { return stall.actor == actor && stall.cause == cause; });
  };
  // The plan waited for the look, `finish` for the device, threads for each question and for the end; and the device
  // for the link where that carries what is far, or where windows of prompts come over it: of a bucket that has room
  // for some, if there are none, too.
  REQUIRE(waits(Actor::host, StallCause::looking) == 1);
  REQUIRE(waits(Actor::host, StallCause::computing) == 1);
  REQUIRE(waits(Actor::workers, StallCause::computing) == kShape.layers + 1);
  REQUIRE((waits(Actor::device, StallCause::arriving) != 0) ==
          (placement == PlacementMode::stream || rig.device->info().own_processor));
}

TEST_CASE("prompts are traced, alone and beside tokens", "[engine]") {
  using namespace policies;
  const EngineRig rig = engine_rig();
  Engine engine(traced(options_for(rig, 1, 5)), rig.device);
  const Story story(kShape, 110, 93);
  const SequenceId id = engine.begin(parse_policy("full | near=0"));
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  const Bucket alone{.decode_rows = 0, .prefill_rows = 100, .prefills = 1, .trace = true};
  for (std::uint32_t i = 0; i < 60; ++i) tensors.set(i, story, i);
  const PlanItem item{.sequence = id, .tokens = 60, .prefill = true};
  const Batch batch = run_batch(engine, rig, tensors, {&item, 1}, alone);
  const ForwardTrace& trace = engine.trace(batch);
  require_sound(trace, trace.clock_error_us);
  std::vector<Stage> want{Stage::append, Stage::gather, Stage::prefill};
  if (!rig.on_gpu) want = {Stage::append, Stage::prefill};  // Prompts are attended where they lie.
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) REQUIRE(device_stages(trace, layer) == want);
  for (const TraceSpan& span : trace.spans) REQUIRE(span.rows == 60);
}

TEST_CASE("a forward that fails or is taken back has a trace that says so", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = traced(plain::options_for(rig, 1, 40, 0));
  std::atomic<int> answers{-1};  // Until a thread stalls.
  options.answer_timeout = 200ms;
  options.before_answer = [&] {
    if (answers >= 0 && answers-- == 0) pause_for(700ms);
  };
  Engine engine(options, rig.device);
  const Story story(plain::kShape, 120, 94);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=10 | near=0,sinks=2,recent=6"))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, plain::kShape, 1);
  tensors.set(0, story, 100);
  const auto plan = [&] { return engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream); };
  for (int repeat = 0; repeat < 10; ++repeat) (void)run_traced(engine, rig, tensors, teller);
  // The second layer is not answered in time: each has a part for each KV head.
  answers = static_cast<int>(plain::kShape.kv_heads);
  const Batch failed = plan();
  tensors.attend(engine, rig.stream);
  REQUIRE(code_of([&] { engine.finish(failed); }) == Errc::device);
  rig.synchronize();
  const ForwardTrace trace = engine.trace(failed);
  REQUIRE(!trace.done);
  require_sound(trace, trace.clock_error_us);
  REQUIRE(device_stages(trace, 0).back() == Stage::merge);
  REQUIRE(device_stages(trace, 1).back() == Stage::attend);
  REQUIRE(device_stages(trace, 2).empty());
  // Nothing of it was enqueued; what older forwards left behind is not taken for its own.
  const Batch cancelled = plan();
  engine.cancel(cancelled);
  REQUIRE(engine.trace(cancelled).forward == cancelled.forward);
  REQUIRE(!engine.trace(cancelled).done);
  REQUIRE(engine.trace(cancelled).spans.empty());
  REQUIRE(code_of([&] { (void)engine.trace(failed); }) == Errc::not_found);
  const Traced again = run_traced(engine, rig, tensors, teller);
  REQUIRE(again.trace.done);
  REQUIRE(device_stages(again.trace, 2).back() == Stage::merge);
}

TEST_CASE("forwards are traced where their bucket says so", "[engine]") {
  const EngineRig rig = engine_rig();
  Engine engine(traced(plain::options_for(rig, 1, 40, 4)), rig.device);
  Engine without(plain::options_for(rig, 1, 40, 4), rig.device);
  const Story story(plain::kShape, 140, 95);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=2,recent=6"))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, plain::kShape, 1);
  Bucket plain_bucket = engine.options().largest;
  plain_bucket.trace = false;
  const auto run = [&](const Bucket& bucket) {
    tensors.set(0, story, teller.at++);
    const Batch batch = engine.plan(one_each({&teller.id, 1}), bucket, rig.stream);
    tensors.attend(engine, bucket, rig.stream);
    engine.finish(batch);
    return batch;
  };
  REQUIRE(code_of([&] { (void)engine.trace(run(plain_bucket)); }) == Errc::not_found);
  const Batch seen = run(engine.options().largest);
  REQUIRE(engine.trace(seen).done);
  (void)run(plain_bucket);
  REQUIRE(engine.trace(seen).done);  // Until another one is traced.
  const SequenceId id = without.begin(parse_policy("none | near=0,sinks=2,recent=6"));
  const Bucket bucket{.decode_rows = 1, .trace = true};
  REQUIRE(code_of([&] { (void)without.plan(one_each({&id, 1}), bucket, rig.stream); }) == Errc::invalid_argument);
}

TEST_CASE("forwards in flight have traces of their own", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = traced(plain::options_for(rig, 1, 60, 0));
  options.in_flight = 3;
  Engine engine(options, rig.device);
  const Story story(plain::kShape, 140, 96);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=10 | near=0,sinks=2,recent=6"))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, plain::kShape, 1);
  tensors.set(0, story, 100);
  for (int repeat = 0; repeat < 6; ++repeat) {
    std::vector<Batch> batches;
    for (int i = 0; i < 3; ++i) {
      batches.push_back(engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream));
      tensors.attend(engine, rig.stream);
    }
    double before = -1e300;
    std::optional<Clock::time_point> first;
    for (const Batch& batch : batches) {
      engine.finish(batch);
      const ForwardTrace& trace = engine.trace(batch);
      require_sound(trace, trace.clock_error_us);
      if (!first) first = trace.planned;
      const double since = std::chrono::duration<double, std::micro>(trace.planned - *first).count();
      for (const TraceSpan& span : trace.spans) {
        if (span.lane == Lane::cpu) continue;
        REQUIRE(since + span.begin_us >= before - 2 * trace.clock_error_us);
        before = since + span.begin_us;
      }
      REQUIRE(device_stages(trace, plain::kShape.layers - 1).back() == Stage::merge);
    }
  }
}
