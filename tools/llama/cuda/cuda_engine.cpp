#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "sluice/error.hpp"
#include "tools/llama/cuda/check.hpp"
#include "tools/llama/cuda/cublas_lt.hpp"
#include "tools/llama/cuda/cuda_activations.hpp"
#include "tools/llama/cuda/device_weights.hpp"
#include "tools/llama/cuda/kernels.hpp"
#include "tools/llama/engine.hpp"

namespace sluice::tools {
namespace {

using namespace cuda;

/// Kernels move eight values at a time, and start at row boundaries.
const ModelConfig& require_widths(const ModelConfig& config) {
  const std::pair<const char*, std::uint32_t> widths[] = {
      {"hidden_size", config.hidden_size},
      {"intermediate_size", config.intermediate_size},
      {"num_attention_heads * head_dim", config.num_attention_heads * config.head_dim}};
  for (const auto& [name, width] : widths) {
    if (width % 8 != 0) {
      throw Error(Errc::unsupported, std::string(name) + " is " + std::to_string(width) +
                                         "; on the GPU it must be a multiple of 8: run this model on the CPU");
    }
  }
  return config;
}

cudaStream_t native(Stream& stream) {
  void* handle = stream.native_handle();
  if (handle == nullptr) {
    throw Error(Errc::invalid_argument,
                "a model on the GPU needs a stream of its own CUDA device; give model and engine the same device");
  }
  return static_cast<cudaStream_t>(handle);
}

int ordinal_of(Device& device) {
  const auto stream = device.create_stream("llama.probe");
  int ordinal = 0;
  check(cudaStreamGetDevice(native(*stream), &ordinal), "ask for a stream's GPU");
  return ordinal;
}

/// Queues the whole pass on one stream, without waiting between layers.
class CudaEngine final : public Engine {
 public:
  CudaEngine(const ModelConfig& config, const WeightSource& source, const ModelOptions& options)
      : config_(require_widths(config)), device_(options.device), ordinal_(ordinal_of(*device_)) {
    const CurrentDevice current(ordinal_);
    load_kernels();
    weights_ = load_device_weights(source, config_, *device_);
  }

  [[nodiscard]] std::uint64_t parameters() const noexcept override { return weights_.parameters; }
  [[nodiscard]] std::uint32_t threads() const noexcept override { return 1; }
  [[nodiscard]] const char* isa() const noexcept override { return "cuda, cuBLASLt"; }
  void forward(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work) const override;
  void choose(Activations& work, std::uint32_t rows) const override;
  void decode(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work,
              Launch launch) const override;
  void likeliest(Activations& work, std::span<Likeliest> out) const override;
  void logits(Activations& work, std::uint32_t first, std::span<float> out) const override;

 private:
  /// One forward pass in flight.
  struct Pass {
    CudaActivations& memory;
    cudaStream_t stream;
    std::uint32_t rows;
  };

  [[nodiscard]] CudaActivations& buffers(Activations& work) const;
  void start_pass(const Pass& pass) const;
  void attention(const DeviceLayer& layer, LayerId id, const Attend& attend, const Pass& pass) const;
  void mlp(const DeviceLayer& layer, const Pass& pass) const;
  void layers(const Attend& attend, const Pass& pass) const;
  /// Logits and likeliest tokens of pass.rows rows from residual row `first` on.
  void head(std::uint32_t first, const Pass& pass) const;
  /// pass.memory.normed() = rms_norm(x)
  void normalise(const float* x, const DeviceGain& gain, const Pass& pass) const;
  enum class Into : std::uint8_t { overwrite, add };
  void multiply(const DeviceMatrix& w, const Bf16* x, float* y, Into into, const Pass& pass) const;
  [[nodiscard]] const CublasLt& cublas() const;
  [[nodiscard]] std::uint32_t heads() const { return config_.num_attention_heads + 2 * config_.num_key_value_heads; }

  const ModelConfig config_;
  const std::shared_ptr<Device> device_;
  const int ordinal_;
  DeviceWeights weights_;
  mutable std::mutex cublas_mutex_;
  mutable std::optional<CublasLt> cublas_;  ///< loaded by the first product that needs it
};

CudaActivations& CudaEngine::buffers(Activations& work) const {
  if (work.stream == nullptr) {
    throw Error(Errc::invalid_argument,
                "a model on the GPU needs Activations::stream; set it to the stream that the engine computes on");
  }
  if (!work.memory) work.memory = std::make_unique<CudaActivations>(*device_);
  return dynamic_cast<CudaActivations&>(*work.memory);
}

const CublasLt& CudaEngine::cublas() const {
  const std::scoped_lock lock(cublas_mutex_);
  if (!cublas_) cublas_.emplace();
  return *cublas_;
}

void CudaEngine::multiply(const DeviceMatrix& w, const Bf16* x, float* y, Into into, const Pass& pass) const {
  const ProductArgs args{.x = x,
                         .w = w.values(),
                         .y = y,
                         .rows = pass.rows,
                         .inner = w.inner,
                         .outs = w.outs,
                         .add = into == Into::add};
  if (pass.rows <= kVectorRows) return matvec(args, pass.stream);
  cublas().multiply(args, pass.memory.workspace(), pass.stream);
}

void CudaEngine::normalise(const float* x, const DeviceGain& gain, const Pass& pass) const {
  rms_norm({.x = x,
            .gain = gain.values(),
            .out = pass.memory.normed(),
            .rows = pass.rows,
            .hidden = config_.hidden_size,
            .eps = static_cast<float>(config_.rms_norm_eps)},
           pass.stream);
}

void CudaEngine::start_pass(const Pass& pass) const {
  start({.tokens = pass.memory.tokens(),
         .embeddings = weights_.embeddings.values(),
         .frequencies = reinterpret_cast<const double*>(weights_.frequencies->data()),
         .residual = pass.memory.residual(),
         .rotation = pass.memory.rotation(),
         .rows = pass.rows,
         .hidden = config_.hidden_size,
         .half = config_.head_dim / 2},
        pass.stream);
}

void CudaEngine::attention(const DeviceLayer& layer, LayerId id, const Attend& attend, const Pass& pass) const {
  CudaActivations& memory = pass.memory;
  const std::uint32_t q_heads = config_.num_attention_heads;
  const std::uint32_t kv_heads = config_.num_key_value_heads;
  normalise(memory.residual(), layer.attention_norm, pass);
  multiply(layer.qkv, memory.normed(), memory.qkv_sums(), Into::overwrite, pass);
  rotate({.x = memory.qkv_sums(),
          .rotation = memory.rotation(),
          .out = memory.qkv(),
          .rows = pass.rows,
          .heads = heads(),
          .rotated = q_heads + kv_heads,
          .half = config_.head_dim / 2},
         pass.stream);

  const Bf16* qkv = memory.qkv();
  const auto [q, k, v] =
      qkv_views(dense_view(qkv, DType::bf16, pass.rows, heads(), config_.head_dim), q_heads, kv_heads);
  attend({.layer = id,
          .q = q,
          .k = k,
          .v = v,
          .out = dense_view(memory.attended(), DType::bf16, pass.rows, q_heads, config_.head_dim)});
  multiply(layer.output, memory.attended(), memory.residual(), Into::add, pass);
}

void CudaEngine::mlp(const DeviceLayer& layer, const Pass& pass) const {
  CudaActivations& memory = pass.memory;
  normalise(memory.residual(), layer.mlp_norm, pass);
  multiply(layer.gate_up, memory.normed(), memory.gate_up(), Into::overwrite, pass);
  swiglu(
      {.gate_up = memory.gate_up(), .out = memory.activated(), .rows = pass.rows, .width = config_.intermediate_size},
      pass.stream);
  multiply(layer.down, memory.activated(), memory.residual(), Into::add, pass);
}

void CudaEngine::layers(const Attend& attend, const Pass& pass) const {
  for (std::uint32_t i = 0; i < config_.num_hidden_layers; ++i) {
    attention(weights_.layers[i], LayerId{i}, attend, pass);
    mlp(weights_.layers[i], pass);
  }
}

void CudaEngine::head(std::uint32_t first, const Pass& pass) const {
  CudaActivations& memory = pass.memory;
  normalise(memory.residual() + std::uint64_t{first} * config_.hidden_size, weights_.final_norm, pass);
  multiply(weights_.head(), memory.normed(), memory.logits(), Into::overwrite, pass);
  cuda::likeliest({.logits = memory.logits(),
                   .parts = memory.parts(),
                   .out = memory.likeliest(),
                   .rows = pass.rows,
                   .width = config_.vocab_size},
                  pass.stream);
}

void CudaEngine::forward(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work) const {
  const CurrentDevice current(ordinal_);
  CudaActivations& memory = buffers(work);
  const Pass pass{.memory = memory, .stream = native(*work.stream), .rows = static_cast<std::uint32_t>(tokens.size())};
  memory.begin(tokens, config_, work);
  start_pass(pass);
  memory.tokens_queued(pass.stream);
  layers(attend, pass);
}

void CudaEngine::choose(Activations& work, std::uint32_t rows) const {
  const CurrentDevice current(ordinal_);
  CudaActivations& memory = buffers(work);
  memory.begin_logits(rows, config_.vocab_size, work);
  head(work.rows - rows, {.memory = memory, .stream = native(*work.stream), .rows = rows});
}

void CudaEngine::decode(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work,
                        Launch launch) const {
  const CurrentDevice current(ordinal_);
  CudaActivations& memory = buffers(work);
  const Pass pass{.memory = memory, .stream = native(*work.stream), .rows = static_cast<std::uint32_t>(tokens.size())};
  memory.begin(tokens, config_, work);
  memory.begin_logits(pass.rows, config_.vocab_size, work);
  const auto enqueue = [&] {
    start_pass(pass);
    layers(attend, pass);
    head(0, pass);
  };
  try {
    if (launch == Launch::enqueue) {
      enqueue();
    } else if (memory.graphs().run({pass.rows, work.variant}, pass.stream, enqueue)) {
      ++work.replays;
    }
  } catch (...) {
    memory.tokens_queued(pass.stream);  // Some of it may be under way.
    throw;
  }
  // Behind the whole of it: an event of a stream that is captured could not be asked.
  memory.tokens_queued(pass.stream);
}

void CudaEngine::likeliest(Activations& work, std::span<Likeliest> out) const {
  const CurrentDevice current(ordinal_);
  CudaActivations& memory = buffers(work);
  memory.finish(work, native(*work.stream));
  std::copy_n(memory.likeliest(), out.size(), out.begin());
}

void CudaEngine::logits(Activations& work, std::uint32_t first, std::span<float> out) const {
  const CurrentDevice current(ordinal_);
  CudaActivations& memory = buffers(work);
  const cudaStream_t stream = native(*work.stream);
  check(cudaMemcpyAsync(memory.host_logits(), memory.logits() + std::uint64_t{first} * config_.vocab_size,
                        out.size_bytes(), cudaMemcpyDeviceToHost, stream),
        "copy the logits");
  memory.finish(work, stream);
  std::copy_n(memory.host_logits(), out.size(), out.begin());
}

}  // namespace

std::unique_ptr<Engine> make_cuda_engine(const ModelConfig& config, const WeightSource& source,
                                         const ModelOptions& options) {
  return std::make_unique<CudaEngine>(config, source, options);
}

}  // namespace sluice::tools
