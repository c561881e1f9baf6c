// What the C interface refuses, and what it says.
#include <sched.h>

#include <thread>

#include "tests/capi/small_engine.hpp"

using namespace sluice::test::capi;

TEST_CASE("no call needs an engine to refuse", "[capi][errors]") {
  const std::vector<std::string> words = {"engine is null"};
  sluice_engine* const none = nullptr;
  std::uint64_t number = 7;
  std::uint32_t tokens = 7;
  int admitted = 7;
  const Tensors t;
  const SmallEngine small;
  const sluice_plan_item item = small.item();
  auto options = small_options();
  auto stats = sized<sluice_stats>();
  auto memory = sized<sluice_memory>();
  auto sequence_memory = sized<sluice_sequence_memory>();
  auto audit = sized<sluice_audit>();
  auto head = sized<sluice_head_audit>();
  const auto refused = [&](const auto& call) { check_fails(call, SLUICE_INVALID_ARGUMENT, words); };
  (void)sluice_engine_tokens(small.engine, 99, &tokens);  // Another text than theirs.
  REQUIRE(std::string(sluice_last_error()).find("engine is null") == std::string::npos);
  refused([&] { return sluice_engine_begin(none, kPolicy, &number); });
  refused([&] { return sluice_engine_begin_prompt(none, kPolicy, nullptr, 0, 0, &number); });
  refused([&] { return sluice_engine_match_prefix(none, kPolicy, nullptr, 0, 0, &tokens); });
  refused([&] { return sluice_engine_name_tokens(none, 1, 0, nullptr, 0); });
  refused([&] { return sluice_engine_preempt(none, 1); });
  refused([&] { return sluice_engine_fork(none, 1, 0, nullptr, &number); });
  refused([&] { return sluice_engine_truncate(none, 1, 0); });
  refused([&] { return sluice_engine_import_prefix(none, 1, 0, t.k.get(), t.v.get(), nullptr, nullptr); });
  refused([&] { return sluice_engine_end(none, 1); });
  refused([&] { return sluice_engine_tokens(none, 1, &tokens); });
  refused([&] { return sluice_engine_far_bytes(none, 1, &number); });
  refused([&] { return sluice_engine_can_admit(none, 1, &admitted); });
  refused([&] { return sluice_engine_can_admit_policy(none, kPolicy, 1, &admitted); });
  refused([&] { return sluice_engine_plan(none, &item, 1, &small.bucket, nullptr, &number); });
  refused([&] {
    return sluice_engine_attend(none, &small.bucket, 0, t.q.get(), t.k.get(), t.v.get(), t.out.get(), nullptr, nullptr);
  });
  refused([&] { return sluice_engine_finish(none, 1); });
  refused([&] { return sluice_engine_cancel(none, 1); });
  refused([&] { return sluice_engine_get_options(none, &options); });
  refused([&] { return sluice_engine_stats(none, &stats); });
  refused([&] { return sluice_engine_memory(none, &memory); });
  refused([&] { return sluice_engine_sequence_memory(none, 1, &sequence_memory); });
  refused([&] { return sluice_engine_watch(none, 1, nullptr, 0); });
  refused([&] { return sluice_engine_audit(none, 1, &audit); });
  refused([&] { return sluice_engine_audit_heads(none, 1, &head, 1); });
  refused([&] { return sluice_engine_pin_caller(none); });
  refused([&] { return sluice_engine_unpin_caller(none); });
  CHECK(number == 7);
  CHECK(tokens == 7);
  CHECK(admitted == 7);
  sluice_engine_destroy(nullptr);
}

TEST_CASE("a null pointer is refused by its name", "[capi][errors]") {
  const SmallEngine small;
  sluice_engine* const engine = small.engine;
  const sluice_sequence s = small.sequence;
  std::uint64_t number = 0;
  const Tensors t;
  const sluice_plan_item item = small.item();
  const auto refused = [&](const std::string& name, const auto& call) {
    check_fails(call, SLUICE_INVALID_ARGUMENT, {name + " is null"});
  };
  auto options = small_options();
  sluice_engine* made = engine;
  refused("options", [&] { return sluice_engine_options_init(nullptr, sizeof options); });
  refused("sluice_engine_options", [&] { return sluice_engine_options_make_room_for(nullptr, kPolicy, 10); });
  refused("policy", [&] { return sluice_engine_options_make_room_for(&options, nullptr, 10); });
  refused("engine", [&] { return sluice_engine_create(&options, nullptr); });
  refused("sluice_engine_options", [&] { return sluice_engine_create(nullptr, &made); });
  CHECK(made == nullptr);
  refused("sluice_engine_options", [&] { return sluice_engine_get_options(engine, nullptr); });
  refused("policy", [&] { return sluice_engine_begin(engine, nullptr, &number); });
  refused("sequence", [&] { return sluice_engine_begin(engine, kPolicy, nullptr); });
  const std::int32_t ids[] = {1, 2};
  refused("policy", [&] { return sluice_engine_begin_prompt(engine, nullptr, ids, 2, 0, &number); });
  refused("ids", [&] { return sluice_engine_begin_prompt(engine, kPolicy, nullptr, 2, 0, &number); });
  refused("sequence", [&] { return sluice_engine_begin_prompt(engine, kPolicy, ids, 2, 0, nullptr); });
  std::uint32_t matched = 0;
  refused("policy", [&] { return sluice_engine_match_prefix(engine, nullptr, ids, 2, 0, &matched); });
  refused("ids", [&] { return sluice_engine_match_prefix(engine, kPolicy, nullptr, 2, 0, &matched); });
  refused("tokens", [&] { return sluice_engine_match_prefix(engine, kPolicy, ids, 2, 0, nullptr); });
  refused("ids", [&] { return sluice_engine_name_tokens(engine, s, 0, nullptr, 2); });
  refused("child", [&] { return sluice_engine_fork(engine, s, 0, nullptr, nullptr); });
  refused("tokens", [&] { return sluice_engine_tokens(engine, s, nullptr); });
  refused("bytes", [&] { return sluice_engine_far_bytes(engine, s, nullptr); });
  refused("admitted", [&] { return sluice_engine_can_admit(engine, 1, nullptr); });
  refused("admitted", [&] { return sluice_engine_can_admit_policy(engine, kPolicy, 1, nullptr); });
  int admitted = 7;
  refused("policy", [&] { return sluice_engine_can_admit_policy(engine, nullptr, 1, &admitted); });
  refused("k", [&] { return sluice_engine_import_prefix(engine, s, 0, nullptr, t.v.get(), nullptr, nullptr); });
  refused("v", [&] { return sluice_engine_import_prefix(engine, s, 0, t.k.get(), nullptr, nullptr, nullptr); });
  refused("sluice_plan_item", [&] { return sluice_engine_plan(engine, nullptr, 1, &small.bucket, nullptr, &number); });
  refused("sluice_bucket", [&] { return sluice_engine_plan(engine, &item, 1, nullptr, nullptr, &number); });
  refused("forward", [&] { return sluice_engine_plan(engine, &item, 1, &small.bucket, nullptr, nullptr); });
  const auto attend = [&](const sluice_bucket* b, const CTensor* q, const CTensor* k, const CTensor* v,
                          const CTensor* out) {
    const auto of = [](const CTensor* tensor) { return tensor == nullptr ? nullptr : tensor->get(); };
    return sluice_engine_attend(engine, b, 0, of(q), of(k), of(v), of(out), nullptr, nullptr);
  };
  refused("sluice_bucket", [&] { return attend(nullptr, &t.q, &t.k, &t.v, &t.out); });
  refused("q", [&] { return attend(&small.bucket, nullptr, &t.k, &t.v, &t.out); });
  refused("k", [&] { return attend(&small.bucket, &t.q, nullptr, &t.v, &t.out); });
  refused("v", [&] { return attend(&small.bucket, &t.q, &t.k, nullptr, &t.out); });
  refused("out", [&] { return attend(&small.bucket, &t.q, &t.k, &t.v, nullptr); });
  refused("sluice_stats", [&] { return sluice_engine_stats(engine, nullptr); });
  refused("sluice_memory", [&] { return sluice_engine_memory(engine, nullptr); });
  refused("sluice_sequence_memory", [&] { return sluice_engine_sequence_memory(engine, s, nullptr); });
  refused("sluice_audit", [&] { return sluice_engine_audit(engine, s, nullptr); });
  refused("sluice_head_audit", [&] { return sluice_engine_audit_heads(engine, s, nullptr, kLayers * kQHeads); });
  refused("tokens", [&] { return sluice_engine_watch(engine, s, nullptr, 1); });
  small.forward();  // Nothing of this has hurt.
}

TEST_CASE("a sequence that is not there is not found", "[capi][errors]") {
  const SmallEngine small;
  sluice_engine* const engine = small.engine;
  const sluice_sequence gone = 4711;
  std::uint64_t number = 0;
  std::uint32_t tokens = 0;
  const Tensors t;
  auto audit = sized<sluice_audit>();
  std::vector<sluice_head_audit> heads(kLayers * kQHeads, sized<sluice_head_audit>());
  sluice_plan_item item = small.item();
  item.sequence = gone;
  const auto refused = [&](const auto& call) { check_fails(call, SLUICE_NOT_FOUND, {"no sequence 4711"}); };
  refused([&] { return sluice_engine_fork(engine, gone, 0, nullptr, &number); });
  refused([&] { return sluice_engine_fork(engine, gone, 0, kPolicy, &number); });
  refused([&] { return sluice_engine_truncate(engine, gone, 0); });
  refused([&] { return sluice_engine_import_prefix(engine, gone, 0, t.k.get(), t.v.get(), nullptr, nullptr); });
  refused([&] { return sluice_engine_end(engine, gone); });
  const std::int32_t ids[] = {1};
  refused([&] { return sluice_engine_name_tokens(engine, gone, 0, ids, 1); });
  refused([&] { return sluice_engine_preempt(engine, gone); });
  refused([&] { return sluice_engine_tokens(engine, gone, &tokens); });
  refused([&] { return sluice_engine_far_bytes(engine, gone, &number); });
  auto memory = sized<sluice_sequence_memory>();
  refused([&] { return sluice_engine_sequence_memory(engine, gone, &memory); });
  refused([&] { return sluice_engine_plan(engine, &item, 1, &small.bucket, nullptr, &number); });
  refused([&] { return sluice_engine_watch(engine, gone, nullptr, 0); });
  refused([&] { return sluice_engine_audit(engine, gone, &audit); });
  refused([&] { return sluice_engine_audit_heads(engine, gone, heads.data(), heads.size()); });
}

TEST_CASE("a policy is refused where it is wrong, or not served", "[capi][errors]") {
  const SmallEngine small;
  sluice_sequence s = 0;
  const auto begin = [&](const char* policy) {
    return [=, &s, &small] { return sluice_engine_begin(small.engine, policy, &s); };
  };
  check_fails(begin("sluce"), SLUICE_INVALID_ARGUMENT, {"sluce", "sluice"});
  check_fails(begin(""), SLUICE_INVALID_ARGUMENT, {});
  check_fails(begin("exact | int4 | top_p=0.9 | near=10%"), SLUICE_UNSUPPORTED, {"engine cannot serve"});
  check_fails(begin("pages | int4 | near=0"), SLUICE_UNSUPPORTED, {"pages"});
  check_fails(begin("exact | int4 | top_p=0.9 | near=0 | far=0"), SLUICE_INVALID_ARGUMENT, {"far is 0"});
  check_fails(begin("full | far=99"), SLUICE_INVALID_ARGUMENT, {"\"99\" at character 12", "means nothing here"});
  check_fails(begin("exact | int4 | top_p=0.9 | near=0 | far=3"), SLUICE_UNSUPPORTED, {"far=4 or more"});
  require_ok(begin("exact | int4 | top_p=0.9 | near=0 | far=max(4, 2%)")());
  require_ok(sluice_engine_end(small.engine, s));
  check_fails([&] { return sluice_engine_fork(small.engine, small.sequence, 0, "exakt", &s); }, SLUICE_INVALID_ARGUMENT,
              {"exakt"});
  auto options = small_options();
  check_fails([&] { return sluice_engine_options_make_room_for(&options, "exakt", 10); }, SLUICE_INVALID_ARGUMENT,
              {"exakt"});
  check_fails([&] { return sluice_engine_options_make_room_for(&options, "exact | int4 | top_p=0.9 | near=10%", 10); },
              SLUICE_UNSUPPORTED, {"engine cannot serve"});
}

TEST_CASE("what there is no room for is out of capacity", "[capi][errors]") {
  const SmallEngine small;
  sluice_sequence s = 0;
  std::uint64_t forward = 0;
  require_ok(sluice_engine_begin(small.engine, kPolicy, &s));
  check_fails([&] { return sluice_engine_begin(small.engine, kPolicy, &s); }, SLUICE_OUT_OF_CAPACITY, {"sequences"});
  auto bucket = small.bucket;
  bucket.max_tokens = 16;
  for (int i = 0; i < 16; ++i) small.forward();
  const sluice_plan_item item = small.item();
  check_fails([&] { return sluice_engine_plan(small.engine, &item, 1, &bucket, nullptr, &forward); },
              SLUICE_OUT_OF_CAPACITY, {"17 tokens", "16"});
  auto options = small_options();
  options.host_bytes = std::uint64_t{1} << 45;
  sluice_engine* engine = nullptr;
  const sluice_status status = sluice_engine_create(&options, &engine);
  INFO(sluice_last_error());
  CHECK((status == SLUICE_OUT_OF_CAPACITY || status == SLUICE_INVALID_ARGUMENT));
  CHECK(engine == nullptr);
}

TEST_CASE("calls out of order are refused", "[capi][errors]") {
  const SmallEngine small;
  const Tensors t;
  std::uint64_t first = 0, second = 0, third = 0;
  check_fails([&] { return sluice_engine_finish(small.engine, 12); }, SLUICE_INVALID_ARGUMENT, {"forward 12"});
  check_fails([&] { return sluice_engine_cancel(small.engine, 12); }, SLUICE_INVALID_ARGUMENT, {"forward 12"});
  require_ok(small.plan(&first));
  check_fails([&] { return small.attend(1, t); }, SLUICE_INVALID_ARGUMENT, {"layer 1", "order"});
  check_fails([&] { return sluice_engine_end(small.engine, small.sequence); }, SLUICE_INVALID_ARGUMENT, {"under way"});
  check_fails([&] { return sluice_engine_truncate(small.engine, small.sequence, 0); }, SLUICE_INVALID_ARGUMENT,
              {"under way"});
  require_ok(small.plan(&second));
  third = 7;
  check_fails([&] { return small.plan(&third); }, SLUICE_INVALID_ARGUMENT, {"in_flight"});
  CHECK(third == 7);
  require_ok(sluice_engine_cancel(small.engine, first));
  small.forward();
}

TEST_CASE("a forward that did not run ends with its reason", "[capi][errors]") {
  auto options = small_options();
  options.timeout_ms = 2000;
  SmallEngine small;
  small.owner = create(options);
  small.engine = small.owner.get();
  require_ok(sluice_engine_begin(small.engine, kPolicy, &small.sequence));
  std::uint64_t first = 0, second = 0;
  require_ok(small.plan(&first));
  check_fails([&] { return sluice_engine_finish(small.engine, first); }, SLUICE_TIMEOUT, {"layer"});
  require_ok(small.plan(&second));
  check_fails([&] { return sluice_engine_finish(small.engine, first); }, SLUICE_DEVICE,
              {"did not get to its end", "before all its layers were enqueued"});
  require_ok(sluice_engine_cancel(small.engine, second));
  std::uint32_t tokens = 7;
  require_ok(sluice_engine_tokens(small.engine, small.sequence, &tokens));
  CHECK(tokens == 0);
  small.forward();
}

TEST_CASE("a stream of C is none of the host device's", "[capi][errors]") {
  const SmallEngine small;
  Tensors t;
  std::uint64_t forward = 0;
  int other = 0;
  void* const stream = &other;
  const sluice_plan_item item = small.item();
  const auto refused = [&](const auto& call) { check_fails(call, SLUICE_INVALID_ARGUMENT, {"stream", "NULL"}); };
  refused([&] { return sluice_engine_plan(small.engine, &item, 1, &small.bucket, stream, &forward); });
  refused([&] {
    return sluice_engine_attend(small.engine, &small.bucket, 0, t.q.get(), t.k.get(), t.v.get(), t.out.get(), nullptr,
                                stream);
  });
  refused([&] {
    return sluice_engine_import_prefix(small.engine, small.sequence, 0, t.k.get(), t.v.get(), nullptr, stream);
  });
}

TEST_CASE("a GPU that is not there is refused", "[capi][errors]") {
  auto options = small_options();
  options.device_type = SLUICE_DEVICE_CUDA;
  options.device_id = 1000;
  sluice_engine* engine = nullptr;
  const bool any = sluice_cuda_devices() != 0;
  check_fails([&] { return sluice_engine_create(&options, &engine); }, any ? SLUICE_DEVICE : SLUICE_UNSUPPORTED,
              {any ? "no GPU 1000" : "CUDA device"});
  CHECK(engine == nullptr);
}

TEST_CASE("each thread has its own last error", "[capi][errors]") {
  const SmallEngine small;
  std::uint32_t tokens = 0;
  CHECK(sluice_engine_tokens(small.engine, 111, &tokens) == SLUICE_NOT_FOUND);
  std::string fresh = "?", theirs;
  std::thread([&] {
    fresh = sluice_last_error();
    (void)sluice_engine_tokens(small.engine, 222, &tokens);
    theirs = sluice_last_error();
  }).join();
  CHECK(fresh.empty());
  CHECK(theirs.find("222") != std::string::npos);
  CHECK(std::string(sluice_last_error()).find("111") != std::string::npos);
  require_ok(sluice_engine_tokens(small.engine, small.sequence, &tokens));
  CHECK(std::string(sluice_last_error()).find("111") != std::string::npos);  // Calls that succeed leave it alone.
}

TEST_CASE("a thread of C is bound to the core that is left to it, or told why not", "[capi][core_shares]") {
  auto options = small_options();
  options.threads = 0;
  const EnginePointer owner = create(options);
  const auto cores = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : -1;
  };
  sluice_status pinned = SLUICE_INTERNAL, unpinned = SLUICE_INTERNAL;
  std::string why;
  int before = 0, bound = 0, after = 0;
  std::thread([&] {  // What this test's own thread may use stays.
    before = cores();
    pinned = sluice_engine_pin_caller(owner.get());
    why = sluice_last_error();
    bound = cores();
    unpinned = sluice_engine_unpin_caller(owner.get());
    after = cores();
  }).join();
  CHECK(unpinned == SLUICE_OK);
  CHECK(after == before);
  if (pinned == SLUICE_UNSUPPORTED) {
    CHECK(why.find("pin_caller: ") == 0);
    CHECK(bound == before);
    return;
  }
  CHECK(pinned == SLUICE_OK);
  CHECK(bound < before);
}

TEST_CASE("every status has a name, and the library its version", "[capi]") {
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
