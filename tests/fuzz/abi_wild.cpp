// Calls of the C interface that are wrong, or may be: they are refused with a text, and change nothing.

#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fuzz/abi_world.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace sluice::test::abi {

void World::refused(sluice_status status) { FUZZ_REQUIRE(!call(status)); }

void World::wild(Bytes& bytes) {
  switch (bytes.below(4)) {
    case 0: wild_forward(bytes); break;
    case 1: wild_options(bytes); break;
    case 2: wild_lists(bytes); break;
    default: wild_admission(bytes); break;
  }
  for (const Sequence& of : sequences_) require_tokens(of);
}

/// A tensor that is spoilt in a field or two; then all of it as it should be.
void World::wild_forward(Bytes& bytes) {
  sluice_bucket bucket{};
  bucket.struct_size = sizeof bucket;
  bucket.decode_rows = 1;
  bucket.features = SLUICE_BUCKET_TOP_K | SLUICE_BUCKET_UNBOUNDED | SLUICE_BUCKET_PAGES;
  const sluice_plan_item item{sizeof item, 1, sequences_[0].id, 0, 0};
  std::uint64_t number = 0;
  if (!call(sluice_engine_plan(engine_.get(), &item, 1, &bucket, nullptr, &number))) return;
  auto t = std::make_unique<Tensors>();
  Tensor q(t->q.data(), 1, kQHeads, kHeadDim), k(t->k.data(), 1, kKvHeads, kHeadDim),
      v(t->v.data(), 1, kKvHeads, kHeadDim), out(t->out.data(), 1, kQHeads, kHeadDim),
      lse(t->lse.data(), 1, kQHeads, 0);
  const auto attend = [&] {
    return sluice_engine_attend(engine_.get(), &bucket, 0, &q.tensor, &k.tensor, &v.tensor, &out.tensor, &lse.tensor,
                                nullptr);
  };
  Tensor* const all[] = {&q, &k, &v, &out};
  Tensor& spoilt = *all[bytes.below(4)];
  const sluice_tensor kept = spoilt.tensor;
  const auto shape = spoilt.shape, strides = spoilt.strides;
  switch (bytes.below(8)) {
    case 0: spoilt.shape[bytes.below(3)] = static_cast<std::int64_t>(bytes.odd() | 1u << 20); break;
    case 1: spoilt.strides[1] = static_cast<std::int64_t>(bytes.odd() | std::uint64_t{1} << 59); break;
    case 2: spoilt.strides[2] = 2 + static_cast<std::int64_t>(bytes.odd() >> 1); break;
    case 3: spoilt.tensor.byte_offset = (bytes.odd() << 2 | 1); break;
    case 4: spoilt.tensor.ndim = static_cast<std::int32_t>(bytes.odd() | 8); break;
    case 5: spoilt.tensor.dtype.code = static_cast<std::uint8_t>(5 + bytes.below(200)); break;
    case 6: spoilt.tensor.device.device_type = 4 + static_cast<std::int32_t>(bytes.next() % 8); break;
    default: spoilt.tensor.data = nullptr; break;
  }
  // What it should be after all is attended, and the forward is at its second layer then.
  refused(attend());
  spoilt.tensor = kept, spoilt.shape = shape, spoilt.strides = strides;
  refused(sluice_engine_attend(engine_.get(), &bucket, 1 + static_cast<std::uint32_t>(bytes.odd()) % 1000, &q.tensor,
                               &k.tensor, &v.tensor, &out.tensor, nullptr, nullptr));
  FUZZ_REQUIRE(call(attend()));
  FUZZ_REQUIRE(call(sluice_engine_cancel(engine_.get(), number)));
}

/// Options of which some have any value: what they would take is asked before an engine is made of what is small.
void World::wild_options(Bytes& bytes) {
  sluice_engine_options options = options_of(kind_);
  constexpr std::uint32_t kWords = sizeof options / sizeof(std::uint32_t);
  for (std::uint32_t changes = 1 + bytes.below(3); changes != 0; --changes) {
    const std::uint32_t word = 1 + bytes.below(kWords - 1);
    const std::size_t at = word * sizeof(std::uint32_t);
    const auto within = [&](std::size_t field) { return at >= field && at < field + sizeof(void*); };
    if (within(offsetof(sluice_engine_options, cores)) || within(offsetof(sluice_engine_options, windows)) ||
        within(offsetof(sluice_engine_options, policies)))
      continue;
    if (at == offsetof(sluice_engine_options, device_type)) continue;  // A GPU that there may be.
    const auto value = static_cast<std::uint32_t>(bytes.odd());
    std::memcpy(reinterpret_cast<unsigned char*>(&options) + at, &value, sizeof value);
  }
  // As many cores as the machine may have are read.
  static const std::vector<std::uint32_t> cores(4096, 0);
  if (options.core_count != 0) options.cores = cores.data();
  // And as many policies as may be named.
  static const std::vector<const char*> policies(1024, "full:near=0");
  if (options.policy_count > 1) options.policies = policies.data();
  sluice_memory memory{};
  memory.struct_size = sizeof memory;
  const bool sound = call(sluice_engine_options_memory_needed(&options, &memory));
  std::uint64_t near = 0;
  (void)call(sluice_engine_options_near_within(&options, bytes.odd(), &near));
  sluice_engine_options room = options;
  const std::string policy(bytes.text(bytes.below(24)));
  const char* const named[] = {policy.c_str()};
  room.policies = named;
  room.policy_count = 1;
  (void)call(sluice_engine_options_resolve(&room));
  const std::uint64_t takes =
      memory.far_pages + memory.pinned + memory.near_pages + memory.codes + memory.digests + memory.buffers;
  if (!sound || takes > 8u << 20 || options.threads > 4 || options.core_count != 0) return;
  sluice_engine* engine = nullptr;
  if (!call(sluice_engine_create(&options, &engine))) return;
  sluice_sequence sequence = 0;
  if (call(sluice_engine_begin(engine, "full:near=0", &sequence))) (void)call(sluice_engine_end(engine, sequence));
  sluice_engine_destroy(engine);
}

/// Counts that cannot be, sequences that are not, texts that are none, sizes that no struct has.
void World::wild_lists(Bytes& bytes) {
  const std::int32_t id = 1;
  const std::uint32_t token = 1;
  const sluice_sequence any = bytes.below(2) == 0 ? sequences_[0].id : bytes.odd() + 1'000'000'000;
  const std::size_t many = bytes.odd() | 1u << 20;
  std::uint64_t number = 0;
  std::uint32_t tokens = 0;
  sluice_bucket bucket{};
  bucket.struct_size = sizeof bucket;
  bucket.decode_rows = 1;
  bucket.features = static_cast<std::uint32_t>(bytes.odd());
  sluice_plan_item item{sizeof item, static_cast<std::uint32_t>(bytes.odd()) | 1u << 12, any, bytes.below(2), 0};
  const std::string text(bytes.text(bytes.below(32)));
  sluice_engine* const engine = engine_.get();
  refused(sluice_engine_plan(engine, &item, many, &bucket, nullptr, &number));
  refused(sluice_engine_plan(engine, &item, 1, &bucket, nullptr, &number));
  item.struct_size = static_cast<std::uint32_t>(bytes.odd()) | 1u;
  refused(sluice_engine_plan(engine, &item, 1, &bucket, nullptr, &number));
  bucket.struct_size = static_cast<std::uint32_t>(bytes.odd()) | 2u;
  refused(sluice_engine_plan(engine, nullptr, 0, &bucket, nullptr, &number));
  refused(sluice_engine_watch(engine, any, &token, many));
  refused(sluice_engine_name_tokens(engine, any, bytes.next(), &id, many));
  refused(sluice_engine_begin_prompt(engine, "full:near=0", &id, many, 0, &number));
  refused(sluice_engine_audit_heads(engine, any, nullptr, many));
  refused(sluice_engine_finish(engine, bytes.odd() | std::uint64_t{1} << 40));
  refused(sluice_engine_resume_memory(engine, text.data(), text.size(), nullptr, &number));
  refused(sluice_engine_tokens(engine, sequences_[0].id + 1'000'000'000, &tokens));
  refused(sluice_engine_truncate(engine, sequences_[0].id, static_cast<std::uint32_t>(many)));
  if (call(sluice_engine_begin(engine, text.c_str(), &number))) FUZZ_REQUIRE(call(sluice_engine_end(engine, number)));
  int admitted = 0;
  (void)call(sluice_engine_can_admit_policy(engine, text.c_str(), static_cast<std::uint32_t>(bytes.odd()), &admitted));
  sluice_stats stats{};
  stats.struct_size = static_cast<std::uint32_t>(bytes.odd()) | 1u;
  refused(sluice_engine_stats(engine, &stats));
}

/// Requests of any size by options of any size.
void World::wild_admission(Bytes& bytes) {
  sluice_admission_options options{};
  FUZZ_REQUIRE(call(sluice_admission_options_init(&options, sizeof options)));
  options.pages = 64;
  const auto some = [&] { return static_cast<std::uint32_t>(bytes.below(2) == 0 ? bytes.below(8) : bytes.odd()); };
  options.decode_rows = some(), options.prefill_rows = some(), options.prefills = some();
  options.sequences = 1 + bytes.below(4), options.max_tokens = some();
  if (bytes.below(2) == 1) options.pages = bytes.odd(), options.near_pages = bytes.odd();
  if (bytes.below(4) == 1) options.window_blocks = some(), options.window_pages = bytes.odd();
  if (bytes.below(4) == 1) options.slowdown = std::bit_cast<double>(bytes.odd() * 0x9e3779b97f4a7c15u);
  sluice_admission* admission = nullptr;
  if (!call(sluice_admission_create(&options, &admission))) return;
  std::uint64_t preempted[4], admitted[4];
  sluice_turn_item items[4]{};
  for (sluice_turn_item& item : items) item.struct_size = sizeof item;
  for (int step = 0; step < 8; ++step) {
    const sluice_request request{sizeof request, some(), some(), bytes.below(2), bytes.below(16)};
    (void)call(sluice_admission_submit(admission, &request));
    std::size_t out = 4, in = 4, count = 4;
    const std::uint64_t held = bytes.odd();
    if (!call(sluice_admission_admit(admission, bytes.below(2) == 0 ? nullptr : &held, preempted, &out, admitted, &in)))
      continue;
    FUZZ_REQUIRE(out <= 4 && in <= 4);
    for (std::size_t i = 0; i < in; ++i) (void)call(sluice_admission_begun(admission, admitted[i], some()));
    if (!call(sluice_admission_next(admission, some(), items, &count))) continue;
    FUZZ_REQUIRE(count <= 4);
    out = 4;
    if (bytes.below(3) == 0) {
      (void)call(sluice_admission_fail(admission));
    } else {
      (void)call(sluice_admission_complete(admission, std::bit_cast<double>(bytes.odd()), preempted, &out));
    }
    out = 4;
    if (bytes.below(4) == 0) (void)call(sluice_admission_preempt(admission, bytes.below(16), preempted, &out));
    if (bytes.below(4) == 0) (void)call(sluice_admission_end(admission, bytes.below(16)));
  }
  std::size_t running = 4;
  FUZZ_REQUIRE(call(sluice_admission_running(admission, admitted, &running)));
  sluice_admission_destroy(admission);
}

}  // namespace sluice::test::abi
