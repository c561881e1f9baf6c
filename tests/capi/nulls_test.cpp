// Null pointers by the C interface: each is refused by its name, and nothing is written.
#include "tests/capi/small_engine.hpp"

using namespace sluice::test::capi;

namespace {

/// Refused as `name` is null.
template <class Call>
void check_null(const std::string& name, const Call& call) {
  CAPTURE(name);
  check_fails(call, SLUICE_INVALID_ARGUMENT, {name + " is null"});
}

}  // namespace

TEST_CASE("without an engine all calls of sequences are refused", "[capi][errors]") {
  sluice_engine* const none = nullptr;
  const Tensors t;
  std::uint64_t number = 7;
  std::uint32_t tokens = 7;
  int admitted = 7;
  char area[8] = {};
  const auto refused = [](const auto& call) { check_null("engine", call); };
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
  refused([&] { return sluice_engine_park_bytes(none, 1, nullptr, &number); });
  refused([&] { return sluice_engine_park_memory(none, 1, nullptr, area, sizeof area, &number); });
  refused([&] { return sluice_engine_park_file(none, 1, nullptr, "parked"); });
  refused([&] { return sluice_engine_resume_memory(none, area, sizeof area, nullptr, &number); });
  refused([&] { return sluice_engine_resume_file(none, "parked", nullptr, &number); });
  CHECK(number == 7);
  CHECK(tokens == 7);
  CHECK(admitted == 7);
}

TEST_CASE("without an engine all calls of forwards and figures are refused", "[capi][errors]") {
  sluice_engine* const none = nullptr;
  const Tensors t;
  std::uint64_t forward = 7;
  auto bucket = sized<sluice_bucket>();
  bucket.decode_rows = kRows;
  const sluice_plan_item item = {sizeof item, 1, 1, 0, 0};
  auto options = small_options();
  auto admission = sized<sluice_admission_options>();
  auto stats = sized<sluice_stats>();
  auto memory = sized<sluice_memory>();
  auto sequence_memory = sized<sluice_sequence_memory>();
  auto audit = sized<sluice_audit>();
  auto sizes = sized<sluice_engine_sizes>();
  auto head = sized<sluice_head_audit>();
  const auto refused = [](const auto& call) { check_null("engine", call); };
  refused([&] { return sluice_engine_plan(none, &item, 1, &bucket, nullptr, &forward); });
  refused([&] {
    return sluice_engine_attend(none, &bucket, 0, t.q.get(), t.k.get(), t.v.get(), t.out.get(), nullptr, nullptr);
  });
  refused([&] {
    return sluice_engine_attend_rehearsed(none, &bucket, 0, t.q.get(), t.k.get(), t.v.get(), nullptr, t.out.get(),
                                          nullptr, nullptr);
  });
  const auto args = sized<sluice_attend_args>();
  refused([&] { return sluice_engine_attend_layer(none, &bucket, &args); });
  refused([&] { return sluice_engine_finish(none, 1); });
  refused([&] { return sluice_engine_cancel(none, 1); });
  refused([&] { return sluice_engine_get_options(none, &options); });
  refused([&] { return sluice_engine_get_sizes(none, &sizes); });
  refused([&] { return sluice_admission_options_of(none, &admission); });
  refused([&] { return sluice_engine_stats(none, &stats); });
  refused([&] { return sluice_engine_memory(none, &memory); });
  refused([&] { return sluice_engine_sequence_memory(none, 1, &sequence_memory); });
  refused([&] { return sluice_engine_watch(none, 1, nullptr, 0); });
  refused([&] { return sluice_engine_audit(none, 1, &audit); });
  refused([&] { return sluice_engine_audit_heads(none, 1, &head, 1); });
  refused([&] { return sluice_engine_pin_caller(none); });
  refused([&] { return sluice_engine_unpin_caller(none); });
  CHECK(forward == 7);
  sluice_engine_destroy(nullptr);
}

TEST_CASE("a null pointer to options is refused by its name", "[capi][errors]") {
  const SmallEngine small;
  auto options = small_options();
  sluice_engine* made = small.engine;
  check_null("options", [&] { return sluice_engine_options_init(nullptr, sizeof options); });
  check_null("sluice_engine_options", [&] { return sluice_engine_options_resolve(nullptr); });
  check_null("engine", [&] { return sluice_engine_create(&options, nullptr); });
  check_null("sluice_engine_sizes", [&] { return sluice_engine_get_sizes(small.engine, nullptr); });
  check_null("sluice_engine_options", [&] { return sluice_engine_create(nullptr, &made); });
  CHECK(made == nullptr);
  check_null("sluice_engine_options", [&] { return sluice_engine_get_options(small.engine, nullptr); });
  check_null("sluice_memory", [&] { return sluice_engine_options_memory_needed(&options, nullptr); });
  check_null("near_bytes", [&] { return sluice_engine_options_near_within(&options, 1u << 30, nullptr); });
}

TEST_CASE("a null pointer to what a sequence needs is refused by its name", "[capi][errors]") {
  const SmallEngine small;
  sluice_engine* const engine = small.engine;
  const sluice_sequence s = small.sequence;
  const Tensors t;
  const std::int32_t ids[] = {1, 2};
  std::uint64_t number = 7;
  std::uint32_t matched = 7;
  int admitted = 7;
  check_null("policy", [&] { return sluice_engine_begin(engine, nullptr, &number); });
  check_null("sequence", [&] { return sluice_engine_begin(engine, kPolicy, nullptr); });
  check_null("policy", [&] { return sluice_engine_begin_prompt(engine, nullptr, ids, 2, 0, &number); });
  check_null("ids", [&] { return sluice_engine_begin_prompt(engine, kPolicy, nullptr, 2, 0, &number); });
  check_null("sequence", [&] { return sluice_engine_begin_prompt(engine, kPolicy, ids, 2, 0, nullptr); });
  check_null("policy", [&] { return sluice_engine_match_prefix(engine, nullptr, ids, 2, 0, &matched); });
  check_null("ids", [&] { return sluice_engine_match_prefix(engine, kPolicy, nullptr, 2, 0, &matched); });
  check_null("tokens", [&] { return sluice_engine_match_prefix(engine, kPolicy, ids, 2, 0, nullptr); });
  check_null("ids", [&] { return sluice_engine_name_tokens(engine, s, 0, nullptr, 2); });
  check_null("child", [&] { return sluice_engine_fork(engine, s, 0, nullptr, nullptr); });
  check_null("tokens", [&] { return sluice_engine_tokens(engine, s, nullptr); });
  check_null("bytes", [&] { return sluice_engine_far_bytes(engine, s, nullptr); });
  check_null("admitted", [&] { return sluice_engine_can_admit(engine, 1, nullptr); });
  check_null("admitted", [&] { return sluice_engine_can_admit_policy(engine, kPolicy, 1, nullptr); });
  check_null("policy", [&] { return sluice_engine_can_admit_policy(engine, nullptr, 1, &admitted); });
  check_null("k", [&] { return sluice_engine_import_prefix(engine, s, 0, nullptr, t.v.get(), nullptr, nullptr); });
  check_null("v", [&] { return sluice_engine_import_prefix(engine, s, 0, t.k.get(), nullptr, nullptr, nullptr); });
  CHECK((number == 7 && matched == 7 && admitted == 7));
  small.forward();  // Nothing of this has hurt.
}

TEST_CASE("a null pointer to what forwards and figures need is refused by its name", "[capi][errors]") {
  const SmallEngine small;
  sluice_engine* const engine = small.engine;
  const sluice_sequence s = small.sequence;
  const Tensors t;
  const sluice_plan_item item = small.item();
  std::uint64_t forward = 7;
  check_null("sluice_plan_item",
             [&] { return sluice_engine_plan(engine, nullptr, 1, &small.bucket, nullptr, &forward); });
  check_null("sluice_bucket", [&] { return sluice_engine_plan(engine, &item, 1, nullptr, nullptr, &forward); });
  check_null("forward", [&] { return sluice_engine_plan(engine, &item, 1, &small.bucket, nullptr, nullptr); });
  const auto attend = [&](const sluice_bucket* bucket, const CTensor* q, const CTensor* k, const CTensor* v,
                          const CTensor* out) {
    const auto of = [](const CTensor* tensor) { return tensor == nullptr ? nullptr : tensor->get(); };
    return sluice_engine_attend(engine, bucket, 0, of(q), of(k), of(v), of(out), nullptr, nullptr);
  };
  check_null("sluice_bucket", [&] { return attend(nullptr, &t.q, &t.k, &t.v, &t.out); });
  check_null("q", [&] { return attend(&small.bucket, nullptr, &t.k, &t.v, &t.out); });
  check_null("k", [&] { return attend(&small.bucket, &t.q, nullptr, &t.v, &t.out); });
  check_null("v", [&] { return attend(&small.bucket, &t.q, &t.k, nullptr, &t.out); });
  check_null("out", [&] { return attend(&small.bucket, &t.q, &t.k, &t.v, nullptr); });
  check_null("sluice_attend_args", [&] { return sluice_engine_attend_layer(engine, &small.bucket, nullptr); });
  const auto args = sized<sluice_attend_args>();
  check_null("q", [&] { return sluice_engine_attend_layer(engine, &small.bucket, &args); });
  check_null("sluice_stats", [&] { return sluice_engine_stats(engine, nullptr); });
  check_null("sluice_memory", [&] { return sluice_engine_memory(engine, nullptr); });
  check_null("sluice_sequence_memory", [&] { return sluice_engine_sequence_memory(engine, s, nullptr); });
  check_null("sluice_audit", [&] { return sluice_engine_audit(engine, s, nullptr); });
  check_null("sluice_head_audit", [&] { return sluice_engine_audit_heads(engine, s, nullptr, kLayers * kQHeads); });
  check_null("tokens", [&] { return sluice_engine_watch(engine, s, nullptr, 1); });
  CHECK(forward == 7);
  small.forward();  // Nothing of this has hurt.
}
