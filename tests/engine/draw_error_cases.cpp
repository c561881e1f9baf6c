// Query heads that draw as many tokens as their error bars ask for.
#include "tests/support/engine_drafts.hpp"
#include "tests/support/engine_draws.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::draws;

namespace {

std::string with(const std::string& sample, const std::string& near = "near=0,sinks=4,recent=20") {
  return "exact | int4 | " + sample + " | " + near;
}

/// What is attended so far, wherever it lies.
std::uint64_t attended(const Engine& engine) {
  const EngineStats stats = engine.stats();
  return stats.near_tokens + stats.far_tokens + stats.fetched_tokens;
}

/// Tokens that a sequence of a policy attends in its next steps, and the mean of its error bars.
struct Drawn {
  std::uint64_t tokens = 0;
  double bar = 0.0;
};
Drawn drawn_by(const EngineRig& rig, const Story& story, const std::string& text, std::uint32_t from) {
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller = begun(engine, rig, story, text.c_str(), from);
  const std::uint64_t before = attended(engine);
  while (teller.at < story.tokens()) (void)decode(engine, rig, teller);
  const EngineStats stats = engine.stats();
  return {attended(engine) - before,
          1e-6 * static_cast<double>(stats.error_bars) / static_cast<double>(stats.drawn_heads)};
}

/// Both attend the same, with the same outputs but for so much.
void require_same(const EngineRig& rig, const Story& story, const std::string& one, const std::string& other,
                  std::uint32_t from, double off = 0.0) {
  CAPTURE(one, other);
  Engine engine(options_for(rig, 1, 0), rig.device);  // The same parts of both: nothing is near.
  Teller first = begun(engine, rig, story, one.c_str(), from);
  Teller second = begun(engine, rig, story, other.c_str(), from);
  while (first.at < story.tokens()) {
    const std::uint64_t before = attended(engine);
    const std::vector<float> out = decode(engine, rig, first);
    const std::uint64_t between = attended(engine);
    REQUIRE(difference(out, decode(engine, rig, second)) <= off);
    REQUIRE(attended(engine) - between == between - before);
  }
}

}  // namespace

TEST_CASE("heads whose error bars are large draw more, as the reference does", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const auto [near, softcap, stream] =
      GENERATE(table<std::uint32_t, float, bool>({{0u, 0.f, false}, {7u, 0.f, true}, {7u, 3.f, false}}));
  CAPTURE(near, softcap, stream);
  const Story story = story_of(rig, 300, 951);
  EngineOptions options = options_for(rig, 1, near);
  options.softcap = softcap;
  if (stream) options.placement = PlacementMode::stream;
  Engine engine(options, rig.device);
  Teller teller = begun(engine, rig, story, kSampleError, 270);
  Held held;
  goes_on(engine, rig, teller, kErrorDraws, 30, held);
  held.require();
}

TEST_CASE("some heads draw more and others do not, and the error bars show it", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 290, 952);
  const Drawn few = drawn_by(rig, story, with("sample=6"), 270);
  const Drawn some = drawn_by(rig, story, kSampleError, 270);
  const Drawn many = drawn_by(rig, story, with("sample=24"), 270);
  CAPTURE(few.tokens, some.tokens, many.tokens, few.bar, some.bar, many.bar);
  REQUIRE(few.tokens < some.tokens);
  REQUIRE(some.tokens < many.tokens);
  REQUIRE(some.bar < few.bar);
  REQUIRE(many.bar < some.bar);
}

TEST_CASE("an error that no head has changes nothing, and one that each has is a sample of the bound",
          "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const std::string draws = GENERATE("", ",draws=group", ",seed=5,redraw=2");
  const Story story = story_of(rig, 200, 953);
  require_same(rig, story, with("sample=9" + draws), with("sample=9,error=99%" + draws), 180);
  require_same(rig, story, with("sample=36" + draws), with("sample=9,error=0.0000001%" + draws), 180);
  require_same(rig, story, with("sample=50" + draws), with("sample=9,error=0.0000001%,most=50" + draws), 180);
  require_same(rig, story, with("sample=9" + draws), with("sample=9,error=0.0000001%,most=9" + draws), 180);
}

TEST_CASE("bounds of more tokens than there are draw all of them", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 130, 954);
  // 106 candidates and fewer: of the third bound one more than there are, of the fourth one fewer.
  const std::string most = GENERATE("500", "110", "106", "105", "100");
  // Who attends everything, and so without chances, may add up in another order.
  require_same(rig, story, with("sample=" + most), with("sample=9,error=0.0000001%,most=" + most), 118, tolerance(rig));
  require_same(rig, story, with("sample=9"), with("sample=9,error=99%,most=" + most), 118);
}

TEST_CASE("few tokens are attended whole, and then as many as it takes", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const Story story = story_of(rig, 70, 955);
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story,
                .id = engine.begin(parse_policy(with("sample=2,error=25%,most=14", "near=0,sinks=1,recent=3")))};
  Held held;
  goes_on(engine, rig, teller, {.sinks = 1, .recent = 3, .drawn = 2, .error = 0.25, .most = 14}, 60, held);
  held.require();
}

TEST_CASE("groups of one, three and seven heads draw as many as each asks for", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t group = GENERATE(1u, 3u, 7u);
  const bool shared = GENERATE(false, true);
  CAPTURE(group, shared);
  const AttentionShape shape{.layers = 1, .q_heads = 2 * group, .kv_heads = 2, .head_dim = 64};
  Story story(shape, 260, 956);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec spec =
      parse_policy(with(std::string("sample=6,error=20%,most=24") + (shared ? ",draws=group" : "")));
  EngineOptions options{
      .shape = shape, .kv_dtype = rig.kv_dtype, .policies = {spec}, .threads = 2, .pin_threads = false};
  options.host_bytes = 40 * block_bytes(options);
  options.largest.decode_rows = 1;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(spec)};
  import_story(engine, rig, teller, 240);
  DrawPolicy policy = kErrorDraws;
  policy.group_draws = shared;
  ForwardTensors tensors(*rig.device, shape, 1);
  Held held;
  for (; teller.at < story.tokens(); ++teller.at) {
    tensors.set(0, story, teller.at);
    const std::array items{PlanItem{.sequence = teller.id}};
    (void)run_batch(engine, rig, tensors, items, options.largest);
    const std::optional<Attention> want = attended_with_draws(story, shape, 0, {.first = teller.at}, policy);
    ++(want ? held.layers : held.close);
    if (want) REQUIRE(difference(tensors.out(0), want->out) < tolerance(rig));
  }
  REQUIRE(held.layers > held.close);
}

TEST_CASE("ties, keys that stand out and keys that are no numbers ask for more draws", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  require_hard_keys(rig, options_for(rig, 1, 0), story_of(rig, 220, 957), 25.f, kSampleError, kErrorDraws);
}

TEST_CASE("long sequences draw as many as it takes in parts of theirs", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t rows = GENERATE(1u, 2u);
  CAPTURE(rows);
  const Held held =
      over_many_tokens(rig, options_for(rig, rows, 9), story_of(rig, 5016, 958), with("sample=12,error=20%,most=48"),
                       {.sinks = 4, .recent = 20, .drawn = 12, .error = 0.2, .most = 48});
  REQUIRE(held.layers > held.close);
}

TEST_CASE("a batch of policies with error bars attends what each does alone", "[engine][sample]") {
  const EngineRig rig = engine_rig();
  const auto options = [&](std::uint32_t rows, std::uint32_t near) { return options_for(rig, rows, near); };
  require_same_in_batch(rig, options, GENERATE(0u, 10u), 9,
                        {{kSampleError, 200},
                         {"exact | int4 | top_k=30 | near=0,sinks=4,recent=12", 90},
                         {"exact | int4 | sample=5,error=12%,most=90 | near=0,sinks=0,recent=1", 170},
                         {"exact | int4 | sample=9 | near=0", 150},
                         {"exact | int4 | sample=9,error=18%,draws=group | near=0 | dense=1", 133}});
}

TEST_CASE("drafts that are verified together each draw as many as they ask for", "[engine][sample][drafts]") {
  const EngineRig rig = engine_rig();
  const auto [near, softcap] = GENERATE(table<std::uint32_t, float>({{0u, 0.f}, {9u, 3.f}}));
  CAPTURE(near, softcap);
  const Story story = story_of(rig, 320, 959);
  EngineOptions options = options_for(rig, 4, near);
  options.largest.drafts = 4;
  options.softcap = softcap;
  Engine engine(options, rig.device);
  AttentionShape shape = kShape;
  shape.softcap = softcap;
  Teller teller = begun(engine, rig, story, kSampleError, 250);
  Held held;
  for (const std::uint32_t count : {4u, 1u, 3u, 2u, 4u, 1u, 1u, 2u}) {
    const std::uint32_t at = teller.at;
    const auto rows = drafts::run(engine, rig, {.decode_rows = 4, .drafts = 4, .unbounded = true}, {{&teller, count}});
    for (std::uint32_t draft = 0; draft < count; ++draft)
      require_drawn(rig, rows[0][draft].out, rows[0][draft].lse, story, shape,
                    {.first = at, .drafts = count, .draft = draft}, kErrorDraws, held);
  }
  REQUIRE(held.layers > held.close);  // As many heads again as there are drafts may be close.
}
