/* Embeds the engine from C as a serving stack would: a prompt in chunks beside a sequence that decodes, drafts
 * verified. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "sluice.h"

enum { LAYERS = 2, Q_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64, MOST_ROWS = 260 };

/* The text names cause and remedy. */
static void check(sluice_status status) {
  if (status == SLUICE_OK) return;
  fprintf(stderr, "%s: %s\n", sluice_status_name(status), sluice_last_error());
  exit(1);
}

/* A model computes q, k and v; here they are random. */
static float* random_rows(int heads) {
  static uint64_t state = 7;
  const size_t count = (size_t)MOST_ROWS * (size_t)heads * HEAD_DIM;
  float* const data = malloc(count * sizeof *data);
  if (data == NULL) exit(1);
  for (size_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    data[i] = (float)(state >> 40) / (float)(1 << 22) - 2.f;
  }
  return data;
}

/* [rows, heads, HEAD_DIM] of f32, compact. `shape` lives as long as the tensor. */
static sluice_tensor tensor_of(float* data, int64_t shape[3]) {
  sluice_tensor tensor = {0};
  tensor.data = data;
  tensor.device.device_type = SLUICE_DEVICE_CPU;
  tensor.ndim = 3;
  tensor.dtype.code = SLUICE_TYPE_FLOAT;
  tensor.dtype.bits = 32;
  tensor.dtype.lanes = 1;
  tensor.shape = shape;
  return tensor;
}

typedef struct model {
  sluice_engine* engine;
  float *q, *k, *v, *out;
} model;

/* One forward: planned once, attended layer by layer. On a GPU, capture the loop once per bucket and replay it. */
static void forward(const model* m, const sluice_plan_item* items, size_t count, const sluice_bucket* bucket) {
  const int64_t rows = (int64_t)bucket->decode_rows + bucket->prefill_rows;
  int64_t q_shape[3] = {rows, Q_HEADS, HEAD_DIM}, kv_shape[3] = {rows, KV_HEADS, HEAD_DIM};
  const sluice_tensor q = tensor_of(m->q, q_shape), k = tensor_of(m->k, kv_shape), v = tensor_of(m->v, kv_shape),
                      out = tensor_of(m->out, q_shape);
  uint64_t number = 0;
  check(sluice_engine_plan(m->engine, items, count, bucket, NULL, &number));
  for (uint32_t layer = 0; layer < LAYERS; ++layer)
    check(sluice_engine_attend(m->engine, bucket, layer, &q, &k, &v, &out, NULL, NULL));
  check(sluice_engine_finish(m->engine, number)); /* Its sequences have their new tokens; or none has, see sluice.h. */
}

static sluice_plan_item new_tokens(sluice_sequence sequence, uint32_t tokens, uint32_t prefill) {
  sluice_plan_item item = {sizeof item, tokens, sequence, prefill, 0};
  return item;
}

static void report(const sluice_engine* engine, const sluice_sequence sequences[3]) {
  uint32_t tokens[3];
  sluice_memory memory = {.struct_size = sizeof memory};
  for (int i = 0; i < 3; ++i) check(sluice_engine_tokens(engine, sequences[i], &tokens[i]));
  check(sluice_engine_memory(engine, &memory));
  printf("a has %" PRIu32 " tokens, b %" PRIu32 ", c %" PRIu32 "; %.1f of %.1f MiB in use\n", tokens[0], tokens[1],
         tokens[2], (double)memory.far_pages_used / (1 << 20), (double)memory.far_pages / (1 << 20));
}

static sluice_engine* create(const char* policy) {
  sluice_engine* engine = NULL;
  sluice_engine_options options;
  check(sluice_engine_options_init(&options, sizeof options)); /* The host device: no GPU needed. */
  options.layers = LAYERS;
  options.q_heads = Q_HEADS;
  options.kv_heads = KV_HEADS;
  options.head_dim = HEAD_DIM;
  options.host_bytes = 64u << 20;
  options.near_bytes = 4u << 20;
  options.largest_decode_rows = 4;
  options.largest_prefill_rows = 256;
  options.largest_prefills = 1;
  options.largest_max_tokens = 2048;
  options.policies = &policy; /* What sequences will be begun with. */
  options.policy_count = 1;
  check(sluice_engine_create(&options, &engine));
  return engine;
}

int main(void) {
  const char* const policy = "exact | int4 | top_p=0.95 | near=0";
  const model m = {create(policy), random_rows(Q_HEADS), random_rows(KV_HEADS), random_rows(KV_HEADS),
                   random_rows(Q_HEADS)};
  const sluice_bucket mixed = {sizeof mixed, 1, 256, 1, 0, SLUICE_BUCKET_UNBOUNDED, 1};
  const sluice_bucket decode = {sizeof decode, 4, 0, 0, 0, SLUICE_BUCKET_UNBOUNDED, 1};
  sluice_sequence s[3];
  check(sluice_engine_begin(m.engine, policy, &s[0]));
  check(sluice_engine_begin(m.engine, policy, &s[1]));
  const sluice_plan_item prompt = new_tokens(s[0], 256, 1);
  forward(&m, &prompt, 1, &mixed);
  for (int chunk = 0; chunk < 4; ++chunk) { /* The prompt of b, while a decodes. */
    const sluice_plan_item items[2] = {new_tokens(s[0], 1, 0), new_tokens(s[1], 256, 1)};
    forward(&m, items, 2, &mixed);
  }
  check(sluice_engine_fork(m.engine, s[1], 1000, NULL, &s[2])); /* Another answer to most of b's prompt. */
  const sluice_plan_item items[3] = {new_tokens(s[0], 1, 0), new_tokens(s[2], 1, 0), new_tokens(s[1], 2, 0)};
  forward(&m, items, 3, &decode);
  check(sluice_engine_truncate(m.engine, s[1], 1025)); /* The second draft was not accepted. */

  report(m.engine, s);
  sluice_engine_destroy(m.engine);
  free(m.q), free(m.k), free(m.v), free(m.out);
  return 0;
}
