#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sluice/runtime.hpp"
#include "tests/support/catch.hpp"

/// What the tests of the runtime on a GPU share.
namespace sluice::test {

/// A model that exists only as numbers, in pinned memory, which both kinds of device read.
class PinnedModel {
 public:
  PinnedModel(Device& device, const AttentionShape& shape, std::uint32_t tokens, std::uint32_t seed)
      : shape_(shape),
        tokens_(tokens),
        q_(device.allocate_pinned(bytes(shape.q_heads))),
        k_(device.allocate_pinned(bytes(shape.kv_heads))),
        v_(device.allocate_pinned(bytes(shape.kv_heads))),
        out_(device.allocate_pinned(bytes(shape.q_heads) + 64)) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (const auto* buffer : {&q_, &k_, &v_}) {
      auto* values = reinterpret_cast<float*>((*buffer)->data());
      // Rounded to bf16 as the cache will hold them, so that both devices start from the same numbers.
      for (std::size_t i = 0; i < (*buffer)->bytes() / sizeof(float); ++i) {
        std::uint32_t bits = 0;
        const float value = normal(rng);
        std::memcpy(&bits, &value, sizeof bits);
        bits &= 0xffff0000u;
        std::memcpy(&values[i], &bits, sizeof bits);
      }
    }
    auto* k = reinterpret_cast<float*>(k_->data());
    const std::size_t row = std::size_t{shape.kv_heads} * shape.head_dim;
    for (std::uint32_t token = 0; token < shape.layers * tokens; token += 37) {
      for (std::size_t c = 0; c < row; ++c) k[token * row + c] *= 4.f;
    }
  }
  [[nodiscard]] TensorView q(std::uint32_t layer, std::uint32_t token, std::uint32_t count) const {
    return view(q_, layer, token, count, shape_.q_heads);
  }
  [[nodiscard]] TensorView k(std::uint32_t layer, std::uint32_t token, std::uint32_t count) const {
    return view(k_, layer, token, count, shape_.kv_heads);
  }
  [[nodiscard]] TensorView v(std::uint32_t layer, std::uint32_t token, std::uint32_t count) const {
    return view(v_, layer, token, count, shape_.kv_heads);
  }
  [[nodiscard]] MutableTensorView out(std::uint32_t count) const {
    return dense_view<std::byte>(out_->data(), DType::f32, count, shape_.q_heads, shape_.head_dim);
  }
  [[nodiscard]] std::vector<float> written(std::uint32_t count) const {
    const auto* from = reinterpret_cast<const float*>(out_->data());
    return {from, from + std::size_t{count} * shape_.q_heads * shape_.head_dim};
  }
  [[nodiscard]] const AttentionShape& shape() const noexcept { return shape_; }

 private:
  [[nodiscard]] std::uint64_t bytes(std::uint32_t heads) const {
    return std::uint64_t{shape_.layers} * tokens_ * heads * shape_.head_dim * sizeof(float);
  }
  [[nodiscard]] TensorView view(const std::unique_ptr<Buffer>& buffer, std::uint32_t layer, std::uint32_t token,
                                std::uint32_t count, std::uint32_t heads) const {
    const std::uint64_t row = std::uint64_t{heads} * shape_.head_dim * sizeof(float);
    return dense_view<const std::byte>(buffer->data() + (std::uint64_t{layer} * tokens_ + token) * row, DType::f32,
                                       count, heads, shape_.head_dim);
  }
  AttentionShape shape_;
  std::uint32_t tokens_;
  std::unique_ptr<Buffer> q_, k_, v_, out_;
};

inline RuntimeOptions options_for(const AttentionShape& shape, std::uint32_t tokens, PlacementMode placement) {
  RuntimeOptions options;
  options.shape = shape;
  options.placement = placement;
  options.prefill_chunk = 128;
  options.threads = 4;
  options.pin_threads = false;
  options.timeout = std::chrono::seconds(20);
  const std::uint64_t pages = div_up(tokens, options.page_tokens) + 1;
  options.host_bytes = pages * shape.layers * shape.kv_heads * options.layout().page_bytes();
  options.near_bytes = options.host_bytes;
  return options;
}

inline void prompt(Runtime& runtime, SequenceId id, const PinnedModel& model, std::uint32_t tokens) {
  const std::uint32_t chunk = runtime.options().prefill_chunk;
  for (std::uint32_t at = 0; at < tokens; at += chunk) {
    const std::uint32_t count = std::min(chunk, tokens - at);
    for (std::uint32_t l = 0; l < model.shape().layers; ++l) {
      runtime.prefill({.sequence = id,
                       .layer = LayerId{l},
                       .q = model.q(l, at, count),
                       .k = model.k(l, at, count),
                       .v = model.v(l, at, count),
                       .out = model.out(count)});
    }
  }
}

/// Outputs of the last layer, step by step.
inline std::vector<float> decode(Runtime& runtime, SequenceId id, const PinnedModel& model, std::uint32_t first,
                                 std::uint32_t steps) {
  std::vector<float> outs;
  for (std::uint32_t token = first; token < first + steps; ++token) {
    for (std::uint32_t l = 0; l < model.shape().layers; ++l) {
      runtime.step({.layer = LayerId{l},
                    .sequences = std::span(&id, 1),
                    .q = model.q(l, token, 1),
                    .k = model.k(l, token, 1),
                    .v = model.v(l, token, 1),
                    .out = model.out(1)});
    }
    const std::vector<float> out = model.written(1);
    outs.insert(outs.end(), out.begin(), out.end());
  }
  return outs;
}

inline std::vector<float> generate(std::shared_ptr<Device> device, const PinnedModel& model, const std::string& policy,
                                   RuntimeOptions options, std::uint32_t tokens, std::uint32_t steps) {
  Runtime runtime(options, std::move(device));
  const std::uint32_t all = runtime.info().host_pages_free;
  const SequenceId id = runtime.begin(parse_policy(policy));
  prompt(runtime, id, model, tokens);
  std::vector<float> outs = decode(runtime, id, model, tokens, steps);
  runtime.end(id);
  REQUIRE(runtime.info().host_pages_free == all);
  REQUIRE(runtime.info().near_slots_free == runtime.info().near_slots);
  return outs;
}

inline double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / size);
}

}  // namespace sluice::test
