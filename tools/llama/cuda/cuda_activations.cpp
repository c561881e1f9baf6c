#include "tools/llama/cuda/cuda_activations.hpp"

#include <algorithm>
#include <atomic>
#include <thread>

#include "tools/llama/cuda/check.hpp"
#include "tools/llama/cuda/cublas_lt.hpp"

namespace sluice::tools::cuda {
namespace {

/// How long a thread watches: longer than a decode step of a large model.
constexpr std::chrono::milliseconds kWatch{20};

}  // namespace

CurrentDevice::CurrentDevice(int ordinal) {
  check(cudaGetDevice(&before_), "ask for the current GPU");
  changed_ = before_ != ordinal;
  if (changed_) check(cudaSetDevice(ordinal), "select the model's GPU");
}

CurrentDevice::~CurrentDevice() {
  if (changed_) (void)cudaSetDevice(before_);
}

CudaActivations::CudaActivations(Device& device)
    : device_(device),
      workspace_(device.allocate(CublasLt::kWorkspaceBytes)),
      finished_(device.allocate_pinned(sizeof(std::uint64_t))) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "create an event");
  tokens_read_.reset(event);
}

void CudaActivations::begin(std::span<const PlacedToken> tokens, const ModelConfig& config, const Activations& work) {
  const auto rows = static_cast<std::uint32_t>(tokens.size());
  if (rows > capacity_) {
    if (capacity_ > 0) work.stream->synchronize(deadline_after(work.timeout));  // queued work may use the old buffers
    grow(rows, config);
  }
  wait_for_tokens(work.timeout);
  std::copy(tokens.begin(), tokens.end(), at<PlacedToken>(tokens_));
}

void CudaActivations::tokens_queued(cudaStream_t stream) {
  check(cudaEventRecord(tokens_read_.get(), stream), "record an event");
}

void CudaActivations::begin_logits(std::uint32_t rows, std::uint32_t vocab_size, const Activations& work) {
  const std::uint64_t floats = std::uint64_t{rows} * vocab_size;
  if (floats <= logits_capacity_ && rows <= chosen_capacity_) return;
  if (logits_capacity_ > 0) work.stream->synchronize(deadline_after(work.timeout));
  graphs_.clear();
  logits_capacity_ = chosen_capacity_ = 0;  // until all are there
  logits_ = device_.allocate(floats * sizeof(float));
  host_logits_ = device_.allocate_pinned(floats * sizeof(float));
  parts_ = device_.allocate(std::uint64_t{rows} * kLikeliestParts * sizeof(std::uint64_t));
  likeliest_ = device_.allocate_pinned(rows * sizeof(Likeliest));
  logits_capacity_ = floats;
  chosen_capacity_ = rows;
}

void CudaActivations::finish(const Activations& work, cudaStream_t stream) {
  raise(at<std::uint64_t>(finished_), ++finishes_, stream);
  const std::atomic_ref<std::uint64_t> word(*at<std::uint64_t>(finished_));
  const Clock::time_point patience = Clock::now() + std::min(kWatch, work.timeout);
  while (word.load(std::memory_order_acquire) < finishes_ && Clock::now() < patience) std::this_thread::yield();
  work.stream->synchronize(deadline_after(work.timeout));
}

void CudaActivations::grow(std::uint32_t rows, const ModelConfig& config) {
  const std::uint64_t q = config.num_attention_heads * config.head_dim;
  const std::uint64_t qkv = q + 2ull * config.num_key_value_heads * config.head_dim;
  const auto near = [&](Memory& memory, std::uint64_t per_row, std::uint64_t width) {
    memory.reset();  // before the larger one is asked for
    memory = device_.allocate(rows * per_row * width);
  };
  graphs_.clear();
  capacity_ = 0;  // until all are there
  near(residual_, config.hidden_size, sizeof(float));
  near(rotation_, config.head_dim, sizeof(float));
  near(normed_, config.hidden_size, sizeof(Bf16));
  near(qkv_sums_, qkv, sizeof(float));
  near(qkv_, qkv, sizeof(Bf16));
  near(attended_, q, sizeof(Bf16));
  near(gate_up_, 2ull * config.intermediate_size, sizeof(float));
  near(activated_, config.intermediate_size, sizeof(Bf16));
  tokens_ = device_.allocate_pinned(rows * sizeof(PlacedToken));
  capacity_ = rows;
}

/// An event that was never recorded is done.
void CudaActivations::wait_for_tokens(std::chrono::milliseconds timeout) const {
  const Deadline deadline = deadline_after(timeout);
  for (;;) {
    const cudaError_t status = cudaEventQuery(tokens_read_.get());
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady) check(status, "run the model's kernels");
    if (RunClock::now() > deadline) {
      throw Error(Errc::timeout,
                  "the GPU did not start the previous forward pass within " + std::to_string(timeout.count()) + " ms");
    }
    std::this_thread::yield();
  }
}

}  // namespace sluice::tools::cuda
