#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "cpu/host_device.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "sluice/runtime.hpp"

namespace sluice::test {

/// How a test drives a runtime.
enum class Drive {
  waiting,  ///< host and device share memory, every call waits for its result
  queued,   ///< the device has memory of its own and calls return once they are queued, as with a GPU
};

inline const char* to_string(Drive drive) { return drive == Drive::waiting ? "waiting" : "queued"; }

/// An embedded device whose memory the host's verbs may not touch.
inline std::shared_ptr<cpu::HostDevice> separate_device(const cpu::Misbehaviour& misbehaviour = {}) {
  const cpu::Topology topology;
  auto workers = std::make_shared<cpu::Workers>(topology, cpu::WorkersOptions{.threads = 2, .pin = false});
  return std::make_shared<cpu::HostDevice>(
      std::move(workers), cpu::HostDeviceOptions{.separate_memory = true, .misbehaviour = misbehaviour});
}

/// The device of a drive; null: the runtime's own.
inline std::shared_ptr<cpu::HostDevice> device_of(Drive drive, const cpu::Misbehaviour& misbehaviour = {}) {
  return drive == Drive::waiting ? nullptr : separate_device(misbehaviour);
}

/// Queries, keys and values of a model that exists only as numbers: every layer, position and head is drawn
/// from a seed, with a few keys that stand out, so that attention is neither flat nor trivial.
class Toy {
 public:
  Toy(AttentionShape shape, std::uint32_t tokens, std::uint32_t seed) : shape_(shape), tokens_(tokens) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const auto draw = [&](std::size_t count) {
      std::vector<float> values(count);
      for (float& value : values) value = normal(rng);
      return values;
    };
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      q_.push_back(draw(std::size_t{tokens} * shape.q_heads * shape.head_dim));
      k_.push_back(draw(std::size_t{tokens} * shape.kv_heads * shape.head_dim));
      v_.push_back(draw(std::size_t{tokens} * shape.kv_heads * shape.head_dim));
      for (std::uint32_t token = 0; token < tokens; token += 37) {
        for (std::uint32_t c = 0; c < shape.kv_heads * shape.head_dim; ++c) {
          k_.back()[std::size_t{token} * shape.kv_heads * shape.head_dim + c] *= 3.f;
        }
      }
    }
  }

  [[nodiscard]] const AttentionShape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint32_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] TensorView q(std::uint32_t layer, std::uint32_t token, std::uint32_t count) const {
    return view(q_[layer], token, count, shape_.q_heads);
  }
  [[nodiscard]] TensorView k(std::uint32_t layer, std::uint32_t token, std::uint32_t count) const {
    return view(k_[layer], token, count, shape_.kv_heads);
  }
  [[nodiscard]] TensorView v(std::uint32_t layer, std::uint32_t token, std::uint32_t count) const {
    return view(v_[layer], token, count, shape_.kv_heads);
  }

  /// Dense attention of position `token` in float64, over the first token + 1 keys: [q_heads, head_dim].
  [[nodiscard]] std::vector<double> dense(std::uint32_t layer, std::uint32_t token) const {
    const std::uint32_t d = shape_.head_dim;
    std::vector<double> out(std::size_t{shape_.q_heads} * d, 0.0);
    std::vector<double> weight(token + 1);
    for (std::uint32_t head = 0; head < shape_.q_heads; ++head) {
      const std::uint32_t kv = head / shape_.group();
      double top = -INFINITY;
      for (std::uint32_t j = 0; j <= token; ++j) {
        double dot = 0.0;
        for (std::uint32_t c = 0; c < d; ++c) {
          dot += double{q_[layer][(std::size_t{token} * shape_.q_heads + head) * d + c]} *
                 k_[layer][(std::size_t{j} * shape_.kv_heads + kv) * d + c];
        }
        weight[j] = dot / std::sqrt(double{static_cast<double>(d)});
        top = std::max(top, weight[j]);
      }
      double sum = 0.0;
      for (double& w : weight) sum += w = std::exp(w - top);
      for (std::uint32_t j = 0; j <= token; ++j) {
        for (std::uint32_t c = 0; c < d; ++c) {
          out[std::size_t{head} * d + c] += weight[j] / sum * v_[layer][(std::size_t{j} * shape_.kv_heads + kv) * d + c];
        }
      }
    }
    return out;
  }

 private:
  [[nodiscard]] TensorView view(const std::vector<float>& values, std::uint32_t token, std::uint32_t count,
                                std::uint32_t heads) const {
    return dense_view(values.data() + std::size_t{token} * heads * shape_.head_dim, DType::f32, count, heads,
                      shape_.head_dim);
  }

  AttentionShape shape_;
  std::uint32_t tokens_;
  std::vector<std::vector<float>> q_, k_, v_;  // [layers][tokens, heads, head_dim]
};

/// A runtime small enough to build thousands of times.
inline RuntimeOptions toy_options(const AttentionShape& shape, std::uint32_t tokens) {
  RuntimeOptions options;
  options.shape = shape;
  options.page_tokens = 16;
  options.kv_dtype = DType::f32;
  options.prefill_chunk = 64;
  options.threads = 2;
  options.pin_threads = false;
  const std::uint64_t pages = div_up(tokens, options.page_tokens) + 1;
  options.host_bytes = pages * shape.layers * shape.kv_heads * options.layout().page_bytes();
  options.near_bytes = options.host_bytes;
  return options;
}

/// Prefills tokens [at, end) in chunks, layer by layer; returns the last layer's outputs of all of them.
inline std::vector<float> prefill_range(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t at,
                                        std::uint32_t end, std::uint32_t chunk, Drive drive = Drive::waiting) {
  const AttentionShape& shape = toy.shape();
  const std::size_t row = std::size_t{shape.q_heads} * shape.head_dim;
  std::vector<std::vector<float>> out(shape.layers, std::vector<float>((end - at) * row));
  for (std::uint32_t first = at; first < end; first += chunk) {
    const std::uint32_t count = std::min(chunk, end - first);
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      runtime.prefill({.sequence = id,
                       .layer = LayerId{layer},
                       .q = toy.q(layer, first, count),
                       .k = toy.k(layer, first, count),
                       .v = toy.v(layer, first, count),
                       .out = dense_view(out[layer].data() + (first - at) * row, DType::f32, count, shape.q_heads,
                                         shape.head_dim),
                       .ordered = drive == Drive::queued});
    }
  }
  if (drive == Drive::queued) runtime.synchronize();
  return std::move(out.back());
}

inline std::vector<float> prefill(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t prompt,
                                  std::uint32_t chunk, Drive drive = Drive::waiting) {
  return prefill_range(runtime, id, toy, 0, prompt, chunk, drive);
}

/// One decode step of one sequence through all layers, into `out` [layers, q_heads, head_dim]. A queued step's output
/// is there after Runtime::synchronize.
inline void step_into(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t token, float* out, Drive drive) {
  const AttentionShape& shape = toy.shape();
  const std::size_t size = std::size_t{shape.q_heads} * shape.head_dim;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    runtime.step({.layer = LayerId{layer},
                  .sequences = {&id, 1},
                  .q = toy.q(layer, token, 1),
                  .k = toy.k(layer, token, 1),
                  .v = toy.v(layer, token, 1),
                  .out = dense_view(out + layer * size, DType::f32, 1, shape.q_heads, shape.head_dim),
                  .ordered = drive == Drive::queued});
  }
}

inline std::vector<float> step(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t token) {
  std::vector<float> out(std::size_t{toy.shape().layers} * toy.shape().q_heads * toy.shape().head_dim);
  step_into(runtime, id, toy, token, out.data(), Drive::waiting);
  return out;
}

/// Decode of all tokens from `prompt` on; outputs of all steps. Queued steps are waited for at the very end.
inline std::vector<float> decode_rest(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t prompt,
                                      Drive drive = Drive::waiting) {
  const std::size_t size = std::size_t{toy.shape().layers} * toy.shape().q_heads * toy.shape().head_dim;
  std::vector<float> all((toy.tokens() - prompt) * size);
  for (std::uint32_t token = prompt; token < toy.tokens(); ++token) {
    step_into(runtime, id, toy, token, all.data() + (token - prompt) * size, drive);
  }
  if (drive == Drive::queued) runtime.synchronize();
  return all;
}

/// Prefill of `prompt` tokens, then decode of the rest; outputs of all steps.
inline std::vector<float> decode(Runtime& runtime, SequenceId id, const Toy& toy, std::uint32_t prompt,
                                 Drive drive = Drive::waiting) {
  prefill(runtime, id, toy, prompt, 64, drive);
  return decode_rest(runtime, id, toy, prompt, drive);
}

/// Largest difference between decoded outputs and dense attention in float64.
inline double worst_error(const std::vector<float>& decoded, const Toy& toy, std::uint32_t prompt) {
  const AttentionShape& shape = toy.shape();
  const std::size_t size = std::size_t{shape.q_heads} * shape.head_dim;
  double worst = 0.0;
  std::size_t at = 0;
  for (std::uint32_t token = prompt; token < toy.tokens(); ++token) {
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      const std::vector<double> want = toy.dense(layer, token);
      for (std::size_t i = 0; i < size; ++i, ++at) {
        const double error = std::abs(want[i] - decoded[at]);
        worst = error <= worst ? worst : error;  // NaN is worse than anything.
      }
    }
  }
  return worst;
}

inline double worst_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double error = std::abs(double{a[i]} - b[i]);
    worst = error <= worst ? worst : error;
  }
  return worst;
}

}  // namespace sluice::test
