// Options by C: how much memory an engine takes, asked before there is one.
#include "tests/capi/small_engine.hpp"

using namespace sluice::test::capi;

TEST_CASE("what an engine would take is what it takes", "[capi][options]") {
  auto options = small_options();
  constexpr const char* const kRanked[] = {"quest"};
  constexpr const char* const kFew[] = {"exact | int4 | top_k=64 | near=0,sinks=0,recent=64"};
  options.near_bytes = 1u << 18;
  options.policies = kRanked;
  auto needed = sized<sluice_memory>(), made = sized<sluice_memory>();
  const auto compare = [&] {
    require_ok(sluice_engine_options_memory_needed(&options, &needed));
    const EnginePointer engine = create(options);
    require_ok(sluice_engine_memory(engine.get(), &made));
    CHECK(needed.near_pages != 0);
    CHECK((needed.digests != 0) == (options.policies == kRanked));
    for (const auto field : {&sluice_memory::far_pages, &sluice_memory::pinned, &sluice_memory::near_pages,
                             &sluice_memory::codes, &sluice_memory::digests, &sluice_memory::buffers})
      CHECK(needed.*field == made.*field);
    CHECK(needed.partials == 0);
  };
  compare();
  // Lists have room for what the engine finds best to attend densely, where that is more than rows choose.
  options.largest_features = SLUICE_BUCKET_TOP_K;
  options.policies = kFew;
  compare();
  const std::uint64_t few = made.buffers;
  options.dense_tokens = SLUICE_DENSE_AUTO;
  compare();
  CHECK(made.buffers > few);

  const auto ask = [&] { return sluice_engine_options_memory_needed(&options, &needed); };
  options.host_bytes = 0;
  check_fails(ask, SLUICE_INVALID_ARGUMENT, {"host_bytes is 0"});
  options = small_options();
  options.device_id = 1;
  check_fails(ask, SLUICE_INVALID_ARGUMENT, {"device_id is 1"});
  options = small_options();
  needed.struct_size = 3;
  check_fails(ask, SLUICE_INVALID_ARGUMENT, {"sluice_memory"});
  check_fails([&] { return sluice_engine_options_memory_needed(nullptr, &needed); }, SLUICE_INVALID_ARGUMENT,
              {"options"});
}

TEST_CASE("near rows get what everything else leaves of a budget of device memory", "[capi][options]") {
  auto options = small_options();
  constexpr const char* const kEither[] = {"sluice", "quest"};
  options.policies = kEither + GENERATE(0, 1);
  const auto takes = [&](std::uint64_t near) {
    options.near_bytes = near;
    auto needed = sized<sluice_memory>();
    require_ok(sluice_engine_options_memory_needed(&options, &needed));
    return needed.near_pages + needed.codes + needed.digests + needed.buffers;
  };
  const std::uint64_t least = takes(0);
  const std::uint64_t page = 2ull * options.page_tokens * options.head_dim * 2 * options.layers * options.kv_heads;
  std::uint64_t near = 1;
  const auto within = [&](std::uint64_t bytes) {
    options.near_bytes = 12345;  // Does not count.
    return sluice_engine_options_near_within(&options, bytes, &near);
  };
  check_fails([&] { return within(least - 1); }, SLUICE_OUT_OF_CAPACITY, {"device_bytes is", "takes"});
  require_ok(within(least));
  CHECK(near == 0);
  for (const std::uint64_t more : {page, 3 * page, 10 * page}) {
    const std::uint64_t bytes = takes(page) + more;
    require_ok(within(bytes));
    CHECK(near >= more);
    CHECK(takes(near) <= bytes);
    CHECK(takes(near + page) > bytes);
  }
  require_ok(within(std::uint64_t{1} << 40));
  CHECK(near == options.host_bytes / page * page);  // No more than there is to be near.
}
