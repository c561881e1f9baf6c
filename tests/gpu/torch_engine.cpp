// An engine as torch_engine_test.py loads it: C functions that return 0, or 1 and leave a text.
#include <cstring>
#include <exception>
#include <string>

#include "sluice/cuda.hpp"
#include "sluice/engine.hpp"

using namespace sluice;

namespace {

thread_local std::string last_error;

template <class Call>
int guarded(const Call& call) noexcept {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

TensorView view(const void* data, std::uint32_t tokens, std::uint32_t heads, std::uint32_t head_dim) {
  return dense_view(static_cast<const std::byte*>(data), DType::bf16, tokens, heads, head_dim);
}

}  // namespace

extern "C" {

struct engine_sizes {
  std::uint32_t layers, q_heads, kv_heads, head_dim, rows, blocks, near_blocks, max_picks;
};

const char* engine_error() { return last_error.c_str(); }

int engine_new(const engine_sizes* sizes, Engine** engine) {
  return guarded([&] {
    const AttentionShape shape{
        .layers = sizes->layers, .q_heads = sizes->q_heads, .kv_heads = sizes->kv_heads, .head_dim = sizes->head_dim};
    EngineOptions options{.shape = shape, .largest = {.decode_rows = sizes->rows}};
    const std::uint64_t block = PageLayout{.head_dim = shape.head_dim}.page_bytes() * shape.layers * shape.kv_heads;
    options.host_bytes = sizes->blocks * block;
    options.near_bytes = sizes->near_blocks * block;
    options.max_picks = sizes->max_picks;
    *engine = new Engine(options, make_cuda_device());
  });
}

void engine_delete(Engine* engine) { delete engine; }

int engine_begin(Engine* engine, const char* policy, std::uint64_t* id) {
  return guarded([&] { *id = engine->begin(parse_policy(policy)).value; });
}

int engine_import(Engine* engine, std::uint64_t id, std::uint32_t layer, std::uint32_t tokens, const void* k,
                  const void* v, void* stream) {
  return guarded([&] {
    const AttentionShape& shape = engine->options().shape;
    engine->import_prefix(SequenceId{id}, LayerId{layer}, view(k, tokens, shape.kv_heads, shape.head_dim),
                          view(v, tokens, shape.kv_heads, shape.head_dim), stream);
  });
}

int engine_plan(Engine* engine, const std::uint64_t* ids, std::uint32_t count, void* stream, std::uint64_t* forward) {
  return guarded([&] {
    std::vector<PlanItem> items;
    for (std::uint32_t i = 0; i < count; ++i) items.push_back({.sequence = SequenceId{ids[i]}});
    *forward = engine->plan(items, engine->options().largest, stream).forward;
  });
}

int engine_attend(Engine* engine, std::uint32_t layer, const void* q, const void* k, const void* v, void* out,
                  void* stream) {
  return guarded([&] {
    const Bucket& bucket = engine->options().largest;
    const AttentionShape& shape = engine->options().shape;
    engine->attend(
        bucket, LayerId{layer}, view(q, bucket.rows(), shape.q_heads, shape.head_dim),
        view(k, bucket.rows(), shape.kv_heads, shape.head_dim), view(v, bucket.rows(), shape.kv_heads, shape.head_dim),
        dense_view(static_cast<std::byte*>(out), DType::bf16, bucket.rows(), shape.q_heads, shape.head_dim), stream);
  });
}

int engine_finish(Engine* engine, std::uint64_t forward) {
  return guarded([&] { engine->finish({.forward = forward}); });
}

std::uint64_t engine_asked(const Engine* engine) { return engine->stats().asked; }
std::uint64_t engine_unplanned(const Engine* engine) { return engine->stats().unplanned; }
}
