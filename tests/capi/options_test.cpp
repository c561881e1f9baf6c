// Options by C: every field arrives, and what is no value is refused.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <vector>

#include "sluice/engine.hpp"
#include "tests/capi/small_engine.hpp"

using namespace sluice::test::capi;

namespace {

constexpr std::uint32_t kCores[] = {0};
constexpr std::uint32_t kWindows[kLayers] = {24, 24};
constexpr const char* kThreeBits[] = {"exact | int3 | sample=9 | near=0,sinks=4,recent=20", "full", "quest"};

/// Each differs from its default, and from its neighbours.
sluice_engine_options unlike_the_defaults() {
  auto options = small_options();
  options.kv_dtype = SLUICE_F32;
  options.host_bytes = 4u << 20;
  options.near_bytes = 128u << 10;
  options.page_tokens = 32;
  options.promotions = 17;
  options.placement = SLUICE_PLACE_STREAM;
  options.prefix_decoded = 1;
  options.prefix_bytes = 12345;
  options.largest_decode_rows = 6;
  options.largest_drafts = 2;
  options.largest_prefill_rows = 40;
  options.largest_prefills = 2;
  options.largest_max_tokens = 96;
  options.largest_features =
      SLUICE_BUCKET_TOP_K | SLUICE_BUCKET_UNBOUNDED | SLUICE_BUCKET_PAGES | SLUICE_BUCKET_AUDIT | SLUICE_BUCKET_REHEARSED;
  options.in_flight = 4;
  options.sequences = 9;
  options.cpu_sequences = 5;
  options.policy_bytes = 3u << 20;
  options.fetch_share = 0.f;
  options.fetch_lists = 7;
  options.cluster_sequences = 3;
  options.import_rows = 22;
  options.prefill_window = 64;
  options.prefill_mode = SLUICE_PREFILL_AUTOMATIC;
  options.prefill_min_budget = 256;
  options.prefill_max_budget = 512;
  options.prefill_lines = 1;
  options.prefill_gamma = 0.5f;
  options.prefill_tau = 0.25f;
  options.threads = 2;
  options.pin_threads = 0;
  options.answer_timeout_ms = 1234;
  options.timeout_ms = 4321;
  options.core_count = 1;
  options.cores = kCores;
  options.handover = SLUICE_HANDOVER_STREAM;
  options.scale = 0.375f;
  options.window_count = kLayers;
  options.windows = kWindows;
  options.policy_count = std::size(kThreeBits);
  options.policies = kThreeBits;
  return options;
}

}  // namespace

TEST_CASE("the defaults of C are those of C++", "[capi][options]") {
  const sluice::EngineOptions want;
  sluice_engine_options got;
  require_ok(sluice_engine_options_init(&got, sizeof got));
  CHECK(got.struct_size == sizeof got);
  CHECK(got.device_type == SLUICE_DEVICE_CPU);
  CHECK(got.device_id == 0);
  CHECK(got.device_bytes == 0);
  CHECK(got.kv_dtype == SLUICE_BF16);
  CHECK(got.layers == 0);
  CHECK(got.host_bytes == want.host_bytes);
  CHECK(got.page_tokens == want.page_tokens);
  CHECK(got.largest_decode_rows == want.largest.decode_rows);
  CHECK(got.largest_features == SLUICE_BUCKET_TOP_K);
  CHECK(got.largest_drafts == 1);
  CHECK(got.prefill_mode == SLUICE_PREFILL_FULL);
  CHECK(got.prefill_gamma == want.prefill.flex.gamma);
  CHECK(got.placement == SLUICE_PLACE_HYBRID);
  CHECK(got.fetch_share == SLUICE_FETCH_AUTO);
  CHECK(got.fetch_lists == 0);
  CHECK(got.cpu_sequences == SLUICE_ALL_SEQUENCES);
  CHECK(got.cluster_sequences == SLUICE_ALL_SEQUENCES);
  CHECK(got.dense_tokens == 0);
  CHECK(got.prefix_bytes == want.prefix_bytes);
  CHECK(got.prefix_decoded == 0);
  CHECK(got.pin_threads == 1);
  CHECK(got.timeout_ms == want.timeout.count());
  CHECK(got.answer_timeout_ms == want.answer_timeout.count());
  CHECK(got.core_count == 0);
  CHECK(got.cores == nullptr);
  CHECK(got.scale == 0.f);
  CHECK(got.softcap == 0.f);
  CHECK(got.window_count == 0);
  CHECK(got.windows == nullptr);
  REQUIRE(got.policy_count == want.policies.size());
  for (std::size_t i = 0; i < want.policies.size(); ++i) CHECK(got.policies[i] == want.policies[i].name);
}

TEST_CASE("every option arrives at the engine", "[capi][options]") {
  const auto options = unlike_the_defaults();
  EnginePointer engine = create(options);
  auto got = sized<sluice_engine_options>();
  require_ok(sluice_engine_get_options(engine.get(), &got));
  REQUIRE(got.cores != nullptr);
  CHECK(got.cores != kCores);
  CHECK(got.cores[0] == 0);
  got.cores = options.cores;
  REQUIRE(got.windows != nullptr);
  CHECK(got.windows != kWindows);
  CHECK(got.windows[kLayers - 1] == 24);
  got.windows = options.windows;
  REQUIRE(got.policy_count == options.policy_count);
  CHECK(got.policies != kThreeBits);
  for (std::size_t i = 0; i < std::size(kThreeBits); ++i) CHECK(got.policies[i] == std::string(kThreeBits[i]));
  got.policies = options.policies;
  CHECK(std::memcmp(&got, &options, sizeof got) == 0);
  auto memory = sized<sluice_memory>();  // And not only back from it.
  require_ok(sluice_engine_memory(engine.get(), &memory));
  CHECK(memory.far_pages == 4u << 20);
  CHECK(memory.near_pages == 128u << 10);
  CHECK(memory.digests > 0);
  CHECK(memory.codes > 0);
}

TEST_CASE("a share of what is far arrives at an engine that places hybrid", "[capi][options]") {
  auto options = small_options();
  options.fetch_share = 0.375f;
  options.fetch_lists = 5;
  options.dense_tokens = 48;
  auto whole = options;
  whole.fetch_share = 0.f;
  EnginePointer engine = create(options);
  EnginePointer other = create(whole);
  auto got = sized<sluice_engine_options>();
  require_ok(sluice_engine_get_options(engine.get(), &got));
  CHECK(got.fetch_share == 0.375f);
  CHECK(got.fetch_lists == 5);
  CHECK(got.dense_tokens == 48);
  CHECK(got.handover == SLUICE_HANDOVER_DEVICE);
  auto memory = sized<sluice_memory>();  // And not only back from it.
  auto less = sized<sluice_memory>();
  require_ok(sluice_engine_memory(engine.get(), &memory));
  require_ok(sluice_engine_memory(other.get(), &less));
  CHECK(memory.buffers > less.buffers);
}

TEST_CASE("resolve fills in what policies want, and nothing else", "[capi][options]") {
  constexpr const char* const kNamed[] = {kPolicy};
  auto options = small_options();
  options.largest_features = 0;
  options.policies = kNamed, options.policy_count = 1;
  options.cores = kCores, options.core_count = 1;
  options.windows = kWindows, options.window_count = kLayers;
  options.softcap = 30.f;
  options.device_type = SLUICE_DEVICE_CUDA, options.device_id = 3, options.device_bytes = 5;
  auto want = options;
  want.largest_features = SLUICE_BUCKET_UNBOUNDED;
  want.largest_max_tokens = 1024;  // As many as host_bytes hold.
  want.cpu_sequences = want.cluster_sequences = 0;
  require_ok(sluice_engine_options_resolve(&options));
  CHECK(std::memcmp(&options, &want, sizeof want) == 0);
  constexpr const char* const kWrong[] = {"quest | near=0", "arkvale | near=0"};
  options.policies = kWrong, options.policy_count = 2;
  check_fails([&] { return sluice_engine_options_resolve(&options); }, SLUICE_UNSUPPORTED,
              {"EngineOptions::policies", "digest"});
}

TEST_CASE("copies of keys have the bits that policies want", "[capi][options]") {
  constexpr const char* const kFew[] = {"exact | int3 | sample=9 | near=0"};
  auto options = small_options();
  EnginePointer many = create(options);
  options.policies = kFew;
  EnginePointer few = create(options);
  auto sizes = sized<sluice_engine_sizes>();
  require_ok(sluice_engine_get_sizes(few.get(), &sizes));
  CHECK(sizes.code_bits == 3);
  require_ok(sluice_engine_get_sizes(many.get(), &sizes));
  CHECK(sizes.code_bits == 4);
  auto less = sized<sluice_memory>();
  auto more = sized<sluice_memory>();
  require_ok(sluice_engine_memory(few.get(), &less));
  require_ok(sluice_engine_memory(many.get(), &more));
  CHECK(less.codes < more.codes);
  sluice_sequence sequence = 0;
  check_fails([&] { return sluice_engine_begin(few.get(), kPolicy, &sequence); }, SLUICE_UNSUPPORTED,
              {"4 bits", "an engine of its own"});
}

TEST_CASE("policies that are named have room in the engine", "[capi][options]") {
  const char* const policies[] = {"exact | int3 | sample=9 | near=0", "quest | near=0", "lfps"};
  auto options = small_options();
  options.largest_features = SLUICE_BUCKET_AUDIT;
  options.policies = policies;
  options.policy_count = std::size(policies);
  auto resolved = options;
  require_ok(sluice_engine_options_resolve(&resolved));
  CHECK(resolved.largest_features == (SLUICE_BUCKET_TOP_K | SLUICE_BUCKET_UNBOUNDED | SLUICE_BUCKET_PAGES |
                                      SLUICE_BUCKET_AUDIT));  // lfps has a dense layer.
  CHECK(resolved.cpu_sequences == 2);
  CHECK(resolved.cluster_sequences == 0);
  CHECK(resolved.policies == policies);
  EnginePointer engine = create(options);
  auto got = sized<sluice_engine_options>();
  require_ok(sluice_engine_get_options(engine.get(), &got));
  CHECK(got.largest_features == resolved.largest_features);
  CHECK(got.cpu_sequences == SLUICE_ALL_SEQUENCES);  // As it was given.
  auto sizes = sized<sluice_engine_sizes>();
  require_ok(sluice_engine_get_sizes(engine.get(), &sizes));
  CHECK(sizes.code_bits == 3);
  CHECK(sizes.digests == SLUICE_DIGESTS_BOX);
  CHECK(sizes.prompt_queries == 32);
  CHECK(sizes.forecasts == 0);
  CHECK(sizes.cpu_sequences == 2);
  CHECK(sizes.cluster_sequences == 0);
  CHECK((sizes.max_picks > 0 && sizes.max_ranked > 0 && sizes.max_window > 0 && sizes.max_clusters > 0));
  for (const char* const policy : policies) {
    CAPTURE(policy);
    sluice_sequence sequence = 0;
    require_ok(sluice_engine_begin(engine.get(), policy, &sequence));
    require_ok(sluice_engine_end(engine.get(), sequence));
  }
  sluice_sequence sequence = 0;
  check_fails([&] { return sluice_engine_begin(engine.get(), "sluice", &sequence); }, SLUICE_UNSUPPORTED,
              {"an engine of its own"});
}

TEST_CASE("an engine of a caller that knows no policies is for the default one", "[capi][options]") {
  sluice_engine_options options{};
  constexpr std::size_t kBytes = offsetof(sluice_engine_options, policy_count);
  options.policy_count = 77;
  require_ok(sluice_engine_options_init(&options, kBytes));
  CHECK(options.struct_size == kBytes);
  CHECK(options.policy_count == 77);
  options = small_options();
  options.struct_size = kBytes;
  options.policy_count = 0;
  EnginePointer engine = create(options);
  auto got = sized<sluice_engine_options>();
  require_ok(sluice_engine_get_options(engine.get(), &got));
  REQUIRE(got.policy_count == 1);
  CHECK(got.policies[0] == std::string("sluice"));
  sluice_sequence sequence = 0;
  require_ok(sluice_engine_begin(engine.get(), "sluice", &sequence));
}

TEST_CASE("sizes that callers said themselves before version 9 are refused by their names", "[capi][options]") {
  const auto refused = [](const char* name, const auto& set) {
    auto options = small_options();
    set(options);
    sluice_engine* engine = nullptr;
    const std::vector<std::string> words = {std::string("sluice_engine_options.") + name + " is 3", "policies"};
    check_fails([&] { return sluice_engine_create(&options, &engine); }, SLUICE_INVALID_ARGUMENT, words);
    options.struct_size = offsetof(sluice_engine_options, policy_count);
    check_fails([&] { return sluice_engine_create(&options, &engine); }, SLUICE_INVALID_ARGUMENT, words);
    CHECK(engine == nullptr);
  };
  refused("prompt_queries", [](auto& o) { o.unused_sizes[0] = 3; });
  refused("max_picks", [](auto& o) { o.unused_sizes[1] = 3; });
  refused("digests", [](auto& o) { o.unused_sizes[2] = 3; });
  refused("max_ranked", [](auto& o) { o.unused_sizes[3] = 3; });
  refused("max_window", [](auto& o) { o.unused_sizes[4] = 3; });
  refused("max_clusters", [](auto& o) { o.unused_clusters = 3; });
  refused("forecasts", [](auto& o) { o.unused_forecasts = 3; });
  refused("code_bits", [](auto& o) { o.unused_code_bits = 3; });
}

TEST_CASE("options that have no such value are refused by name", "[capi][options]") {
  const auto refused = [](const std::vector<std::string>& words, const auto& spoil) {
    auto options = small_options();
    spoil(options);
    sluice_engine* engine = nullptr;
    CAPTURE(words[0]);
    check_fails([&] { return sluice_engine_create(&options, &engine); }, SLUICE_INVALID_ARGUMENT, words);
    CHECK(engine == nullptr);
  };
  refused({"kv_dtype is 4", "SLUICE_FP8_E4M3"}, [](auto& o) { o.kv_dtype = 4; });
  refused({"kv_dtype is -1"}, [](auto& o) { o.kv_dtype = -1; });
  refused({"prefill_mode is 3"}, [](auto& o) { o.prefill_mode = 3; });
  refused({"placement is 2", "SLUICE_PLACE_STREAM"}, [](auto& o) { o.placement = 2; });
  refused({"fetch_share is -0.5", "[0, 1]"}, [](auto& o) { o.fetch_share = -0.5f; });
  refused({"fetch_share is 1.5", "[0, 1]"}, [](auto& o) { o.fetch_share = 1.5f; });
  refused({"fetch_share is nan", "[0, 1]"}, [](auto& o) { o.fetch_share = NAN; });
  refused({"fetch_share is 0.5", "stream", "hybrid"},
          [](auto& o) { o.fetch_share = 0.5f, o.placement = SLUICE_PLACE_STREAM; });
  refused({"dense_tokens is 2147483648", "[0, 2147483647]"}, [](auto& o) { o.dense_tokens = 1u << 31; });
  refused({"handover is 4", "SLUICE_HANDOVER_HOST", "sluice_engine_options_init"}, [](auto& o) { o.handover = 4; });
  refused({"prefix_decoded is 2"}, [](auto& o) { o.prefix_decoded = 2; });
  refused({"prefill_lines is 2", "0 or 1"}, [](auto& o) { o.prefill_lines = 2; });
  refused({"pin_threads is 7"}, [](auto& o) { o.pin_threads = 7; });
  refused({"largest_features is 64"}, [](auto& o) { o.largest_features = 64; });
  refused({"page_tokens is 0", "[8, 256]"}, [](auto& o) { o.page_tokens = 0; });
  refused({"page_tokens is 24"}, [](auto& o) { o.page_tokens = 24; });
  refused({"device_type is 3"}, [](auto& o) { o.device_type = SLUICE_DEVICE_CUDA_HOST; });
  refused({"device_id is 1"}, [](auto& o) { o.device_id = 1; });
  refused({"device_bytes 1"}, [](auto& o) { o.device_bytes = 1; });
  refused({"policy_count is 1025", "1024"}, [](auto& o) { o.policy_count = 1025; });
  refused({"policies", "policy_count"}, [](auto& o) { o.policies = nullptr; });
  static constexpr const char* kGap[] = {"full", nullptr};
  refused({"policies[1]", "null"}, [](auto& o) { o.policies = kGap, o.policy_count = 2; });
  static constexpr const char* kWrong[] = {"full", "fulll"};
  refused({"fulll"}, [](auto& o) { o.policies = kWrong, o.policy_count = 2; });
  refused({"cores", "core_count"}, [](auto& o) { o.core_count = 1; });
  refused({"scale is -1"}, [](auto& o) { o.scale = -1.f; });
  refused({"softcap is nan"}, [](auto& o) { o.softcap = NAN; });
  refused({"softcap is inf"}, [](auto& o) { o.softcap = INFINITY; });
  refused({"windows", "window_count"}, [](auto& o) { o.window_count = kLayers; });
  static constexpr std::uint32_t kMany[64] = {};
  refused({"window_count is 64", "layers"}, [](auto& o) { o.window_count = 64, o.windows = kMany; });
  refused({"largest.drafts is 33"}, [](auto& o) { o.largest_drafts = 33; });
  refused({"layers"}, [](auto& o) { o.layers = 0; });
  refused({"q_heads"}, [](auto& o) { o.q_heads = 3; });
  refused({"sequences is 0"}, [](auto& o) { o.sequences = 0; });
  refused({"host_bytes is 0"}, [](auto& o) { o.host_bytes = 0; });
  refused({"timeout (ms) is 0"}, [](auto& o) { o.timeout_ms = 0; });
  refused({"gamma"}, [](auto& o) { o.prefill_gamma = 2.f; });

  auto options = small_options();
  options.page_tokens = 0;  // What is computed with it would not go well.
  check_fails([&] { return sluice_engine_options_resolve(&options); }, SLUICE_INVALID_ARGUMENT, {"page_tokens is 0"});
}

TEST_CASE("buckets and items that have no such value are refused by name", "[capi][options]") {
  const SmallEngine small;
  std::uint64_t forward = 0;
  auto bucket = small.bucket;
  bucket.features = 64;
  auto item = small.item();
  const auto plan = [&] { return sluice_engine_plan(small.engine, &item, 1, &bucket, nullptr, &forward); };
  check_fails(plan, SLUICE_INVALID_ARGUMENT, {"sluice_bucket.features is 64"});
  bucket = small.bucket;
  bucket.drafts = 2;
  check_fails(plan, SLUICE_INVALID_ARGUMENT, {"drafts is 2", "EngineOptions::largest has 1"});
  bucket = small.bucket;
  item.prefill = 2;
  check_fails(plan, SLUICE_INVALID_ARGUMENT, {"sluice_plan_item.prefill is 2"});
  item = small.item();
  item.reserved = 1;
  check_fails(plan, SLUICE_INVALID_ARGUMENT, {"sluice_plan_item.reserved is 1"});
}

TEST_CASE("an array of options is not read before its count can be one", "[capi][options][errors]") {
  const std::uint32_t one[] = {0};  // Behind it lies what is not ours.
  sluice_engine* engine = nullptr;
  auto memory = sized<sluice_memory>();
  std::uint64_t near = 0;
  const auto refused = [&](const sluice_engine_options& options, const std::vector<std::string>& words) {
    auto room = options;
    check_fails([&] { return sluice_engine_create(&options, &engine); }, SLUICE_INVALID_ARGUMENT, words);
    check_fails([&] { return sluice_engine_options_memory_needed(&options, &memory); }, SLUICE_INVALID_ARGUMENT, words);
    check_fails([&] { return sluice_engine_options_near_within(&options, 1, &near); }, SLUICE_INVALID_ARGUMENT, words);
    check_fails([&] { return sluice_engine_options_resolve(&room); }, SLUICE_INVALID_ARGUMENT, words);
  };
  for (const std::uint32_t count : {1u, kLayers + 1, 100'000u, 0xffff'ffffu}) {
    CAPTURE(count);
    auto options = small_options();
    options.windows = one;
    options.window_count = count;
    refused(options, {"window_count is " + std::to_string(count), "layers, 2"});
    if (count < 100'000) continue;  // As many processors as this machine may have.
    options = small_options();
    options.cores = one;
    options.core_count = count;
    refused(options, {"core_count is " + std::to_string(count), "processors"});
  }
  auto options = small_options();
  options.windows = one;
  options.window_count = options.layers = 0xffff'ffff;
  refused(options, {"layers is 4294967295"});
}
