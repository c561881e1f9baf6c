#include "tests/support/engine_rig.hpp"

#include <algorithm>
#include <cstdlib>

#include "tests/support/reference.hpp"

namespace sluice::test {

Handover handover_or(Handover usual) {
  const char* const name = std::getenv("SLUICE_TEST_HANDOVER");
  return name == nullptr ? usual : parse_handover(name);
}

DType kv_dtype_or(DType usual) {
  const char* const name = std::getenv("SLUICE_TEST_KV_DTYPE");
  if (name == nullptr) return usual;
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3}) {
    if (std::string(to_string(type)) == name) return type;
  }
  throw Error(Errc::invalid_argument, std::string("SLUICE_TEST_KV_DTYPE is '") + name + "', which is no element type");
}

double difference(std::span<const float> a, std::span<const float> b) { return max_abs_diff(a, b); }
double difference(std::span<const float> a, std::span<const double> b) { return max_abs_diff(a, b); }

ForwardTensors::ForwardTensors(Device& device, const AttentionShape& shape, std::uint32_t rows)
    : shape_(shape),
      rows_(rows),
      q_floats_(std::uint64_t{rows} * shape.q_heads * shape.head_dim),
      kv_floats_(std::uint64_t{rows} * shape.kv_heads * shape.head_dim),
      lse_floats_(std::uint64_t{rows} * shape.q_heads),
      buffer_(device.allocate_pinned((2 * q_floats_ + 2 * kv_floats_ + lse_floats_) * shape.layers * sizeof(float))) {}

ForwardTensors::Parts ForwardTensors::parts(std::uint32_t layer) const {
  Parts parts{};
  parts.q = reinterpret_cast<float*>(buffer_->data()) + layer * (2 * q_floats_ + 2 * kv_floats_ + lse_floats_);
  parts.k = parts.q + q_floats_;
  parts.v = parts.k + kv_floats_;
  parts.out = parts.v + kv_floats_;
  parts.lse = parts.out + q_floats_;
  return parts;
}

void ForwardTensors::set(std::uint32_t row, const Story& story, std::uint32_t token) {
  const std::uint64_t q = std::uint64_t{shape_.q_heads} * shape_.head_dim;
  const std::uint64_t kv = std::uint64_t{shape_.kv_heads} * shape_.head_dim;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const Parts at = parts(layer);
    std::copy_n(story.q(layer, token), q, at.q + row * q);
    std::copy_n(story.k(layer, token), kv, at.k + row * kv);
    std::copy_n(story.v(layer, token), kv, at.v + row * kv);
  }
}

void ForwardTensors::attend(Engine& engine, const Bucket& bucket, void* stream) {
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) attend_layer(engine, bucket, layer, stream);
}

void ForwardTensors::attend_layer(Engine& engine, const Bucket& bucket, std::uint32_t layer, void* stream) {
  const Parts at = parts(layer);
  const auto in = [&](const float* data, std::uint32_t heads) {
    return dense_view(data, DType::f32, bucket.rows(), heads, shape_.head_dim);
  };
  const bool rehearses = bucket.rehearsed && layer != 0;
  engine.attend(bucket, LayerId{layer},
                {.q = in(at.q, shape_.q_heads),
                 .k = in(at.k, shape_.kv_heads),
                 .v = in(at.v, shape_.kv_heads),
                 .out = dense_view(at.out, DType::f32, bucket.rows(), shape_.q_heads, shape_.head_dim),
                 .lse = at.lse,
                 .stream = stream,
                 .rehearsed = rehearses ? in(parts(layer - 1).q, shape_.q_heads) : TensorView{},
                 .scores = scores_.empty() ? TensorView{} : scores_[layer]});
}

std::vector<float> ForwardTensors::out(std::uint32_t row) const {
  const std::uint64_t q = std::uint64_t{shape_.q_heads} * shape_.head_dim;
  std::vector<float> all;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const float* const out = parts(layer).out + row * q;
    all.insert(all.end(), out, out + q);
  }
  return all;
}

std::vector<float> ForwardTensors::lse(std::uint32_t row) const {
  std::vector<float> all;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const float* const lse = parts(layer).lse + row * shape_.q_heads;
    all.insert(all.end(), lse, lse + shape_.q_heads);
  }
  return all;
}

void ForwardTensors::spoil() {
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    std::fill_n(parts(layer).out, q_floats_, 1e30f);
    std::fill_n(parts(layer).lse, lse_floats_, 1e30f);
  }
}

void import_story(Engine& engine, const EngineRig& rig, Teller& teller, std::uint32_t tokens, std::uint32_t rows,
                  std::uint32_t first_query) {
  const AttentionShape& shape = engine.options().shape;
  const std::uint64_t row = std::uint64_t{shape.kv_heads} * shape.head_dim;
  const std::uint64_t q_row = std::uint64_t{shape.q_heads} * shape.head_dim;
  while (teller.at < tokens) {
    const std::uint32_t count = std::min({tokens - teller.at, rows, engine.options().import_rows});
    const std::uint32_t queries = teller.at + count - std::clamp(first_query, teller.at, teller.at + count);
    const std::uint64_t floats = 2 * count * row + queries * q_row;
    const auto buffer = rig.device->allocate_pinned(shape.layers * floats * sizeof(float));
    auto* at = reinterpret_cast<float*>(buffer->data());
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer, at += floats) {
      std::copy_n(teller.story->k(layer, teller.at), count * row, at);
      std::copy_n(teller.story->v(layer, teller.at), count * row, at + count * row);
      if (queries != 0)
        std::copy_n(teller.story->q(layer, teller.at + count - queries), queries * q_row, at + 2 * count * row);
      const auto view = [&](const float* data, std::uint32_t of, std::uint32_t heads) {
        return dense_view(data, DType::f32, of, heads, shape.head_dim);
      };
      engine.import_prefix(teller.id, LayerId{layer}, view(at, count, shape.kv_heads),
                           view(at + count * row, count, shape.kv_heads), rig.stream,
                           view(at + 2 * count * row, queries, shape.q_heads));
    }
    teller.at += count;
  }
}

std::vector<PlanItem> one_each(std::span<const SequenceId> ids) {
  std::vector<PlanItem> items;
  for (const SequenceId id : ids) items.push_back({.sequence = id});
  return items;
}

Batch run_batch(Engine& engine, const EngineRig& rig, ForwardTensors& tensors, std::span<const PlanItem> items,
                const Bucket& bucket) {
  tensors.spoil();
  const Batch batch = engine.plan(items, bucket, rig.stream);
  tensors.attend(engine, bucket, rig.stream);
  engine.finish(batch);
  rig.synchronize();
  return batch;
}

std::vector<std::vector<float>> run_forward(Engine& engine, const EngineRig& rig, ForwardTensors& tensors,
                                            std::vector<Teller*> tellers) {
  std::vector<SequenceId> ids;
  for (std::uint32_t row = 0; row < tellers.size(); ++row) {
    tensors.set(row, *tellers[row]->story, tellers[row]->at);
    ids.push_back(tellers[row]->id);
  }
  (void)run_batch(engine, rig, tensors, one_each(ids), engine.options().largest);
  std::vector<std::vector<float>> out;
  for (std::uint32_t row = 0; row < tellers.size(); ++row) {
    ++tellers[row]->at;
    out.push_back(tensors.out(row));
  }
  return out;
}

}  // namespace sluice::test
