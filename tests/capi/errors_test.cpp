// What the C interface refuses, and what it says.
#include "tests/capi/small_engine.hpp"

using namespace sluice::test::capi;

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
  refused([&] { return sluice_engine_park_bytes(engine, gone, nullptr, &number); });
  refused([&] { return sluice_engine_park_memory(engine, gone, nullptr, &number, sizeof number, nullptr); });
  refused([&] { return sluice_engine_park_file(engine, gone, nullptr, "parked"); });
  refused([&] { return sluice_engine_watch(engine, gone, nullptr, 0); });
  refused([&] { return sluice_engine_audit(engine, gone, &audit); });
  refused([&] { return sluice_engine_audit_heads(engine, gone, heads.data(), heads.size()); });
}

TEST_CASE("a list is not read before its count can be one", "[capi][errors]") {
  const SmallEngine small;
  const std::int32_t id = 1;
  const std::uint32_t token = 1;
  const sluice_plan_item item = small.item();
  auto head = sized<sluice_head_audit>();
  std::uint64_t number = 7;
  for (const std::size_t count : {std::size_t{100'000}, std::size_t{1} << 61, ~std::size_t{0}}) {
    CAPTURE(count);
    const std::string words = std::to_string(count);
    check_fails([&] { return sluice_engine_plan(small.engine, &item, count, &small.bucket, nullptr, &number); },
                SLUICE_INVALID_ARGUMENT, {"item_count is " + words, "sequences 2"});
    check_fails([&] { return sluice_engine_watch(small.engine, small.sequence, &token, count); },
                SLUICE_INVALID_ARGUMENT, {words + " tokens"});
    check_fails([&] { return sluice_engine_begin_prompt(small.engine, kPolicy, &id, count, 0, &number); },
                SLUICE_OUT_OF_CAPACITY, {words + " tokens"});
    check_fails([&] { return sluice_engine_name_tokens(small.engine, small.sequence, 0, &id, count); },
                SLUICE_OUT_OF_CAPACITY, {"would be names of more"});
    check_fails([&] { return sluice_engine_audit_heads(small.engine, small.sequence, &head, count); },
                SLUICE_INVALID_ARGUMENT, {"head_count is " + words});
  }
  CHECK(number == 7);
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
  const auto resolve = [&](const char* policy) {
    return [=] {
      auto named = options;
      named.policies = &policy;
      return sluice_engine_options_resolve(&named);
    };
  };
  check_fails(resolve("exakt"), SLUICE_INVALID_ARGUMENT, {"exakt"});
  check_fails(resolve("exact | int4 | top_p=0.9 | near=10%"), SLUICE_UNSUPPORTED, {"engine cannot serve"});
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
  const auto make = [&] { return sluice_engine_create(&options, &engine); };
  check_fails(make, SLUICE_INVALID_ARGUMENT, {"host_bytes is 35184372088832"});  // More tokens than are counted.
  options.layers = 1024, options.page_tokens = 256;
  check_fails(make, SLUICE_OUT_OF_CAPACITY, {"asked for 35184372088832 bytes", "the machine has"});
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
  const SmallEngine small(options);
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

TEST_CASE("the host device takes no stream of C", "[capi][errors]") {
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
