// What a forward is planned to do, by hand.
#include "scheduler/plan/forward_work.hpp"

#include <algorithm>
#include <optional>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/page_rules.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;

namespace {

constexpr std::uint32_t kPage = 16;
constexpr AttentionShape kShape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
constexpr std::uint64_t kRow = 128;             // Bytes of a row of K or V in bf16.
constexpr std::uint64_t kCopy = 32 + 4;         // Of its 4-bit copy.
constexpr std::uint64_t kQueries = 4 * 64 * 8;  // Of a token.
constexpr std::uint64_t kPartial = 4 * 65 * 8;  // Of a row.

WorkPlace place_for(const Bucket& bucket, PlacementMode placement = PlacementMode::hybrid) {
  return {.shape = kShape,
          .layout = {.page_tokens = kPage, .head_dim = 64, .dtype = DType::bf16},
          .placement = placement,
          .bucket = bucket};
}

ForwardRow row_of(const char* policy, std::uint32_t tokens) {
  ForwardRow row = forward_row(parse_policy(policy), tokens, {.page_tokens = kPage});
  row.list = 0;
  return row;
}

/// Of one stage and lane, over all layers.
struct Sum {
  std::uint64_t items = 0, rows = 0, read = 0, written = 0;
};
Sum sum_of(const std::vector<WorkItem>& items, Stage stage, Lane lane) {
  Sum sum;
  for (const WorkItem& item : items) {
    if (item.stage != stage || item.lane != lane) continue;
    ++sum.items;
    sum.rows += item.rows;
    sum.read += item.read;
    sum.written += item.written;
  }
  return sum;
}

/// Whether `later` has to wait for `earlier`, at least by way of others.
bool waits(const std::vector<WorkItem>& items, std::uint32_t later, std::uint32_t earlier) {
  return later == earlier || std::ranges::any_of(items[later].after, [&](std::uint32_t before) {
           return before >= earlier && waits(items, before, earlier);
         });
}

std::uint32_t find(const std::vector<WorkItem>& items, Stage stage, std::uint32_t layer,
                   std::optional<Lane> lane = {}) {
  const auto found = std::ranges::find_if(items, [&](const WorkItem& item) {
    return item.stage == stage && item.layer == layer && item.lane == lane.value_or(item.lane);
  });
  REQUIRE(found != items.end());
  return static_cast<std::uint32_t>(found - items.begin());
}

}  // namespace

TEST_CASE("copies of 3 bits are read and written in three quarters of the bytes, but for scale and zero", "[plan]") {
  WorkPlace place = place_for({.decode_rows = 1});
  place.code_bits = 3;
  const ForwardRow rows[] = {row_of("exact | int3 | top_k=9 | near=0,sinks=4,recent=20", 100)};
  const std::vector<WorkItem> items = forward_work(place, rows, {}, {});
  constexpr std::uint64_t kFew = 24 + 4;
  REQUIRE(sum_of(items, Stage::score, Lane::device).read == kFew * 100 * kShape.kv_heads * kShape.layers);
  place.code_bits = 4;
  const std::vector<WorkItem> wide = forward_work(place, rows, {}, {});
  REQUIRE(sum_of(wide, Stage::score, Lane::device).read == kCopy * 100 * kShape.kv_heads * kShape.layers);
  REQUIRE(sum_of(wide, Stage::append, Lane::device).written - sum_of(items, Stage::append, Lane::device).written ==
          (kCopy - kFew) * kShape.kv_heads * kShape.layers);
}

TEST_CASE("a forward without rows has no work", "[plan]") {
  REQUIRE(forward_work(place_for({.decode_rows = 3}), {}, {}, {}).empty());
  const ForwardRow padding[3] = {};
  REQUIRE(forward_work(place_for({.decode_rows = 3, .prefill_rows = 4, .prefills = 1}), padding,
                       std::vector<ForwardChunk>(1), {})
              .empty());
}

TEST_CASE("short sequences are attended whole, and long ones as their policy chooses", "[plan]") {
  const PolicySpec spec = parse_policy("pages:pages=2 | int4 | top_k=3 | near=0,sinks=2,recent=6 | dense=1");
  const RowShape shape{.page_tokens = kPage, .q_heads = 8, .kv_heads = 2, .dense_tokens = 500};
  for (const std::uint32_t tokens : {1u, 499u, 500u}) {
    const ForwardRow row = forward_row(spec, tokens, shape);
    REQUIRE((row.whole() && !row.ranks() && !row.in_pages() && row.tokens == tokens));
  }
  REQUIRE_FALSE(forward_row(spec, 501, shape).whole());
  REQUIRE(forward_team(spec, 499, 4, shape).whole());  // Its first row is short.
  REQUIRE_FALSE(forward_team(spec, 500, 4, shape).whole());
  for (const char* other : {"lfps", "tactic | int4", "topk"}) {
    CAPTURE(other);
    REQUIRE_FALSE(may_be_dense(parse_policy(other)));
    REQUIRE_FALSE(forward_row(parse_policy(other), 400, shape).whole());
  }
  // A bucket of short sequences lacks nothing, whatever their policy needs of others.
  const ForwardLimits limits{.shape = shape, .max_window = 1, .digests = DigestKind::cuboid_mean};
  REQUIRE(forward_unserved(spec, {.max_tokens = 496, .top_k = false}, limits).empty());
  REQUIRE_FALSE(forward_unserved(spec, {.max_tokens = 512, .top_k = false}, limits).empty());
}

TEST_CASE("a bucket that is whole is brought in and attended, and nothing else", "[plan]") {
  const ForwardRow row = row_of("full", 100);
  WorkPlace place = place_for({.decode_rows = 1, .top_k = false, .whole = true});
  place.promotes = true;
  const auto work = forward_work(place, {&row, 1}, {}, {.near = 0.75});
  const std::uint64_t planes = kShape.layers * kShape.kv_heads;
  REQUIRE(sum_of(work, Stage::attend, Lane::device).read == planes * 75 * 2 * kRow);
  REQUIRE(sum_of(work, Stage::attend, Lane::link).read == planes * 25 * 2 * kRow);
  REQUIRE(std::ranges::all_of(
      work, [](const WorkItem& item) { return item.stage == Stage::append || item.stage == Stage::attend; }));
}

TEST_CASE("the first token of a sequence is attended near or far, and nothing else is", "[plan]") {
  const ForwardRow row = row_of("exact | int4 | top_k=10 | near=0,sinks=2,recent=6", 1);
  const Bucket bucket{.decode_rows = 1};
  const auto far = forward_work(place_for(bucket), {&row, 1}, {}, {.near = 0.0});
  const auto near = forward_work(place_for(bucket), {&row, 1}, {}, {.near = 1.0});
  const std::uint64_t planes = kShape.layers * kShape.kv_heads;
  REQUIRE(sum_of(far, Stage::append, Lane::device).read == planes * 2 * kRow);
  REQUIRE(sum_of(far, Stage::append, Lane::device).written == planes * kCopy);
  REQUIRE(sum_of(far, Stage::append, Lane::link).written == planes * 2 * kRow + kShape.layers * kQueries);
  REQUIRE(sum_of(far, Stage::score, Lane::device).items == 0);  // Its window holds all there is.
  REQUIRE(sum_of(far, Stage::attend, Lane::device).read == 0);
  REQUIRE(sum_of(far, Stage::attend_far, Lane::cpu).read == planes * 2 * kRow);
  REQUIRE(sum_of(far, Stage::split, Lane::link).written == planes * 4);
  REQUIRE(sum_of(far, Stage::merge, Lane::link).read == kShape.layers * kPartial);
  REQUIRE(sum_of(near, Stage::attend, Lane::device).read == planes * 2 * kRow);
  REQUIRE(sum_of(near, Stage::attend_far, Lane::cpu).items == 0);
  REQUIRE(sum_of(near, Stage::split, Lane::link).items == 0);
  REQUIRE(sum_of(near, Stage::merge, Lane::link).items == 0);
  REQUIRE(sum_of(near, Stage::merge, Lane::device).read == kShape.layers * kPartial);
}

TEST_CASE("tokens are scored, chosen and attended as the row says", "[plan]") {
  const ForwardRow row = row_of("exact | int4 | top_k=10 | near=0,sinks=2,recent=6", 1000);
  const std::uint64_t planes = kShape.layers * kShape.kv_heads;
  const std::uint64_t attended = 2 + 6 + 4 * 10;  // A group of four heads, whose tokens differ.
  const auto items = forward_work(place_for({.decode_rows = 1}), {&row, 1}, {}, {.near = 0.25});
  REQUIRE(sum_of(items, Stage::score, Lane::device).read == planes * 1000 * kCopy);
  REQUIRE(sum_of(items, Stage::choose, Lane::device).read == planes * 4 * 1000 * 4);
  REQUIRE(sum_of(items, Stage::attend, Lane::device).read == planes * attended / 4 * 2 * kRow);
  REQUIRE(sum_of(items, Stage::attend_far, Lane::cpu).read == planes * attended * 3 / 4 * 2 * kRow);
  // Heads that agree on half of what they may choose.
  const auto half = forward_work(place_for({.decode_rows = 1}), {&row, 1}, {}, {.near = 1.0, .chosen = 0.5});
  REQUIRE(sum_of(half, Stage::attend, Lane::device).read == planes * (8 + 20) * 2 * kRow);
}

TEST_CASE("scores of the caller are read once and written for each query head, and no copies are", "[plan]") {
  ForwardRow row = row_of("scores | top_k=10 | near=0,sinks=2,recent=6", 1000);
  row.scores = 0;
  const std::uint64_t planes = kShape.layers * kShape.kv_heads;
  WorkPlace place = place_for({.decode_rows = 1, .scores = true});
  place.code_bits = 0;
  const auto items = forward_work(place, {&row, 1}, {}, {.near = 0.25});
  REQUIRE(sum_of(items, Stage::score, Lane::device).read == planes * 1000 * 4);
  REQUIRE(sum_of(items, Stage::score, Lane::device).written == planes * 4 * 1000 * 4);
  REQUIRE(sum_of(items, Stage::choose, Lane::device).read == planes * 4 * 1000 * 4);
  REQUIRE(sum_of(items, Stage::append, Lane::device).written == 0);
}

TEST_CASE("pages are ranked by digest, and scored are the tokens of those that are chosen", "[plan]") {
  const ForwardRow row = row_of("pages:budget=64 | int4 | top_k=10 | near=0,sinks=2,recent=6", 1000);
  REQUIRE(row.page_picks == 4);
  const auto items = forward_work(place_for({.decode_rows = 1, .pages = true}), {&row, 1}, {}, {});
  const std::uint64_t planes = kShape.layers * kShape.kv_heads;
  const std::uint64_t window = row.sink_end + (1000 - row.recent_begin);
  REQUIRE(sum_of(items, Stage::rank, Lane::device).read == planes * row.pages * 2 * kRow);
  REQUIRE(sum_of(items, Stage::score, Lane::device).read == planes * (4 * 4 * kPage + window) * kCopy);
}

TEST_CASE("what is not near is the CPU's or the link's, by the placement", "[plan]") {
  const ForwardRow row = row_of("none | near=0,sinks=4,recent=60", 500);
  const std::uint64_t bytes = kShape.layers * kShape.kv_heads * 64 * 2 * kRow;
  const Bucket bucket{.decode_rows = 1, .top_k = false};
  const auto hybrid = forward_work(place_for(bucket), {&row, 1}, {}, {});
  const auto stream = forward_work(place_for(bucket, PlacementMode::stream), {&row, 1}, {}, {});
  REQUIRE(sum_of(hybrid, Stage::attend_far, Lane::cpu).read == bytes);
  REQUIRE(sum_of(hybrid, Stage::fetch, Lane::link).items == 0);
  REQUIRE(sum_of(stream, Stage::fetch, Lane::link).read == bytes);
  REQUIRE(sum_of(stream, Stage::attend_far, Lane::cpu).items == 0);
  // A policy that chooses on the CPU is asked wherever tokens are attended.
  const ForwardRow asks = row_of("topk", 500);
  for (const PlacementMode placement : {PlacementMode::hybrid, PlacementMode::stream}) {
    const auto items = forward_work(place_for(bucket, placement), {&asks, 1}, {}, {.scored = 100.0});
    REQUIRE(sum_of(items, Stage::choose_far, Lane::cpu).read == kShape.layers * kShape.kv_heads * 100 * kRow);
    REQUIRE(waits(items, find(items, Stage::merge, 0), find(items, Stage::choose_far, 0)));
  }
}

TEST_CASE("a share of each list that the device chose is the link's", "[plan]") {
  // 164 tokens that all lie far, and 47 / 256 of them: 30, of which 16 are whole units.
  const ForwardRow rows[] = {row_of("none | near=0,sinks=4,recent=160", 500),
                             row_of("none | near=0,sinks=4,recent=40", 500), row_of("topk", 300)};
  WorkPlace place = place_for({.decode_rows = 3});
  place.fetch_share = 47;
  const std::uint64_t planes = kShape.layers * kShape.kv_heads;
  const auto items = forward_work(place, rows, {}, {.scored = 100.0});
  REQUIRE(sum_of(items, Stage::fetch, Lane::link).read == planes * 16 * 2 * kRow);
  REQUIRE(sum_of(items, Stage::attend_far, Lane::cpu).read == planes * (164 - 16 + 44 + 300) * 2 * kRow);
  REQUIRE(sum_of(items, Stage::split, Lane::link).written == planes * (164 - 16 + 44 + 300) * 4);
  REQUIRE(waits(items, find(items, Stage::merge, 0), find(items, Stage::attend_far, 0)));
  REQUIRE(waits(items, find(items, Stage::merge, 0), find(items, Stage::fetch, 0)));
  REQUIRE(!waits(items, find(items, Stage::fetch, 0), find(items, Stage::attend_far, 0)));
  REQUIRE(!waits(items, find(items, Stage::fetch, 0), find(items, Stage::choose_far, 0)));
  // What is near is not cut; and nobody is asked for what is fetched whole.
  const auto half = forward_work(place, {rows, 1}, {}, {.near = 0.5});
  REQUIRE(sum_of(half, Stage::fetch, Lane::link).read == 0);
  place.fetch_share = 256;
  const auto whole = forward_work(place, {rows, 1}, {}, {});
  REQUIRE(sum_of(whole, Stage::fetch, Lane::link).read == planes * 164 * 2 * kRow);
  REQUIRE(sum_of(whole, Stage::attend_far, Lane::cpu).items == 0);
}

TEST_CASE("few far rows are read by the stage that attends near ones", "[plan]") {
  const ForwardRow rows[] = {row_of("none | near=0,sinks=4,recent=160", 500)};
  WorkPlace place = place_for({.decode_rows = 1});
  const std::uint64_t planes = kShape.layers * kShape.kv_heads;
  const EngineStats after{.near_tokens = planes * 120, .far_tokens = planes * 24, .fetched_tokens = planes * 20};
  const WorkShares shares = shares_of(place, rows, {}, after);
  REQUIRE(shares.linked == Approx(20.0 / 164.0));
  const auto items = forward_work(place, rows, {}, shares);
  const auto read = [&](Stage stage, Lane lane) { return sum_of(items, stage, lane).read; };
  REQUIRE(read(Stage::attend, Lane::device) == planes * 120 * 2 * kRow);
  REQUIRE(read(Stage::attend, Lane::link) == planes * 20 * 2 * kRow);
  REQUIRE(read(Stage::attend_far, Lane::cpu) == planes * 24 * 2 * kRow);
  // Nobody is asked where there are no others.
  const EngineStats few{.near_tokens = planes * 120, .fetched_tokens = planes * 44};
  const auto alone = forward_work(place, rows, {}, shares_of(place, rows, {}, few));
  REQUIRE(sum_of(alone, Stage::attend, Lane::link).read == planes * 44 * 2 * kRow);
  REQUIRE(sum_of(alone, Stage::attend_far, Lane::cpu).items == 0);
  REQUIRE(sum_of(alone, Stage::split, Lane::link).items == 0);
  // Where a stage fetches, what was fetched is its.
  place.fetch_share = 128;
  REQUIRE(shares_of(place, rows, {}, after).linked == 0.0);
}

TEST_CASE("rows with clusters read centroids and a few copies, and score nothing else", "[plan]") {
  ForwardRow row = row_of("tactic | int4 | near=0,sinks=2,recent=6 | dense=1", 3'000);
  scheduler::choose_clusters(parse_policy("tactic | int4"), 0, 90, 2'900, row);
  const auto items = forward_work(place_for({.decode_rows = 1, .unbounded = true}), {&row, 1}, {}, {});
  REQUIRE(sum_of(items, Stage::score, Lane::device).items == 0);
  REQUIRE(sum_of(items, Stage::choose, Lane::device).items == kShape.layers - 1);
  const std::uint64_t sampled = row.clusters.samples.size() + 2 + 100;
  REQUIRE(items[find(items, Stage::choose, 1)].read ==
          kShape.kv_heads * (90 * 4 * kShape.head_dim + kShape.group() * sampled * kCopy));
}

TEST_CASE("dense layers attend everything, and score nothing", "[plan]") {
  const ForwardRow row = row_of("exact | int4 | top_k=10 | near=0,sinks=2,recent=6 | dense=1", 300);
  const auto items = forward_work(place_for({.decode_rows = 1, .unbounded = true}), {&row, 1}, {}, {});
  REQUIRE(items[find(items, Stage::attend_far, 0)].read == kShape.kv_heads * 300 * 2 * kRow);
  REQUIRE(items[find(items, Stage::attend_far, 1)].read == kShape.kv_heads * 48 * 2 * kRow);
  REQUIRE(items[find(items, Stage::score, 1)].read == kShape.kv_heads * 300 * kCopy);
  REQUIRE(sum_of(items, Stage::score, Lane::device).items == 1);
}

TEST_CASE("a chunk of a prompt brings all keys up to its own over the link", "[plan]") {
  const ForwardChunk chunk{.list = 0, .first = 70, .count = 30};
  const auto items =
      forward_work(place_for({.decode_rows = 0, .prefill_rows = 32, .prefills = 1}), {}, {&chunk, 1}, {});
  const std::uint64_t planes = kShape.layers * kShape.kv_heads;
  REQUIRE(items.size() == kShape.layers * 4);
  REQUIRE(sum_of(items, Stage::append, Lane::link).written == planes * 30 * 2 * kRow);
  REQUIRE(sum_of(items, Stage::gather, Lane::link).read == planes * 100 * 2 * kRow);
  REQUIRE(sum_of(items, Stage::prefill, Lane::device).rows == kShape.layers * 30);
}

TEST_CASE("a layer with a window is read no further than it reaches", "[plan]") {
  constexpr std::uint32_t kWindows[] = {40, 0};
  const ForwardRow row = row_of("exact | int4 | top_k=10 | near=0,sinks=2,recent=6", 300);
  const ForwardChunk chunk{.list = 0, .first = 70, .count = 20};
  WorkPlace place = place_for({.decode_rows = 1, .prefill_rows = 32, .prefills = 1});
  place.windows = kWindows;
  const auto items = forward_work(place, {&row, 1}, {&chunk, 1}, {});
  REQUIRE(items[find(items, Stage::attend_far, 0)].read == kShape.kv_heads * 40 * 2 * kRow);
  REQUIRE(items[find(items, Stage::attend_far, 1)].read == kShape.kv_heads * 48 * 2 * kRow);
  REQUIRE(sum_of(items, Stage::score, Lane::device).items == 1);
  REQUIRE(items[find(items, Stage::gather, 0)].read == kShape.kv_heads * 59 * 2 * kRow);
  REQUIRE(items[find(items, Stage::gather, 1)].read == kShape.kv_heads * 90 * 2 * kRow);
}

TEST_CASE("items wait for earlier ones alone, and the CPU's run beside the device's", "[plan]") {
  const ForwardRow rows[] = {row_of("exact | int4 | top_k=10 | near=0,sinks=2,recent=6", 400), row_of("topk", 300)};
  const ForwardChunk chunk{.list = 1, .at = 2, .count = 20};
  const PlacementMode placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const bool audit = GENERATE(false, true);
  WorkPlace place = place_for({.decode_rows = 2, .prefill_rows = 20, .prefills = 1, .audit = audit}, placement);
  place.promotes = true;
  const auto items = forward_work(place, rows, {&chunk, 1}, {.near = 0.5, .promoted = 3.0, .scored = 40.0});
  for (std::uint32_t i = 0; i < items.size(); ++i) {
    CAPTURE(i, to_string(items[i].stage), to_string(items[i].lane));
    for (const std::uint32_t before : items[i].after) REQUIRE(before < i);
    REQUIRE((i < 2 || !items[i].after.empty()));  // The first layer's append alone waits for nothing.
    REQUIRE(items[i].layer < kShape.layers);
  }
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    const std::uint32_t merge = find(items, Stage::merge, layer);
    const std::uint32_t choose = find(items, Stage::choose_far, layer);
    REQUIRE(waits(items, choose, find(items, Stage::split, layer)));
    REQUIRE(waits(items, merge, choose));
    REQUIRE(waits(items, merge, find(items, Stage::attend, layer)));
    REQUIRE(!waits(items, find(items, Stage::attend, layer), choose));
    if (placement == PlacementMode::stream) REQUIRE(waits(items, find(items, Stage::fetch, layer), choose));
    const std::uint32_t promote = find(items, Stage::promote, layer, Lane::device);
    const std::uint32_t fill = find(items, Stage::promote, layer, Lane::link);
    for (const WorkItem& item : items) REQUIRE(std::ranges::count(item.after, fill) == 0);
    REQUIRE(waits(items, promote, find(items, Stage::attend, layer)));
    // In the launch of `merge`, unless what lies near is written down before, or the link is the device's alone, which
    // then knows what the CPU has chosen.
    const bool apart = placement == PlacementMode::stream && !audit;
    REQUIRE(waits(items, merge, promote) == apart);
    if (apart) REQUIRE(waits(items, promote, find(items, Stage::fetch, layer)));
    REQUIRE(waits(items, promote, merge) == audit);
    if (layer + 1 < kShape.layers) REQUIRE(waits(items, find(items, Stage::append, layer + 1), promote));
  }
  REQUIRE(waits(items, find(items, Stage::append, 1), find(items, Stage::merge, 0)));
}

TEST_CASE("shares are what the engine counted meanwhile", "[plan]") {
  const ForwardRow rows[] = {row_of("exact | int4 | top_k=10 | near=0,sinks=2,recent=6", 1000), row_of("topk", 200)};
  const WorkPlace place = place_for({.decode_rows = 2});
  // Windows: 8 and what top-k says; at most 48, and everything.
  const std::uint64_t planes = kShape.layers * kShape.kv_heads;
  const std::uint64_t window = 8 + rows[1].sink_end + (200 - rows[1].recent_begin);
  const std::uint64_t most = 48 + 200;
  EngineStats before{.near_tokens = 1000, .far_tokens = 70, .fetched_tokens = 5, .promoted = 40, .scored = 90};
  EngineStats after = before;
  after.near_tokens += planes * (window + 10);
  after.far_tokens += planes * (most - window) / 2 - planes * 10;
  after.promoted += 3 * planes;
  after.scored += 150 * planes;
  const WorkShares shares = shares_of(place, rows, before, after);
  REQUIRE(shares.chosen == Approx(0.5));
  REQUIRE(shares.near == Approx(static_cast<double>(window + 10) / static_cast<double>(window + (most - window) / 2)));
  REQUIRE(shares.promoted == Approx(3.0));
  REQUIRE(shares.scored == Approx(150.0));
  const auto items = forward_work(place, rows, {}, shares);
  REQUIRE(sum_of(items, Stage::attend, Lane::device).read ==
          Approx(static_cast<double>((after.near_tokens - before.near_tokens) * 2 * kRow)).margin(2 * 2 * kRow));
  REQUIRE(shares.linked == 0.0);
  const WorkShares nothing = shares_of(place, {}, before, before);
  REQUIRE(nothing.near == 0.0);
  REQUIRE(nothing.chosen == 1.0);
}
