#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "sluice/device.hpp"
#include "tools/llama/cuda/decode_graphs.hpp"
#include "tools/llama/cuda/kernels.hpp"
#include "tools/llama/model.hpp"

namespace sluice::tools::cuda {

/// Makes a GPU the calling thread's current one, for as long as it lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// The buffers of a forward pass on a device. One stream uses them, in order, so that a layer reuses those of the
/// layer before it.
class CudaActivations final : public Activations::Memory {
 public:
  explicit CudaActivations(Device& device);

  /// Makes room for a forward pass and puts its tokens where the device reads them. Waits, by `work.timeout`, for
  /// what still uses the memory that is written or freed.
  void begin(std::span<const PlacedToken> tokens, const ModelConfig& config, const Activations& work);
  /// To be called once the kernel that reads the tokens is queued.
  void tokens_queued(cudaStream_t stream);
  /// Makes room for the logits of `rows` rows, and for what is chosen by them.
  void begin_logits(std::uint32_t rows, std::uint32_t vocab_size, const Activations& work);

  /// Waits until the stream is empty: by watching a word for as long as a step takes, then as Stream::synchronize,
  /// whose errors it throws.
  void finish(const Activations& work, cudaStream_t stream);

  [[nodiscard]] const PlacedToken* tokens() const noexcept { return at<PlacedToken>(tokens_); }
  [[nodiscard]] float* residual() const noexcept { return at<float>(residual_); }        ///< [rows, hidden]
  [[nodiscard]] float* rotation() const noexcept { return at<float>(rotation_); }        ///< [rows, 2, head_dim / 2]
  [[nodiscard]] Bf16* normed() const noexcept { return at<Bf16>(normed_); }              ///< [rows, hidden]
  [[nodiscard]] float* qkv_sums() const noexcept { return at<float>(qkv_sums_); }        ///< [rows, heads, head_dim]
  [[nodiscard]] Bf16* qkv() const noexcept { return at<Bf16>(qkv_); }                    ///< [rows, heads, head_dim]
  [[nodiscard]] Bf16* attended() const noexcept { return at<Bf16>(attended_); }          ///< [rows, q_heads, head_dim]
  [[nodiscard]] float* gate_up() const noexcept { return at<float>(gate_up_); }          ///< [rows, 2, intermediate]
  [[nodiscard]] Bf16* activated() const noexcept { return at<Bf16>(activated_); }        ///< [rows, intermediate]
  [[nodiscard]] float* logits() const noexcept { return at<float>(logits_); }            ///< [rows, vocab_size]
  [[nodiscard]] float* host_logits() const noexcept { return at<float>(host_logits_); }  ///< the same, pinned
  [[nodiscard]] std::uint64_t* parts() const noexcept { return at<std::uint64_t>(parts_); }  ///< of LikeliestArgs
  [[nodiscard]] Likeliest* likeliest() const noexcept { return at<Likeliest>(likeliest_); }  ///< [rows], pinned
  /// Of forwards with these buffers.
  [[nodiscard]] DecodeGraphs& graphs() noexcept { return graphs_; }
  [[nodiscard]] std::span<std::byte> workspace() const noexcept { return {workspace_->data(), workspace_->bytes()}; }

 private:
  struct DestroyEvent {
    void operator()(cudaEvent_t event) const noexcept { (void)cudaEventDestroy(event); }
  };
  using Memory = std::unique_ptr<Buffer>;
  template <class T>
  [[nodiscard]] static T* at(const Memory& memory) noexcept {
    return reinterpret_cast<T*>(memory->data());
  }
  void grow(std::uint32_t rows, const ModelConfig& config);
  void wait_for_tokens(std::chrono::milliseconds timeout) const;

  Device& device_;
  std::uint32_t capacity_ = 0;         ///< rows
  std::uint64_t logits_capacity_ = 0;  ///< floats
  std::uint32_t chosen_capacity_ = 0;  ///< rows
  Memory tokens_, residual_, rotation_, normed_, qkv_sums_, qkv_, attended_, gate_up_, activated_;
  Memory logits_, host_logits_;
  Memory parts_, likeliest_;
  Memory workspace_;
  Memory finished_;  ///< pinned word: how many `finish` the stream has passed
  std::uint64_t finishes_ = 0;
  /// Of CUDA rather than of the Stream: recording a Stream's event would take over a failure that the engine awaits.
  std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent> tokens_read_;
  DecodeGraphs graphs_;
};

}  // namespace sluice::tools::cuda
