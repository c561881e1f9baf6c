// Tokens that are drawn by their estimated weight, and divided by the chance that they were.
#include "tests/support/engine_draws.hpp"

#include "tests/support/engine_drafts.hpp"
#include "tests/support/engine_park.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::draws;
using parks::parked;
using prefixes::begin_named;
using prefixes::ids_of;

TEST_CASE("sampled attention is the reference's, near, far and over the link", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const auto [near, softcap, stream] =
      GENERATE(table<std::uint32_t, float, bool>({{0u, 0.f, false}, {7u, 0.f, true}, {7u, 3.f, false}}));
  CAPTURE(near, softcap, stream);
  const Story story = story_of(rig, 300, 921);
  EngineOptions options = options_for(rig, 1, near);
  options.softcap = softcap;
  if (stream) options.placement = PlacementMode::stream;
  Engine engine(options, rig.device);
  Teller teller = begun(engine, rig, story, kSample, 270);
  Held held;
  goes_on(engine, rig, teller, kDraws, 30, held);
  held.require();
}

TEST_CASE("draws follow seed, turn and head or group", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const auto [text, policy] = GENERATE(table<const char*, DrawPolicy>(
      {{"exact | int4 | sample=6,seed=9 | near=0,sinks=4,recent=20", {.sinks = 4, .recent = 20, .drawn = 6, .seed = 9}},
       {"exact | int4 | sample=6,redraw=3 | near=0,sinks=4,recent=20",
        {.sinks = 4, .recent = 20, .drawn = 6, .redraw = 3}},
       {"exact | int4 | sample=6,draws=group | near=0,sinks=4,recent=20",
        {.sinks = 4, .recent = 20, .drawn = 6, .group_draws = true}}}));
  CAPTURE(text);
  const Story story = story_of(rig, 200, 922);
  Engine engine(options_for(rig, 1, 5), rig.device);
  Teller teller = begun(engine, rig, story, text, 180);
  Held held;
  goes_on(engine, rig, teller, policy, 12, held);
  held.require();
}

TEST_CASE("a sample of all tokens is dense attention, bit by bit", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 160, 923);
  Engine engine(options_for(rig, 1, 0), rig.device);  // The same parts of both: nothing is near.
  Teller sampled = begun(engine, rig, story, "exact | int4 | sample=200 | near=0,sinks=4,recent=20", 140);
  Teller dense = begun(engine, rig, story, prefixes::kFull, 140);
  while (sampled.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, sampled);
    REQUIRE(error_of(out, story, sampled.at - 1) < tolerance(rig));
    REQUIRE(difference(out, decode(engine, rig, dense)) == 0.0);
  }
}

TEST_CASE("few tokens are attended whole until there is something to draw", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 60, 924);
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | sample=1 | near=0,sinks=1,recent=3"))};
  Held held;
  goes_on(engine, rig, teller, {.sinks = 1, .recent = 3, .drawn = 1}, 40, held);
  held.require();
}

TEST_CASE("ties, keys that stand out and keys that are no numbers are drawn by their chances", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  require_hard_keys(rig, options_for(rig, 1, 0), story_of(rig, 220, 925), 40.f, kSample, kDraws);
}

TEST_CASE("long sequences draw in parts of theirs, as whole ones would", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t rows = GENERATE(1u, 2u);
  CAPTURE(rows);
  over_many_tokens(rig, options_for(rig, rows, 9), story_of(rig, 5016, 926),
                   "exact | int4 | sample=40 | near=0,sinks=4,recent=20", {.sinks = 4, .recent = 20, .drawn = 40})
      .require();
}

TEST_CASE("a batch of policies that draw and that do not attends what each does alone", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) { return options_for(rig, rows, near); };
  require_same_in_batch(rig, options, GENERATE(0u, 10u), 9,
                        {{kSample, 200},
                         {"exact | int4 | top_k=30 | near=0,sinks=4,recent=12", 90},
                         {"exact | int4 | sample=5,seed=3 | near=0,sinks=0,recent=1", 170},
                         {"lfps", 120},
                         {"exact | int4 | sample=9,draws=group | near=0 | dense=1", 133}});
}

TEST_CASE("layers with windows, dense layers and short sequences draw nothing", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const std::string sample = GENERATE(kSample, kSampleError);
  Story story = story_of(rig, 170, 927);
  story.see({40, 0, 0});
  EngineOptions options = options_for(rig, 1, 0);
  options.windows = {40, 0, 0};
  options.dense_tokens = 100;
  Engine engine(options, rig.device);
  for (const std::uint32_t from : {150u, 90u}) {
    Teller teller = begun(engine, rig, story, (sample + " | dense=2").c_str(), from);
    const std::vector<float> out = decode(engine, rig, teller);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      CAPTURE(from, layer);
      const std::vector<double> dense = story.attended(layer, from, 100'000, 1, 0);
      const bool draws = layer == 2 && from == 150;
      REQUIRE((off_in_layer(out, dense, layer) > tolerance(rig)) == draws);
    }
  }
}

TEST_CASE("what is drawn depends on neither chunks, forks, prefixes, parking nor what is near", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const char* const sample = GENERATE(kSample, kSampleError);
  const Story story = story_of(rig, 230, 928);
  Engine engine(options_for(rig, 1, 5), rig.device);
  Teller first = begin_named(engine, story, sample, ids_of(210));
  prefill(engine, rig, first, 210);
  Teller found = begin_named(engine, story, sample, ids_of(210));
  REQUIRE(found.at == 208);
  prefill(engine, rig, found, 210);
  Teller pieces{.story = &story, .id = engine.begin(parse_policy(sample))};
  for (const std::uint32_t chunk : {1u, 14u, 2u, 50u, 93u, 50u}) (void)run(engine, rig, {&pieces}, {chunk}, true);
  Teller child{.story = &story, .id = engine.fork(first.id, 210), .at = 210};
  const parks::Area area = parked(engine, first.id);
  Engine other(options_for(rig, 1, 0), rig.device);
  Teller back{.story = &story, .id = other.resume(area), .at = 210};
  while (first.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, first);
    for (Teller* same : {&found, &pieces, &child}) REQUIRE(difference(decode(engine, rig, *same), out) < rig.tolerance);
    REQUIRE(difference(decode(other, rig, back), out) < tolerance(rig));
  }
}

TEST_CASE("drafts that are verified together attend what any of them draws, by the chance of that",
          "[engine][sample][drafts]") {
  const EngineRig rig = engine_rig();
  const auto [near, softcap, group] =
      GENERATE(table<std::uint32_t, float, bool>({{0u, 0.f, false}, {9u, 3.f, false}, {9u, 0.f, true}}));
  CAPTURE(near, softcap, group);
  const Story story = story_of(rig, 300, 929);
  EngineOptions options = options_for(rig, 4, near);
  options.largest.drafts = 4;
  options.softcap = softcap;
  Engine engine(options, rig.device);
  AttentionShape shape = kShape;
  shape.softcap = softcap;
  DrawPolicy policy = kDraws;
  policy.group_draws = group;
  const char* const text = group ? "exact | int4 | sample=12,draws=group | near=0,sinks=4,recent=20" : kSample;
  Teller teller = begun(engine, rig, story, text, 250);
  Held held;
  for (const std::uint32_t count : {4u, 1u, 3u, 2u, 4u}) {
    const std::uint32_t at = teller.at;
    const auto rows = drafts::run(engine, rig, {.decode_rows = 4, .drafts = 4, .unbounded = true}, {{&teller, count}});
    for (std::uint32_t draft = 0; draft < count; ++draft)
      require_drawn(rig, rows[0][draft].out, rows[0][draft].lse, story, shape,
                    {.first = at, .drafts = count, .draft = draft}, policy, held);
  }
  REQUIRE(held.layers > held.close);  // As many heads again as there are drafts may be close.
}

TEST_CASE("sequences of many seeds attend what dense attention does on average", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  constexpr std::uint32_t kRows = 32, kTokens = 90;
  const std::uint32_t forwards = rig.on_gpu ? 313 : 10;  // 10,016 seeds; few on a CPU, where all that is new is tested.
  const Story story = story_of(rig, kTokens + 1, 930);
  EngineOptions options = options_for(rig, kRows, 0);
  options.largest.prefill_rows = kTokens;
  options.sequences = kRows;
  options.host_bytes = kRows * 8 * block_bytes(options);
  Engine engine(options, rig.device);
  const std::size_t heads = std::size_t{kShape.layers} * kShape.q_heads;
  std::vector<double> mass(heads), squares(heads), value(heads), value_squares(heads), want(heads), want_value(heads);
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    std::vector<double> lse;
    const std::vector<double> out = story.attended(layer, kTokens, 100'000, 1, 0, &lse);
    for (std::uint32_t h = 0; h < kShape.q_heads; ++h) {
      want[layer * kShape.q_heads + h] = lse[h];
      want_value[layer * kShape.q_heads + h] = out[h * kShape.head_dim];
    }
  }
  for (std::uint32_t forward = 0; forward < forwards; ++forward) {
    std::vector<Teller> tellers;
    std::vector<Teller*> all;
    for (std::uint32_t i = 0; i < kRows; ++i) {
      const std::string text =
          "exact | int4 | sample=10,seed=" + std::to_string(forward * kRows + i) + " | near=0,sinks=1,recent=8";
      tellers.push_back({.story = &story, .id = engine.begin(parse_policy(text))});
      import_story(engine, rig, tellers.back(), kTokens);
    }
    Bucket bucket = engine.options().largest;
    bucket.prefill_rows = bucket.prefills = 0;
    ForwardTensors tensors(*rig.device, kShape, bucket.rows());
    std::vector<PlanItem> items;
    for (std::uint32_t i = 0; i < kRows; ++i) {
      tensors.set(i, story, kTokens);
      items.push_back({.sequence = tellers[i].id});
    }
    (void)run_batch(engine, rig, tensors, items, bucket);
    for (std::uint32_t i = 0; i < kRows; ++i) {
      const std::vector<float> out = tensors.out(i), lse = tensors.lse(i);
      for (std::size_t h = 0; h < heads; ++h) {
        const double x = std::exp(double{lse[h]} - want[h]);
        const double y = x * double{out[h * kShape.head_dim]};
        mass[h] += x;
        squares[h] += x * x;
        value[h] += y;
        value_squares[h] += y * y;
      }
      engine.end(tellers[i].id);
    }
  }
  const double count = double{1} * forwards * kRows;
  const EngineStats stats = engine.stats();
  REQUIRE(static_cast<double>(stats.drawn_heads) == count * static_cast<double>(heads));
  const double bar = 1e-6 * static_cast<double>(stats.error_bars) / static_cast<double>(stats.drawn_heads);
  double variance = 0.0;
  for (std::size_t h = 0; h < heads; ++h) variance += squares[h] / count - mass[h] / count * (mass[h] / count);
  CAPTURE(bar, variance);
  // Some keys of the story weigh more than their codes say.
  REQUIRE(std::sqrt(variance / static_cast<double>(heads)) < 5 * bar);
  REQUIRE(std::sqrt(variance / static_cast<double>(heads)) > 0.2 * bar);
  for (std::size_t h = 0; h < heads; ++h) {
    const auto error = [&](double sum, double of_squares) {
      return std::sqrt((of_squares / count - sum / count * (sum / count)) / count);
    };
    CAPTURE(h, mass[h] / count, error(mass[h], squares[h]), value[h] / count, want_value[h]);
    REQUIRE(std::abs(mass[h] / count - 1.0) < 4 * error(mass[h], squares[h]));
    REQUIRE(std::abs(value[h] / count - want_value[h]) < 4 * error(value[h], value_squares[h]) + 1e-4);
  }
}

TEST_CASE("audits count what was drawn", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 240, 931);
  EngineOptions options = options_for(rig, 1, 4);
  options.largest.audit = true;
  Engine engine(options, rig.device);
  Teller teller = begun(engine, rig, story, kSample, 220);
  while (teller.at < story.tokens()) (void)decode(engine, rig, teller);
  const AuditReport report = engine.audit(teller.id);
  const std::uint64_t lists = report.tokens * kShape.layers * kShape.kv_heads;
  REQUIRE(report.tokens > 0);
  REQUIRE(report.attended_tokens > lists * (24 + 12));
  REQUIRE(report.attended_tokens <= lists * (24 + kShape.group() * 12));
}
