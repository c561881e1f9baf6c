#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "cpu/device/host_device.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"

namespace sluice::test {

/// An embedded device of its own, with streams as a GPU has them.
inline std::shared_ptr<cpu::HostDevice> own_device(const cpu::FaultOptions& faults = {},
                                                   Handover handover = Handover::device) {
  const cpu::Topology topology;
  auto workers = std::make_shared<cpu::Workers>(topology, cpu::WorkersOptions{.threads = 2, .pin = false});
  return std::make_shared<cpu::HostDevice>(std::move(workers),
                                           cpu::HostDeviceOptions{.faults = faults, .handover = handover});
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
