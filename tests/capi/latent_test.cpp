// Latent attention by the C interface: values are the beginnings of keys, and `v` is null.
#include "tests/capi/small_engine.hpp"

using namespace sluice::test::capi;

namespace {

constexpr std::uint32_t kHeads = 40, kDim = 96, kUsed = 64;

sluice_engine_options latent_options() {
  sluice_engine_options options = small_options();
  options.layers = 1;
  options.q_heads = kHeads;
  options.kv_heads = 1;
  options.head_dim = kDim;
  options.value_dim = kUsed;
  options.kv_dtype = SLUICE_F32;
  return options;
}

}  // namespace

TEST_CASE("values of latent attention are the beginnings of keys", "[capi][latent]") {
  const EnginePointer owner = create(latent_options());
  sluice_engine* const engine = owner.get();
  sluice_sequence sequence = 0;
  require_ok(sluice_engine_begin(engine, "full", &sequence));
  std::vector<float> keys(2 * kDim), queries(kRows * kHeads * kDim), outputs(kRows * kHeads * kUsed, 7.f);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<float>(i % 13) - 6.f;
  const CTensor before(keys.data(), {1, 1, kDim});
  require_ok(sluice_engine_import_prefix(engine, sequence, 0, before.get(), nullptr, nullptr, nullptr));

  auto bucket = sized<sluice_bucket>();
  bucket.decode_rows = kRows;
  bucket.features = SLUICE_BUCKET_UNBOUNDED;
  const sluice_plan_item item = {sizeof item, 1, sequence, 0, 0};
  std::uint64_t forward = 0;
  require_ok(sluice_engine_plan(engine, &item, 1, &bucket, nullptr, &forward));
  std::vector<float> now(kRows * kDim);
  std::copy_n(keys.begin() + kDim, kDim, now.begin());
  const CTensor q(queries.data(), {kRows, kHeads, kDim}), k(now.data(), {kRows, 1, kDim});
  const CTensor out(outputs.data(), {kRows, kHeads, kUsed}), wide(outputs.data(), {1, 1, kDim});
  const auto attend = [&](const sluice_tensor* v, const CTensor& to) {
    return sluice_engine_attend(engine, &bucket, 0, q.get(), k.get(), v, to.get(), nullptr, nullptr);
  };
  check_fails([&] { return attend(k.get(), out); }, SLUICE_INVALID_ARGUMENT, {"v is given", "leave it out"});
  check_fails([&] { return attend(nullptr, wide); }, SLUICE_INVALID_ARGUMENT, {"out is", "needs [2, 40, 64]"});
  require_ok(attend(nullptr, out));
  require_ok(sluice_engine_finish(engine, forward));
  // Queries of zeros weigh both tokens alike; the second row is of padding.
  for (std::uint32_t head = 0; head < kHeads; ++head) {
    for (std::uint32_t c = 0; c < kUsed; ++c) {
      CHECK(outputs[head * kUsed + c] == (keys[c] + keys[kDim + c]) / 2);
      CHECK(outputs[(kHeads + head) * kUsed + c] == 0.f);
    }
  }
}

TEST_CASE("without value_dim a null v is refused", "[capi][latent]") {
  const SmallEngine small;
  std::uint64_t forward = 0;
  require_ok(small.plan(&forward));
  const Tensors t;
  check_fails(
      [&] {
        return sluice_engine_attend(small.engine, &small.bucket, 0, t.q.get(), t.k.get(), nullptr, t.out.get(), nullptr,
                                    nullptr);
      },
      SLUICE_INVALID_ARGUMENT, {"v is null"});
}
