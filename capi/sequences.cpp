// Sequences of an engine.
#include "capi/engine.hpp"
#include "sluice/policy.hpp"

using namespace sluice;

sluice_status sluice_engine_begin(sluice_engine* engine, const char* policy, sluice_sequence* sequence) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    capi::require_pointer(policy, "policy");
    capi::require_pointer(sequence, "sequence");
    *sequence = of.begin(parse_policy(policy)).value;
  });
}

sluice_status sluice_engine_begin_prompt(sluice_engine* engine, const char* policy, const int32_t* ids,
                                         size_t id_count, uint64_t salt, sluice_sequence* sequence) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    capi::require_pointer(policy, "policy");
    if (id_count != 0) capi::require_pointer(ids, "ids");
    capi::require_pointer(sequence, "sequence");
    *sequence = of.begin(parse_policy(policy), {ids, id_count}, salt).value;
  });
}

sluice_status sluice_engine_match_prefix(const sluice_engine* engine, const char* policy, const int32_t* ids,
                                         size_t id_count, uint64_t salt, uint32_t* tokens) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_pointer(policy, "policy");
    if (id_count != 0) capi::require_pointer(ids, "ids");
    capi::require_pointer(tokens, "tokens");
    *tokens = of.match_prefix(parse_policy(policy), {ids, id_count}, salt);
  });
}

sluice_status sluice_engine_name_tokens(sluice_engine* engine, sluice_sequence sequence, uint32_t first,
                                        const int32_t* ids, size_t id_count) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    if (id_count != 0) capi::require_pointer(ids, "ids");
    of.name_tokens(SequenceId{sequence}, first, {ids, id_count});
  });
}

sluice_status sluice_engine_preempt(sluice_engine* engine, sluice_sequence sequence) {
  return capi::guarded([&] { capi::engine_of(engine).preempt(SequenceId{sequence}); });
}

sluice_status sluice_engine_fork(sluice_engine* engine, sluice_sequence sequence, uint32_t tokens, const char* policy,
                                 sluice_sequence* child) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    capi::require_pointer(child, "child");
    const SequenceId parent{sequence};
    *child = (policy == nullptr ? of.fork(parent, tokens) : of.fork(parent, tokens, parse_policy(policy))).value;
  });
}

sluice_status sluice_engine_truncate(sluice_engine* engine, sluice_sequence sequence, uint32_t tokens) {
  return capi::guarded([&] { capi::engine_of(engine).truncate(SequenceId{sequence}, tokens); });
}

sluice_status sluice_engine_import_prefix(sluice_engine* engine, sluice_sequence sequence, uint32_t layer,
                                          const sluice_tensor* k, const sluice_tensor* v, const sluice_tensor* q,
                                          void* stream) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    const auto view = [&](const sluice_tensor* tensor, const char* name) {
      return capi::readable(tensor, name, engine->place);
    };
    of.import_prefix(SequenceId{sequence}, LayerId{layer}, view(k, "k"),
                     capi::values(v, of.options().shape.latent(), engine->place), capi::stream_of(*engine, stream),
                     q == nullptr ? TensorView{} : view(q, "q"));
  });
}

sluice_status sluice_engine_end(sluice_engine* engine, sluice_sequence sequence) {
  return capi::guarded([&] { capi::engine_of(engine).end(SequenceId{sequence}); });
}

sluice_status sluice_engine_tokens(const sluice_engine* engine, sluice_sequence sequence, uint32_t* tokens) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_pointer(tokens, "tokens");
    *tokens = of.tokens(SequenceId{sequence});
  });
}

sluice_status sluice_engine_far_bytes(const sluice_engine* engine, sluice_sequence sequence, uint64_t* bytes) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_pointer(bytes, "bytes");
    *bytes = of.far_bytes(SequenceId{sequence});
  });
}

sluice_status sluice_engine_can_admit(const sluice_engine* engine, uint32_t tokens, int* admitted) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_pointer(admitted, "admitted");
    *admitted = of.can_admit(tokens) ? 1 : 0;
  });
}

sluice_status sluice_engine_can_admit_policy(const sluice_engine* engine, const char* policy, uint32_t tokens,
                                             int* admitted) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_pointer(policy, "policy");
    capi::require_pointer(admitted, "admitted");
    *admitted = of.can_admit(tokens, parse_policy(policy)) ? 1 : 0;
  });
}

sluice_status sluice_engine_watch(sluice_engine* engine, sluice_sequence sequence, const uint32_t* tokens,
                                  size_t count) {
  return capi::guarded([&] {
    Engine& of = capi::engine_of(engine);
    if (count != 0) capi::require_pointer(tokens, "tokens");
    of.watch(SequenceId{sequence}, {tokens, count});
  });
}
