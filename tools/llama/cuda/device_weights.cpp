#include "tools/llama/cuda/device_weights.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "tools/llama/bf16.hpp"
#include "tools/llama/cuda/check.hpp"
#include "tools/llama/random_weights.hpp"
#include "tools/llama/staging.hpp"

namespace sluice::tools::cuda {
namespace {

constexpr std::chrono::milliseconds kTimeout{60'000};

class Loader {
 public:
  Loader(const WeightSource& source, const WeightPlan& plan, Device& device)
      : source_(source),
        device_(device),
        stream_(device.create_stream("llama.weights")),
        staging_(device, *stream_, kTimeout),
        total_bytes_(plan.parameters * sizeof(Bf16)) {}

  [[nodiscard]] DeviceGain gain(const std::string& name, std::uint32_t count) {
    const std::vector<float> values = load_gain(source_, name, count);
    DeviceGain gain{copy(std::as_bytes(std::span(values)))};
    loaded(count * sizeof(Bf16));  // held wider, but by so little that the total leaves it out
    return gain;
  }

  [[nodiscard]] std::unique_ptr<Buffer> copy(std::span<const std::byte> bytes) {
    auto memory = device_.allocate(bytes.size());
    staging_.to_device(memory->data(), bytes.size(), [&](std::span<std::byte> piece, std::uint64_t offset) {
      std::memcpy(piece.data(), bytes.data() + offset, piece.size());
    });
    return memory;
  }

  [[nodiscard]] DeviceMatrix matrix(const MatrixPlan& plan) {
    DeviceMatrix matrix{.outs = plan.outs(), .inner = plan.inner, .memory = {}};
    matrix.memory = device_.allocate(std::uint64_t{matrix.outs} * matrix.inner * sizeof(Bf16));
    std::byte* to = matrix.memory->data();
    for (const MatrixPart& part : plan.parts) {
      const std::uint64_t count = std::uint64_t{part.outs} * plan.inner;
      if (source_.checkpoint != nullptr) {
        upload(find_part(*source_.checkpoint, part, plan.inner), to);
      } else {
        draw({.out = reinterpret_cast<Bf16*>(to),
              .count = count,
              .key = random_key(source_.seed, part.name),
              .deviation = plan.deviation},
             static_cast<cudaStream_t>(stream_->native_handle()));
      }
      to += count * sizeof(Bf16);
      loaded(count * sizeof(Bf16));
    }
    return matrix;
  }

  void finish() { stream_->synchronize(deadline_after(kTimeout)); }

 private:
  void loaded(std::uint64_t bytes) {
    done_bytes_ += bytes;
    if (source_.progress) source_.progress(done_bytes_, total_bytes_);
  }

  void upload(const StoredTensor& tensor, std::byte* to) {
    const std::uint64_t width = bytes_of(tensor.dtype);
    const std::uint64_t count = tensor.bytes / width;
    staging_.to_device(to, count * sizeof(Bf16), [&](std::span<std::byte> piece, std::uint64_t offset) {
      if (tensor.dtype == DType::bf16) return source_.checkpoint->read(tensor, offset, piece);
      const std::uint64_t elements = piece.size() / sizeof(Bf16);
      stored_.resize(elements * width);
      source_.checkpoint->read(tensor, offset / sizeof(Bf16) * width, stored_);
      wide_.resize(elements);
      to_float(tensor.dtype, stored_, wide_);
      std::transform(wide_.begin(), wide_.end(), reinterpret_cast<Bf16*>(piece.data()), to_bf16);
    });
  }

  const WeightSource& source_;
  Device& device_;
  std::unique_ptr<Stream> stream_;
  Staging staging_;
  std::uint64_t total_bytes_;
  std::uint64_t done_bytes_ = 0;
  std::vector<std::byte> stored_;
  std::vector<float> wide_;
};

}  // namespace

DeviceWeights load_device_weights(const WeightSource& source, const ModelConfig& config, Device& device) {
  const WeightPlan plan = plan_weights(config);
  if (source.checkpoint != nullptr) require_match(*source.checkpoint, plan);
  std::size_t free_bytes = 0;
  std::size_t all_bytes = 0;
  check(cudaMemGetInfo(&free_bytes, &all_bytes), "ask for the GPU's free memory");
  require_memory(plan.parameters * sizeof(Bf16), free_bytes, "the GPU has");
  Loader load(source, plan, device);
  DeviceWeights weights;
  load_planned(plan, config.hidden_size, load, weights);
  const std::vector<double> frequencies = rope_frequencies(config);
  weights.frequencies = load.copy(std::as_bytes(std::span(frequencies)));
  load.finish();
  weights.parameters = plan.parameters;
  return weights;
}

}  // namespace sluice::tools::cuda
