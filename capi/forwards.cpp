// Forwards of an engine.
#include "capi/engine.hpp"
#include "capi/options.hpp"
#include "capi/sized.hpp"

namespace sluice::capi {
namespace {

static_assert(offsetof(sluice_bucket, drafts) + sizeof(std::uint32_t) == sizeof(sluice_bucket));
static_assert(offsetof(sluice_attend_args, stream) + sizeof(void*) == sizeof(sluice_attend_args));
static_assert(offsetof(sluice_plan_item, reserved) + sizeof(std::uint32_t) == sizeof(sluice_plan_item));

Bucket bucket_of(const sluice_bucket* bucket) {
  const sluice_bucket given = read_sized(bucket, "sluice_bucket");
  Bucket out{.decode_rows = given.decode_rows,
             .drafts = std::max(given.drafts, 1u),
             .prefill_rows = given.prefill_rows,
             .prefills = given.prefills,
             .max_tokens = given.max_tokens};
  set_features(given.features, "sluice_bucket.features", out);
  return out;
}

std::vector<PlanItem> items_of(const sluice_plan_item* items, std::size_t count, const Engine& engine) {
  constexpr const char* kName = "sluice_plan_item";
  // Before one is read: each is of a sequence of its own.
  const std::uint32_t most = engine.options().sequences;
  require(count <= most, "item_count is " + std::to_string(count) + ", and sluice_engine_options.sequences " +
                             std::to_string(most) + "; plan each sequence once");
  require_array(items, count, kName);
  std::vector<PlanItem> out;
  for (std::size_t i = 0; i < count; ++i) {
    const sluice_plan_item item = read_sized(element(items, i), kName);
    require(item.reserved == 0,
            "sluice_plan_item.reserved is " + std::to_string(item.reserved) + "; it must be 0: clear items first");
    out.push_back({.sequence = SequenceId{item.sequence},
                   .tokens = item.tokens,
                   .prefill = switch_of(item.prefill, "sluice_plan_item.prefill")});
  }
  return out;
}

}  // namespace
}  // namespace sluice::capi

using namespace sluice;

sluice_status sluice_engine_plan(sluice_engine* engine, const sluice_plan_item* items, size_t item_count,
                                 const sluice_bucket* bucket, void* stream, uint64_t* forward) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    capi::require_pointer(forward, "forward");
    const std::vector<PlanItem> wanted = capi::items_of(items, item_count, of);
    *forward = of.plan(wanted, capi::bucket_of(bucket), capi::stream_of(*engine, stream)).forward;
  });
}

sluice_status sluice_engine_attend(sluice_engine* engine, const sluice_bucket* bucket, uint32_t layer,
                                   const sluice_tensor* q, const sluice_tensor* k, const sluice_tensor* v,
                                   const sluice_tensor* out, const sluice_tensor* lse, void* stream) {
  return sluice_engine_attend_rehearsed(engine, bucket, layer, q, k, v, nullptr, out, lse, stream);
}

sluice_status sluice_engine_attend_rehearsed(sluice_engine* engine, const sluice_bucket* bucket, uint32_t layer,
                                             const sluice_tensor* q, const sluice_tensor* k, const sluice_tensor* v,
                                             const sluice_tensor* rehearsed, const sluice_tensor* out,
                                             const sluice_tensor* lse, void* stream) {
  const sluice_attend_args args{.struct_size = sizeof args,
                                .layer = layer,
                                .q = q,
                                .k = k,
                                .v = v,
                                .out = out,
                                .lse = lse,
                                .rehearsed = rehearsed,
                                .scores = nullptr,
                                .stream = stream};
  return sluice_engine_attend_layer(engine, bucket, &args);
}

sluice_status sluice_engine_attend_layer(sluice_engine* engine, const sluice_bucket* bucket,
                                         const sluice_attend_args* args) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    const Bucket asked = capi::bucket_of(bucket);
    const capi::Place& place = engine->place;
    const sluice_attend_args given = capi::read_sized(args, "sluice_attend_args");
    const auto unless_null = [&](const sluice_tensor* tensor, const char* name) {
      return tensor == nullptr ? TensorView{} : capi::readable(tensor, name, place);
    };
    of.attend(asked, LayerId{given.layer},
              {.q = capi::readable(given.q, "q", place),
               .k = capi::readable(given.k, "k", place),
               .v = capi::values(given.v, of.options().shape.latent(), place),
               .out = capi::writable(given.out, "out", place),
               .lse = capi::log_sums(given.lse, asked.rows(), of.options().shape.q_heads, place),
               .stream = capi::stream_of(*engine, given.stream),
               .rehearsed = unless_null(given.rehearsed, "rehearsed"),
               .scores = unless_null(given.scores, "scores")});
  });
}

sluice_status sluice_engine_finish(sluice_engine* engine, uint64_t forward) {
  return capi::guarded([&] { capi::engine_of(engine).finish({.forward = forward}); });
}

sluice_status sluice_engine_cancel(sluice_engine* engine, uint64_t forward) {
  return capi::guarded([&] { capi::engine_of(engine).cancel({.forward = forward}); });
}
