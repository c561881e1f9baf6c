// Callers that know more or fewer fields than the library, and what it says of itself.
#include <algorithm>
#include <cstring>

#include "tests/capi/small_engine.hpp"

using namespace sluice::test::capi;

namespace {

/// A struct of a caller that knows eight bytes more.
template <class T>
struct Newer {
  T known{};
  std::uint32_t extra[2] = {};
  Newer() { known.struct_size = sizeof(Newer); }
};

/// No one has such a size.
const std::vector<std::uint32_t> kNoSizes = {0, 2, 3, 6, 4100, 0xcdcd'cdcc};

}  // namespace

TEST_CASE("a size that nobody has set is refused", "[capi][versions]") {
  const SmallEngine small;
  std::uint64_t forward = 0;
  sluice_engine* engine = nullptr;
  for (const std::uint32_t size : kNoSizes) {
    const std::string said = ".struct_size is " + std::to_string(size);
    const auto refused = [&](const std::string& name, const auto& call) {
      check_fails(call, SLUICE_INVALID_ARGUMENT, {name + said, "sizeof(" + name + ")"});
    };
    auto options = small_options();
    options.struct_size = size;
    refused("sluice_engine_options", [&] { return sluice_engine_create(&options, &engine); });
    refused("sluice_engine_options", [&] { return sluice_engine_options_resolve(&options); });
    refused("sluice_engine_options", [&] { return sluice_engine_get_options(small.engine, &options); });
    check_fails([&] { return sluice_engine_options_init(&options, size); }, SLUICE_INVALID_ARGUMENT,
                {"struct_size is"});
    auto bucket = small.bucket;
    bucket.struct_size = size;
    auto item = small.item();
    refused("sluice_bucket", [&] { return sluice_engine_plan(small.engine, &item, 1, &bucket, nullptr, &forward); });
    item.struct_size = size;
    refused("sluice_plan_item",
            [&] { return sluice_engine_plan(small.engine, &item, 1, &small.bucket, nullptr, &forward); });
    auto args = sized<sluice_attend_args>();
    args.struct_size = size;
    refused("sluice_attend_args", [&] { return sluice_engine_attend_layer(small.engine, &small.bucket, &args); });
    auto stats = sized<sluice_stats>();
    stats.struct_size = size;
    refused("sluice_stats", [&] { return sluice_engine_stats(small.engine, &stats); });
    auto sizes = sized<sluice_engine_sizes>();
    sizes.struct_size = size;
    refused("sluice_engine_sizes", [&] { return sluice_engine_get_sizes(small.engine, &sizes); });
    auto memory = sized<sluice_memory>();
    memory.struct_size = size;
    refused("sluice_memory", [&] { return sluice_engine_memory(small.engine, &memory); });
    auto of_sequence = sized<sluice_sequence_memory>();
    of_sequence.struct_size = size;
    refused("sluice_sequence_memory",
            [&] { return sluice_engine_sequence_memory(small.engine, small.sequence, &of_sequence); });
    auto audit = sized<sluice_audit>();
    audit.struct_size = size;
    refused("sluice_audit", [&] { return sluice_engine_audit(small.engine, small.sequence, &audit); });
    std::vector<sluice_head_audit> heads(kLayers * kQHeads, sized<sluice_head_audit>());
    heads[0].struct_size = size;
    refused("sluice_head_audit",
            [&] { return sluice_engine_audit_heads(small.engine, small.sequence, heads.data(), heads.size()); });
  }
  check_fails(
      [&] {
        auto options = small_options();
        return sluice_engine_options_init(&options, (std::size_t{1} << 32) + sizeof options);
      },
      SLUICE_INVALID_ARGUMENT, {"struct_size is 4294967"});
}

TEST_CASE("fields that the library does not know are taken if they are 0", "[capi][versions]") {
  const SmallEngine small;
  Newer<sluice_engine_options> options;
  require_ok(sluice_engine_options_init(&options.known, sizeof options));
  CHECK(options.known.struct_size == sizeof options);
  options.extra[0] = 0;
  const sluice_engine_options chosen = small_options();
  std::memcpy(&options.known.struct_size + 1, &chosen.struct_size + 1, sizeof chosen - sizeof chosen.struct_size);
  EnginePointer made = create(options.known);
  Newer<sluice_bucket> bucket;
  bucket.known.decode_rows = 1;
  bucket.known.features = SLUICE_BUCKET_UNBOUNDED;
  Newer<sluice_plan_item> items[2];
  sluice_sequence sequences[2];
  for (int i = 0; i < 2; ++i) {
    require_ok(sluice_engine_begin(made.get(), kPolicy, &sequences[i]));
    items[i].known.tokens = 1;
    items[i].known.sequence = sequences[i];
  }
  bucket.known.decode_rows = 2;
  std::uint64_t forward = 0;
  require_ok(sluice_engine_plan(made.get(), &items[0].known, 2, &bucket.known, nullptr, &forward));
  require_ok(sluice_engine_cancel(made.get(), forward));

  const std::vector<std::string> words = {"does not know", "newer"};
  bucket.extra[1] = 1;
  check_fails([&] { return sluice_engine_plan(made.get(), &items[0].known, 2, &bucket.known, nullptr, &forward); },
              SLUICE_UNSUPPORTED, words);
  bucket.extra[1] = 0;
  items[1].extra[0] = 1;
  check_fails([&] { return sluice_engine_plan(made.get(), &items[0].known, 2, &bucket.known, nullptr, &forward); },
              SLUICE_UNSUPPORTED, words);
  Newer<sluice_attend_args> args;
  args.extra[1] = 1;
  check_fails([&] { return sluice_engine_attend_layer(made.get(), &bucket.known, &args.known); }, SLUICE_UNSUPPORTED,
              words);
  options.extra[1] = 1u << 31;
  sluice_engine* none = nullptr;
  check_fails([&] { return sluice_engine_create(&options.known, &none); }, SLUICE_UNSUPPORTED, words);
  check_fails([&] { return sluice_engine_options_resolve(&options.known); }, SLUICE_UNSUPPORTED, words);
}

TEST_CASE("results that the library does not know are 0", "[capi][versions]") {
  const SmallEngine small;
  small.forward();
  Newer<sluice_stats> stats;
  Newer<sluice_memory> memory;
  stats.extra[0] = stats.extra[1] = memory.extra[0] = memory.extra[1] = 0xffff'ffff;
  require_ok(sluice_engine_stats(small.engine, &stats.known));
  require_ok(sluice_engine_memory(small.engine, &memory.known));
  CHECK(stats.known.struct_size == sizeof stats);
  CHECK(stats.known.asked == kLayers);
  CHECK((stats.extra[0] | stats.extra[1]) == 0);
  CHECK(memory.known.far_pages > 0);
  CHECK((memory.extra[0] | memory.extra[1]) == 0);
  std::vector<Newer<sluice_head_audit>> heads(kLayers * kQHeads);
  for (auto& head : heads) head.extra[0] = 7, head.known.steps = 7;
  require_ok(sluice_engine_audit_heads(small.engine, small.sequence, &heads[0].known, heads.size()));
  for (const auto& head : heads) CHECK((head.extra[0] == 0 && head.known.steps == 0));
  check_fails(
      [&] { return sluice_engine_audit_heads(small.engine, small.sequence, &heads[0].known, heads.size() - 1); },
      SLUICE_INVALID_ARGUMENT, {"head_count is 7", "8"});
}

TEST_CASE("an older caller gets what it knows, and no byte more", "[capi][versions]") {
  const SmallEngine small;
  sluice_stats stats;
  std::memset(&stats, 0x5a, sizeof stats);
  stats.struct_size = offsetof(sluice_stats, near_tokens);
  require_ok(sluice_engine_stats(small.engine, &stats));
  CHECK(stats.asked == 0);
  CHECK(stats.unplanned == 0);
  CHECK(stats.near_tokens == 0x5a5a'5a5a'5a5a'5a5au);
  CHECK(stats.struct_size == offsetof(sluice_stats, near_tokens));

  sluice_engine_options options;
  std::memset(&options, 0x5a, sizeof options);
  require_ok(sluice_engine_options_init(&options, offsetof(sluice_engine_options, promotions)));
  CHECK(options.page_tokens == 16);
  CHECK(options.promotions == 0x5a5a'5a5au);
  options.layers = kLayers, options.q_heads = kQHeads, options.kv_heads = kKvHeads, options.head_dim = kHeadDim;
  options.host_bytes = 1u << 20;
  EnginePointer made = create(options);  // What it does not know has its defaults.
  auto got = sized<sluice_engine_options>();
  require_ok(sluice_engine_get_options(made.get(), &got));
  CHECK(got.promotions == 1024);
  CHECK(got.timeout_ms == 30'000);

  auto bucket = small.bucket;  // No features then, and none are needed for a policy of neither.
  bucket.struct_size = offsetof(sluice_bucket, features);
  const sluice_plan_item item = small.item();
  std::uint64_t forward = 0;
  check_fails([&] { return sluice_engine_plan(small.engine, &item, 1, &bucket, nullptr, &forward); },
              SLUICE_INVALID_ARGUMENT, {"does not go with the bucket"});
}

TEST_CASE("a count without its array, where a caller's struct ends, says nothing", "[capi][versions]") {
  sluice_engine* engine = nullptr;
  auto options = small_options();
  options.struct_size = offsetof(sluice_engine_options, policies);
  options.policy_count = 3;
  REQUIRE(sluice_engine_create(&options, &engine) == SLUICE_OK);
  sluice_engine_destroy(engine);
}

TEST_CASE("elements of an array have one size", "[capi][versions]") {
  const SmallEngine small;
  sluice_plan_item items[2] = {small.item(), small.item()};
  items[1].struct_size = sizeof(sluice_plan_item) - 4;
  std::uint64_t forward = 0;
  check_fails([&] { return sluice_engine_plan(small.engine, items, 2, &small.bucket, nullptr, &forward); },
              SLUICE_INVALID_ARGUMENT, {"sluice_plan_item 1", "20", "24"});
}

TEST_CASE("every status has a name, and the library its version", "[capi][versions]") {
  std::vector<std::string> names;
  for (sluice_status status = SLUICE_OK; status <= SLUICE_INTERNAL; ++status) {
    const std::string name = sluice_status_name(status);
    CHECK(name != "unknown");
    CHECK(std::ranges::find(names, name) == names.end());
    names.push_back(name);
  }
  CHECK(names[SLUICE_OUT_OF_CAPACITY] == "out_of_capacity");
  CHECK(sluice_status_name(-1) == std::string("unknown"));
  CHECK(sluice_status_name(99) == std::string("unknown"));
  CHECK(sluice_abi_version() == SLUICE_ABI_VERSION);
  CHECK(sluice_version() == std::string(SLUICE_TEST_VERSION));
}
