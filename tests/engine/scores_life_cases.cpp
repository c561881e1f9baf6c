// Sequences that choose by scores of the caller, beside others, and whatever happens to them; and what is refused.
#include <array>
#include <string>

#include "tests/support/engine_park.hpp"
#include "tests/support/engine_scores.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::scores;

namespace {

const AttentionShape kShape = shape_of(4);
const Policy kPolicy{.picks = 15};

struct Mate {
  std::string policy;
  std::uint32_t prompt;
  Kind kind;
};

}  // namespace

TEST_CASE("a batch of rows with scores and of others attends what each does alone, near or far", "[engine][scores]") {
  const std::uint32_t near = GENERATE(0u, 100u);
  CAPTURE(near);
  const EngineRig rig = engine_rig();
  constexpr std::uint32_t kSteps = 6;
  const std::array<Mate, 6> mates{{{kPolicy.text(), 200, Kind::any},
                                   {"exact | int4 | top_k=15 | near=0,sinks=4,recent=12", 150, Kind::any},
                                   {"scores | top_k=9 | near=0,sinks=4,recent=12", 90, Kind::few},
                                   {"exact | int4 | sample=9 | near=0,sinks=4,recent=12", 120, Kind::any},
                                   {"scores | top_p=0.6 | near=0,sinks=4,recent=12 | dense=1", 170, Kind::few},
                                   {"full", 60, Kind::any}}};
  const auto options = [&](std::uint32_t blocks) {
    EngineOptions all = scores::options_for(rig, kShape, mates.size(), blocks);
    all.largest.unbounded = true;
    all.policies.push_back(parse_policy(kManyTokens));
    return all;
  };
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < mates.size(); ++i)
    stories.push_back(story_of(rig, kShape, mates[i].prompt + kSteps, 1200 + i));
  std::vector<std::vector<std::vector<float>>> alone(mates.size());
  for (std::uint32_t i = 0; i < mates.size(); ++i) {
    Engine engine(options(0), rig.device);
    Teller teller = begun(engine, rig, stories[i], mates[i].policy, mates[i].prompt);
    for (std::uint32_t s = 0; s < kSteps; ++s) alone[i].push_back(scores::decode(engine, rig, teller, mates[i].kind));
  }
  Engine engine(options(near), rig.device);
  std::vector<Teller> tellers;
  for (std::uint32_t i = 0; i < mates.size(); ++i)
    tellers.push_back(begun(engine, rig, stories[i], mates[i].policy, mates[i].prompt));
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    std::vector<Part> parts;  // In another order each time.
    for (std::uint32_t i = 0; i < mates.size(); ++i) {
      const std::uint32_t at = (i + s) % mates.size();
      parts.push_back({.teller = &tellers[at], .kind = mates[at].kind});
    }
    const auto out = scores::run(engine, rig, engine.options().largest, parts);
    for (std::uint32_t i = 0; i < mates.size(); ++i) {
      const std::uint32_t at = (i + s) % mates.size();
      CAPTURE(s, mates[at].policy);
      REQUIRE(difference(out[i], alone[at][s]) < scores::tolerance(rig));
    }
  }
}

TEST_CASE("nothing that happens to a sequence with scores changes what it attends", "[engine][scores]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, kShape, 226, 1210);
  EngineOptions options = scores::options_for(rig, kShape, 1, 5);
  options.largest.prefill_rows = 210;
  options.largest.prefills = 1;
  Engine engine(options, rig.device);
  Teller first = prefixes::begin_named(engine, story, kPolicy.text().c_str(), prefixes::ids_of(210));
  Bucket prompt = engine.options().largest;
  prompt.decode_rows = 0;
  const auto read = [&](Teller& teller) {
    (void)scores::run(engine, rig, prompt, {{.teller = &teller, .count = 210 - teller.at, .prefill = true}});
  };
  read(first);
  Teller found = prefixes::begin_named(engine, story, kPolicy.text().c_str(), prefixes::ids_of(210));
  REQUIRE(found.at == 208);
  read(found);
  for (int step = 0; step < 3; ++step) {
    const std::vector<float> out = scores::decode(engine, rig, first);
    REQUIRE(difference(scores::decode(engine, rig, found), out) < rig.tolerance);
  }
  Teller child{.story = &story, .id = engine.fork(first.id, first.at), .at = first.at};
  engine.truncate(found.id, 211);
  found.at = 211;
  while (found.at < first.at) (void)scores::decode(engine, rig, found);
  const parks::Area area = parks::parked(engine, first.id);
  Engine other(scores::options_for(rig, kShape, 1, 0), rig.device);
  Teller back{.story = &story, .id = other.resume(area), .at = first.at};
  while (first.at < story.tokens()) {
    const std::vector<float> out = scores::decode(engine, rig, first);
    CAPTURE(first.at);
    REQUIRE(off(out, story, kShape, {.first = first.at - 1}, kPolicy, Kind::any) < scores::tolerance(rig));
    for (Teller* same : {&found, &child}) REQUIRE(difference(scores::decode(engine, rig, *same), out) < rig.tolerance);
    REQUIRE(difference(scores::decode(other, rig, back), out) < scores::tolerance(rig));
  }
}

TEST_CASE("layers with windows, dense layers and short sequences want no scores", "[engine][scores]") {
  const EngineRig rig = engine_rig();
  Story story = story_of(rig, kShape, 170, 1211);
  story.see({40, 0});
  EngineOptions options = scores::options_for(rig, kShape, 1, 0);
  options.windows = {40, 0};
  options.dense_tokens = 96;
  options.largest.unbounded = true;
  Engine engine(options, rig.device);
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  const auto dense_in = [&](std::span<const float> out, std::uint32_t layer, std::uint32_t token) {
    return difference(out.subspan(layer * row, row), story.attended(layer, token, 100'000, 1, 0)) <
           scores::tolerance(rig);
  };
  Teller teller = begun(engine, rig, story, kPolicy.text(), 150);
  const std::vector<float> out = scores::decode(engine, rig, teller);
  REQUIRE(dense_in(out, 0, 150));
  REQUIRE_FALSE(dense_in(out, 1, 150));
  Teller dense = begun(engine, rig, story, kPolicy.text() + " | dense=2", 150);
  const std::vector<float> whole = scores::decode(engine, rig, dense);
  REQUIRE(dense_in(whole, 1, 150));
  Teller brief = begun(engine, rig, story, kPolicy.text(), 90);
  REQUIRE(dense_in(scores::decode(engine, rig, brief), 1, 90));

  // A layer with a window is given none.
  ForwardTensors tensors(*rig.device, kShape, 1);
  tensors.set(0, story, teller.at);
  Brought brought(*rig.device, kShape.layers, 1, 1, engine.options().largest.max_tokens);
  brought.set(0, Kind::any, teller.at);
  tensors.bring({TensorView{}, brought.views()[1]});
  (void)run_batch(engine, rig, tensors, one_each(std::array{teller.id}), engine.options().largest);
  // Nor is any in a bucket of short sequences.
  tensors.bring({});
  Bucket shortest = engine.options().largest;
  shortest.max_tokens = 96;
  tensors.set(0, story, brief.at);
  (void)run_batch(engine, rig, tensors, one_each(std::array{brief.id}), shortest);
  REQUIRE(engine.tokens(brief.id) == 92);
}

TEST_CASE("scores that are missing or do not fit are asked for, and the layer can be given others",
          "[engine][scores]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, kShape, 130, 1212);
  Engine engine(scores::options_for(rig, kShape, 2, 0), rig.device);
  Teller teller = begun(engine, rig, story, kPolicy.text(), 128);
  ForwardTensors tensors(*rig.device, kShape, 2);
  tensors.set(0, story, 128);
  const Bucket bucket = engine.options().largest;
  const Batch batch = engine.plan(one_each(std::array{teller.id}), bucket, rig.stream);
  const std::uint32_t tokens = bucket.max_tokens;
  Brought brought(*rig.device, kShape.layers, 3, 2, tokens + 8);
  brought.set(0, Kind::any, 128);
  const TensorView good = brought.views()[0];
  const auto refused = [&](TensorView scores, const std::string& words) {
    tensors.bring({scores, scores});
    const Refusal refusal = refusal_of([&] { tensors.attend_layer(engine, bucket, 0, rig.stream); });
    CAPTURE(refusal.text);
    REQUIRE(refusal.code == Errc::invalid_argument);
    REQUIRE(refusal.text.find(words) != std::string::npos);
  };
  refused({}, "comes without scores");
  const auto spoilt = [&](auto change) {
    TensorView view = good;
    change(view);
    return view;
  };
  refused(spoilt([](TensorView& view) { view.tokens = 1; }), "scores is [1, 2, ");
  refused(spoilt([](TensorView& view) { view.heads = 3; }), "needs [2, 2 or 1, ");
  refused(spoilt([&](TensorView& view) { view.head_dim = tokens - 1; }), "or more rows and tokens");
  refused(spoilt([](TensorView& view) { view.dtype = DType::bf16; }), "not f32");
  refused(spoilt([](TensorView& view) { view.data = nullptr; }), "scores.data is null");
  refused(spoilt([](TensorView& view) { view.data += 2; }), "no multiple of 4");
  tensors.bring(brought.views());  // More rows and tokens than there have to be.
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) tensors.attend_layer(engine, bucket, layer, rig.stream);
  engine.finish(batch);
  rig.synchronize();
  REQUIRE(off(tensors.out(0), story, kShape, {.first = 128}, kPolicy, Kind::any) < scores::tolerance(rig));
}

TEST_CASE("engines say what they need for scores, and keep no copies of keys where nothing else chooses",
          "[engine][scores]") {
  const EngineRig rig = engine_rig();
  const PolicySpec policy = parse_policy(kPolicy.text());
  const PolicySpec copies = parse_policy("exact | int4 | top_k=15 | near=0");
  EngineOptions options = named(scores::options_for(rig, kShape, 1, 2), {kManyTokens});
  options.largest.scores = false;
  {
    Engine engine(options, rig.device);
    REQUIRE(engine.memory().codes != 0);
    const Refusal refusal = refusal_of([&] { (void)engine.begin(policy); });
    REQUIRE(refusal.code == Errc::unsupported);
    REQUIRE(refusal.text.find("EngineOptions::policies") != std::string::npos);
  }
  options.policies = {policy};
  {
    Engine engine(options, rig.device);
    REQUIRE(engine.options().largest.scores);
    REQUIRE(engine.memory().codes == 0);
    REQUIRE(engine.sizes().code_bits == 0);
    const Refusal refusal = refusal_of([&] { (void)engine.begin(copies); });
    REQUIRE(refusal.code == Errc::unsupported);
    REQUIRE(refusal.text.find("EngineOptions::policies") != std::string::npos);
    const SequenceId id = engine.begin(policy);
    Bucket bucket = engine.options().largest;
    bucket.scores = false;
    const Refusal unplanned = refusal_of([&] { (void)engine.plan(one_each(std::array{id}), bucket, rig.stream); });
    REQUIRE(unplanned.code == Errc::invalid_argument);
    REQUIRE(unplanned.text.find("Bucket::scores") != std::string::npos);
  }
  options.policies.push_back(copies);
  Engine engine(options, rig.device);
  REQUIRE(engine.memory().codes != 0);
  (void)engine.begin(policy);
  (void)engine.begin(copies);
}
