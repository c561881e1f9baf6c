#include "tools/llama/cuda/device_weights.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "tools/llama/bf16.hpp"
#include "tools/llama/random_weights.hpp"
#include "tools/llama/staging.hpp"

namespace sluice::tools::cuda {
namespace {

constexpr std::chrono::milliseconds kTimeout{60'000};

class Loader {
 public:
  Loader(const WeightSource& source, Device& device)
      : source_(source),
        device_(device),
        stream_(device.create_stream("llama.weights")),
        staging_(device, *stream_, kTimeout) {}

  [[nodiscard]] DeviceGain gain(const std::string& name, std::uint32_t count) {
    const std::vector<float> values = load_gain(source_, name, count);
    return {copy(std::as_bytes(std::span(values)))};
  }

  [[nodiscard]] std::unique_ptr<Buffer> copy(std::span<const std::byte> bytes) {
    auto memory = device_.allocate(bytes.size());
    staging_.to_device(memory->data(), bytes.size(), [&](std::span<std::byte> piece, std::uint64_t offset) {
      std::memcpy(piece.data(), bytes.data() + offset, piece.size());
    });
    return memory;
  }

  [[nodiscard]] DeviceMatrix matrix(const MatrixPlan& plan) {
    // Before memory is asked for: a lying config.json costs an error, no more.
    std::vector<const StoredTensor*> tensors;
    if (source_.checkpoint != nullptr) {
      for (const MatrixPart& part : plan.parts) tensors.push_back(&find_part(*source_.checkpoint, part, plan.inner));
    }
    DeviceMatrix matrix{.outs = plan.outs(), .inner = plan.inner, .memory = {}};
    matrix.memory = device_.allocate(std::uint64_t{matrix.outs} * matrix.inner * sizeof(Bf16));
    std::byte* to = matrix.memory->data();
    for (std::size_t i = 0; i < plan.parts.size(); ++i) {
      const std::uint64_t count = std::uint64_t{plan.parts[i].outs} * plan.inner;
      if (source_.checkpoint != nullptr) {
        upload(*tensors[i], to);
      } else {
        draw({.out = reinterpret_cast<Bf16*>(to),
              .count = count,
              .key = random_key(source_.seed, plan.parts[i].name),
              .deviation = plan.deviation},
             static_cast<cudaStream_t>(stream_->native_handle()));
      }
      to += count * sizeof(Bf16);
    }
    return matrix;
  }

  void finish() { stream_->synchronize(deadline_after(kTimeout)); }

 private:
  void upload(const StoredTensor& tensor, std::byte* to) {
    const std::uint64_t width = bytes_of(tensor.dtype);
    const std::uint64_t count = tensor.bytes.size() / width;
    staging_.to_device(to, count * sizeof(Bf16), [&](std::span<std::byte> piece, std::uint64_t offset) {
      const std::uint64_t elements = piece.size() / sizeof(Bf16);
      const auto stored = tensor.bytes.subspan(offset / sizeof(Bf16) * width, elements * width);
      if (tensor.dtype == DType::bf16) {
        std::memcpy(piece.data(), stored.data(), stored.size());
        return;
      }
      wide_.resize(elements);
      to_float({.dtype = tensor.dtype, .shape = {elements}, .bytes = stored}, wide_);
      auto* out = reinterpret_cast<Bf16*>(piece.data());
      std::transform(wide_.begin(), wide_.end(), out, to_bf16);
    });
  }

  const WeightSource& source_;
  Device& device_;
  std::unique_ptr<Stream> stream_;
  Staging staging_;
  std::vector<float> wide_;
};

}  // namespace

DeviceWeights load_device_weights(const WeightSource& source, const ModelConfig& config, Device& device) {
  const WeightPlan plan = plan_weights(config);
  const std::uint32_t hidden = config.hidden_size;
  Loader load(source, device);
  DeviceWeights weights;
  weights.embeddings = load.matrix(plan.embeddings);
  for (const LayerPlan& layer : plan.layers) {
    weights.layers.push_back({.attention_norm = load.gain(layer.attention_norm, hidden),
                              .qkv = load.matrix(layer.qkv),
                              .output = load.matrix(layer.output),
                              .mlp_norm = load.gain(layer.mlp_norm, hidden),
                              .gate_up = load.matrix(layer.gate_up),
                              .down = load.matrix(layer.down)});
  }
  weights.final_norm = load.gain(plan.final_norm, hidden);
  if (plan.own_head) weights.own_head = load.matrix(*plan.own_head);
  const std::vector<double> frequencies = rope_frequencies(config);
  weights.frequencies = load.copy(std::as_bytes(std::span(frequencies)));
  load.finish();
  weights.parameters = plan.parameters;
  return weights;
}

}  // namespace sluice::tools::cuda
