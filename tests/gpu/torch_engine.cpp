// An engine as torch_rig.py loads it: C functions that return 0, or 1 and leave a text.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "sluice/cuda.hpp"
#include "sluice/engine.hpp"
#include "sluice/step/page.hpp"

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
  std::uint32_t layers, q_heads, kv_heads, head_dim, rows, blocks, near_blocks, max_picks, in_flight, threads;
};

/// An engine whose threads that answer are as slow as they are told to be.
struct paced_engine {
  std::shared_ptr<std::atomic<std::uint32_t>> pause_us = std::make_shared<std::atomic<std::uint32_t>>(0);
  std::unique_ptr<Engine> engine;
};

const char* engine_error() { return last_error.c_str(); }

/// `policies`: a line for each that the engine is to serve beside those that it serves anyway.
int engine_new(const engine_sizes* sizes, const char* policies, std::uint32_t tokens, paced_engine** made) {
  return guarded([&] {
    const AttentionShape shape{
        .layers = sizes->layers, .q_heads = sizes->q_heads, .kv_heads = sizes->kv_heads, .head_dim = sizes->head_dim};
    EngineOptions options{.shape = shape, .largest = {.decode_rows = sizes->rows, .max_tokens = tokens}};
    const std::uint64_t block = PageLayout{.head_dim = shape.head_dim}.page_bytes() * shape.layers * shape.kv_heads;
    options.host_bytes = sizes->blocks * block;
    options.near_bytes = sizes->near_blocks * block;
    options.policies = {
        parse_policy("exact | int4 | top_k=" + std::to_string(sizes->max_picks) + " | near=0,sinks=4,recent=508")};
    options.in_flight = sizes->in_flight;
    options.threads = sizes->threads;
    options.answer_timeout = std::chrono::seconds(10);
    std::istringstream lines(policies);
    for (std::string line; std::getline(lines, line);) options.policies.push_back(parse_policy(line));
    auto paced = std::make_unique<paced_engine>();
    options.before_answer = [pause_us = paced->pause_us] {
      const std::uint32_t pause = pause_us->load();
      if (pause != 0) std::this_thread::sleep_for(std::chrono::microseconds(pause));
    };
    paced->engine = std::make_unique<Engine>(options, make_cuda_device({.link_rows = 0}));  // Threads are asked.
    *made = paced.release();
  });
}

void engine_delete(paced_engine* paced) { delete paced; }

/// Before each part of an answer from now on.
void engine_pause(paced_engine* paced, std::uint32_t us) { paced->pause_us->store(us); }

int engine_begin(paced_engine* paced, const char* policy, std::uint64_t* id) {
  return guarded([&] { *id = paced->engine->begin(parse_policy(policy)).value; });
}

int engine_import(paced_engine* paced, std::uint64_t id, std::uint32_t layer, std::uint32_t tokens, const void* k,
                  const void* v, void* stream) {
  return guarded([&] {
    const AttentionShape& shape = paced->engine->options().shape;
    paced->engine->import_prefix(SequenceId{id}, LayerId{layer}, view(k, tokens, shape.kv_heads, shape.head_dim),
                                 view(v, tokens, shape.kv_heads, shape.head_dim), stream);
  });
}

int engine_plan(paced_engine* paced, const std::uint64_t* ids, std::uint32_t count, void* stream,
                std::uint64_t* forward) {
  return guarded([&] {
    std::vector<PlanItem> items;
    for (std::uint32_t i = 0; i < count; ++i) items.push_back({.sequence = SequenceId{ids[i]}});
    *forward = paced->engine->plan(items, paced->engine->options().largest, stream).forward;
  });
}

int engine_attend(paced_engine* paced, std::uint32_t layer, const void* q, const void* k, const void* v, void* out,
                  void* stream) {
  return guarded([&] {
    const Bucket& bucket = paced->engine->options().largest;
    const AttentionShape& shape = paced->engine->options().shape;
    paced->engine->attend(
        bucket, LayerId{layer}, view(q, bucket.rows(), shape.q_heads, shape.head_dim),
        view(k, bucket.rows(), shape.kv_heads, shape.head_dim), view(v, bucket.rows(), shape.kv_heads, shape.head_dim),
        dense_view(static_cast<std::byte*>(out), DType::bf16, bucket.rows(), shape.q_heads, shape.head_dim), stream);
  });
}

int engine_finish(paced_engine* paced, std::uint64_t forward) {
  return guarded([&] { paced->engine->finish({.forward = forward}); });
}

std::uint64_t engine_asked(const paced_engine* paced) { return paced->engine->stats().asked; }
std::uint64_t engine_unplanned(const paced_engine* paced) { return paced->engine->stats().unplanned; }
std::uint64_t engine_promoted(const paced_engine* paced) { return paced->engine->stats().promoted; }
/// Keys that policies have read to choose on the CPU.
std::uint64_t engine_scored(const paced_engine* paced) { return paced->engine->stats().scored; }
/// Bytes of what a sequence's policy has learnt.
std::uint64_t engine_learnt(const paced_engine* paced, std::uint64_t id) {
  return paced->engine->memory(SequenceId{id}).policy;
}
}
