// Few far rows over the link: beside rows that ask, whoever waits for these and however late they are, and through what
// happens to forwards.
#include <atomic>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "sluice/error.hpp"
#include "tests/gpu/link_rows.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::links;
using namespace std::chrono_literals;

TEST_CASE("rows of a batch have their share of what crosses the link", "[engine][gpu][link]") {
  const std::uint32_t link_rows = GENERATE(0u, 39u, 40u, 256u);
  CAPTURE(link_rows);
  const EngineRig rig = rig_of(link_rows);
  Engine engine(options_for(rig, 2, 60, 0), rig.device);
  const Story stories[] = {Story(kShape, 140, 12), Story(kShape, 140, 13)};
  const PolicySpec few = parse_policy("none | " + windows_of(2, 8));
  const PolicySpec many = parse_policy("none | " + windows_of(2, 60));
  Teller tellers[] = {{.story = &stories[0], .id = engine.begin(few)},
                      {.story = &stories[1], .id = engine.begin(many)}};
  for (Teller& teller : tellers) import_story(engine, rig, teller, 130);
  ForwardTensors tensors(*rig.device, kShape, 2);
  while (tellers[0].at < 140) {
    const auto out = run_forward(engine, rig, tensors, {&tellers[0], &tellers[1]});
    REQUIRE(error_of(out[0], stories[0], tellers[0].at - 1, 2, 8, 0) < kTolerance);
    REQUIRE(error_of(out[1], stories[1], tellers[1].at - 1, 2, 60, 0) < kTolerance);
  }
  const std::uint64_t lists = std::uint64_t{10} * kShape.layers * kShape.kv_heads;
  const bool crosses = most_of(link_rows, 2 * kShape.kv_heads) >= 10;
  REQUIRE(engine.stats().fetched_tokens == (crosses ? 10 * lists : 0));
  REQUIRE(engine.stats().far_tokens == (crosses ? 62 : 72) * lists);
  REQUIRE(engine.stats().asked == std::uint64_t{10} * kShape.layers);
}

TEST_CASE("few far rows that are no numbers show, and others do not", "[engine][gpu][link]") {
  const std::uint32_t near = GENERATE(0u, 2u);
  CAPTURE(near);
  const EngineRig rig = rig_of(256);
  Engine engine(options_for(rig, 1, 40, near), rig.device);
  Story story(kShape, 140, 12);
  story.poison(1, 131);  // Among the recent tokens of some steps.
  Teller teller{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=2,recent=4"))};
  import_story(engine, rig, teller, 125);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  while (teller.at < story.tokens()) {
    const auto out = decode(engine, rig, teller, tensors);
    const std::uint32_t token = teller.at - 1;
    const bool sees = token >= 131 && token < 135;
    for (std::size_t i = 0; i < 3 * row; ++i) REQUIRE(std::isnan(out[i]) == (sees && i / row == 1));
  }
  if (most_of(256, kShape.kv_heads) != 0) REQUIRE(engine.stats().asked == 0);
}

TEST_CASE("layers whose far rows are few wait for no thread, and those that ask find it, whoever waits",
          "[engine][gpu][link][handover]") {
  const Handover mode = GENERATE(Handover::device, Handover::stream, Handover::host);
  CAPTURE(to_string(mode));
  const EngineRig rig = rig_of(256);
  if (most_of(256, kShape.kv_heads) == 0 || (mode == Handover::stream && !rig.device->info().stream_waits)) return;
  std::atomic<bool> stalls{false};
  EngineOptions options = options_for(rig, 1, 60, 0);
  options.handover = mode;
  options.windows = {20, 0, 20};  // Of the second layer alone far rows may be many.
  options.host_bytes *= 3;
  options.answer_timeout = 300ms;
  options.before_answer = [&] {
    if (stalls.exchange(false)) std::this_thread::sleep_for(1500ms);
  };
  Engine engine(options, rig.device);
  Story story(kShape, 130, 5);
  story.see(options.windows);
  Teller few{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=2,recent=6"))};
  Teller many{.story = &story, .id = engine.begin(parse_policy("none | near=0,sinks=2,recent=60"))};
  for (Teller* const teller : {&few, &many}) import_story(engine, rig, *teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  const auto require_right = [&](const std::vector<float>& out, std::uint32_t token, std::uint32_t recent,
                                 std::uint32_t layers) {
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      CAPTURE(layer);
      REQUIRE(worst(out, story.attended(layer, token, 2, recent, 0), layer * row) < kTolerance);
    }
  };
  std::uint64_t asked = 0, fetched = 0;
  for (std::uint32_t step = 0; few.at < story.tokens(); ++step) {
    CAPTURE(step);
    stalls = true;  // Whoever answers would sleep: nobody is asked.
    const auto of_few = decode(engine, rig, few, tensors);
    require_right(of_few, few.at - 1, 6, 3);
    REQUIRE(stalls);
    REQUIRE(engine.stats().asked == asked);
    fetched += 20 + 8 + 20;
    if (step % 4 == 2) {  // The question of the second layer is answered late.
      tensors.set(0, story, many.at);
      const Batch batch = engine.plan(one_each({&many.id, 1}), engine.options().largest, rig.stream);
      tensors.attend(engine, rig.stream);
      rig.synchronize();
      const auto out = tensors.out(0);
      require_right(out, many.at, 60, 1);
      for (std::size_t i = row; i < 3 * row; ++i) REQUIRE(std::isnan(out[i]));
      REQUIRE(code_of([&] { engine.finish(batch); }) == Errc::device);
      ++asked;
      fetched += 20;
    }
    stalls = false;
    const auto of_many = decode(engine, rig, many, tensors);
    require_right(of_many, many.at - 1, 60, 3);
    ++asked;
    fetched += 20 + 20;
    REQUIRE(engine.stats().asked == asked);
    REQUIRE(engine.stats().fetched_tokens == fetched * kShape.kv_heads);
  }
}

TEST_CASE("a forward with few far rows that is cancelled leaves the others as they are", "[engine][gpu][link]") {
  const EngineRig rig = rig_of(256);
  Engine engine(options_for(rig, 1, 40, 3), rig.device);
  const Story story(kShape, 130, 15);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=3 | near=0,sinks=1,recent=2"))};
  import_story(engine, rig, teller, 100);
  ForwardTensors tensors(*rig.device, kShape, 1);
  while (teller.at < story.tokens()) {
    const Batch batch = engine.plan(one_each({&teller.id, 1}), engine.options().largest, rig.stream);
    if (teller.at % 2 == 0) {  // After a layer of it.
      tensors.set(0, story, teller.at);
      tensors.attend_layer(engine, engine.options().largest, 0, rig.stream);
    }
    engine.cancel(batch);
    const auto out = decode(engine, rig, teller, tensors);
    REQUIRE(error_of(out, story, teller.at - 1, 1, 2, 3) < kTolerance);
  }
}

TEST_CASE("an audit knows of few far rows", "[engine][gpu][link]") {
  std::vector<AuditReport> reports;
  const Story story(kShape, 320, 25);
  for (const std::uint32_t link_rows : {256u, 0u}) {
    const EngineRig rig = rig_of(link_rows);
    EngineOptions options = options_for(rig, 1, 40, 3);
    options.largest.audit = true;
    Engine engine(options, rig.device);
    Teller teller{.story = &story,
                  .id = engine.begin(parse_policy("exact | int4 | top_k=5 | near=0,sinks=2,recent=6"))};
    import_story(engine, rig, teller, 300);
    ForwardTensors tensors(*rig.device, kShape, 1);
    while (teller.at < story.tokens()) (void)decode(engine, rig, teller, tensors);
    if (link_rows != 0 && most_of(link_rows, kShape.kv_heads) != 0) REQUIRE(engine.stats().fetched_tokens > 0);
    reports.push_back(engine.audit(teller.id));
  }
  REQUIRE(reports[0].attended_tokens == reports[1].attended_tokens);
  REQUIRE(reports[0].heads.size() == reports[1].heads.size());
  for (std::size_t i = 0; i < reports[0].heads.size(); ++i) {
    CAPTURE(i);
    REQUIRE(reports[0].heads[i].coverage == Approx(reports[1].heads[i].coverage).margin(2e-3));
    REQUIRE(reports[0].heads[i].error == Approx(reports[1].heads[i].error).margin(2e-2));
  }
}

TEST_CASE("a trace knows what crossed the link, and of no answer", "[engine][gpu][link]") {
  const EngineRig rig = rig_of(256);
  EngineOptions options = options_for(rig, 1, 40, 3);
  options.largest.trace = true;
  Engine engine(options, rig.device);
  const Story story(kShape, 330, 91);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=5 | near=0,sinks=2,recent=6"))};
  import_story(engine, rig, teller, 300);
  ForwardTensors tensors(*rig.device, kShape, 1);
  const PageLayout far{.head_dim = kShape.head_dim, .dtype = rig.kv_dtype};
  const double token = static_cast<double>(far.page_bytes() / far.page_tokens);
  const PlanItem item{.sequence = teller.id};
  while (teller.at < story.tokens()) {
    const EngineStats before = engine.stats();
    tensors.set(0, story, teller.at++);
    const Batch batch = run_batch(engine, rig, tensors, {&item, 1}, options.largest);
    const EngineStats after = engine.stats();
    double linked = 0.0, asked = 0.0;
    for (const WorkItem& work : engine.trace(batch).work) {
      const double bytes = static_cast<double>(work.bytes());
      if (work.stage == Stage::attend && work.lane == Lane::link) linked += bytes;
      if (work.stage == Stage::attend_far) asked += bytes;
    }
    const double margin = token * kShape.layers;  // A layer's tokens are rounded.
    REQUIRE(linked == Approx(token * static_cast<double>(after.fetched_tokens - before.fetched_tokens)).margin(margin));
    REQUIRE(asked == Approx(token * static_cast<double>(after.far_tokens - before.far_tokens)).margin(margin));
  }
  if (most_of(256, kShape.kv_heads) != 0) REQUIRE(engine.stats().fetched_tokens > 0);
}
