#pragma once

#include <vector>

#include "tests/capi/c_support.hpp"

/// An engine of C with one sequence, for tests of what it refuses.
namespace sluice::test::capi {

inline constexpr std::uint32_t kLayers = 2, kQHeads = 4, kKvHeads = 2, kHeadDim = 64, kRows = 2;
inline constexpr const char* kPolicy = "exact | int4 | top_p=0.9 | near=0";

[[nodiscard]] inline sluice_engine_options small_options() {
  sluice_engine_options options;
  require_ok(sluice_engine_options_init(&options, sizeof options));
  options.layers = kLayers;
  options.q_heads = kQHeads;
  options.kv_heads = kKvHeads;
  options.head_dim = kHeadDim;
  options.host_bytes = 1u << 20;
  options.largest_decode_rows = kRows;
  options.largest_features = SLUICE_BUCKET_TOP_K | SLUICE_BUCKET_UNBOUNDED;
  options.sequences = 2;
  options.threads = 1;
  options.pin_threads = 0;
  options.answer_timeout_ms = 30000;  // However busy the machine is.
  options.import_rows = 32;
  return options;
}

/// Tensors of a forward of kRows rows, which a test spoils one at a time.
struct Tensors {
  std::vector<float> memory = std::vector<float>(kRows * kHeadDim * (2 * kQHeads + 2 * kKvHeads) + kRows * kQHeads);
  CTensor q{memory.data(), {kRows, kQHeads, kHeadDim}};
  CTensor out{memory.data() + kRows * kHeadDim * kQHeads, {kRows, kQHeads, kHeadDim}};
  CTensor k{memory.data() + kRows * kHeadDim * 2 * kQHeads, {kRows, kKvHeads, kHeadDim}};
  CTensor v{memory.data() + kRows * kHeadDim * (2 * kQHeads + kKvHeads), {kRows, kKvHeads, kHeadDim}};
  CTensor lse{memory.data() + kRows * kHeadDim * (2 * kQHeads + 2 * kKvHeads), {kRows, kQHeads}};
};

struct SmallEngine {
  EnginePointer owner;
  sluice_engine* engine = owner.get();
  sluice_sequence sequence = 0;
  sluice_bucket bucket = sized<sluice_bucket>();

  explicit SmallEngine(const sluice_engine_options& options = small_options()) : owner(create(options)) {
    require_ok(sluice_engine_begin(engine, kPolicy, &sequence));
    bucket.decode_rows = kRows;
    bucket.features = SLUICE_BUCKET_UNBOUNDED;
  }
  [[nodiscard]] sluice_plan_item item(std::uint32_t tokens = 1) const {
    return {sizeof(sluice_plan_item), tokens, sequence, 0, 0};
  }
  [[nodiscard]] sluice_status plan(std::uint64_t* forward) const {
    const sluice_plan_item one = item();
    return sluice_engine_plan(engine, &one, 1, &bucket, nullptr, forward);
  }
  [[nodiscard]] sluice_status attend(std::uint32_t layer, const Tensors& t) const {
    return sluice_engine_attend(engine, &bucket, layer, t.q.get(), t.k.get(), t.v.get(), t.out.get(), t.lse.get(),
                                nullptr);
  }
  void forward() const {
    const Tensors tensors;
    std::uint64_t number = 0;
    require_ok(plan(&number));
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) require_ok(attend(layer, tensors));
    require_ok(sluice_engine_finish(engine, number));
  }
};

}  // namespace sluice::test::capi
