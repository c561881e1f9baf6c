#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "sluice/cuda.hpp"
#include "tools/llama/bf16.hpp"
#include "tools/llama/cuda/check.hpp"

namespace sluice::test {

/// One GPU and one stream for all tests of an executable.
inline const std::shared_ptr<Device>& gpu() {
  static const std::shared_ptr<Device> device = make_cuda_device();
  return device;
}

inline Stream& gpu_stream() {
  static const std::unique_ptr<Stream> stream = gpu()->create_stream("test");
  return *stream;
}

inline cudaStream_t gpu_queue() { return static_cast<cudaStream_t>(gpu_stream().native_handle()); }

inline void finish() { gpu_stream().synchronize(deadline_after(std::chrono::seconds(20))); }

/// An array in device memory, with a guard of kGuard bytes behind it that nobody may change.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count), memory_(gpu()->allocate(count * sizeof(T) + kGuard)) {
    const std::vector<std::byte> pattern(count * sizeof(T) + kGuard, kPattern);
    copy(memory_->data(), pattern.data(), pattern.size());
  }
  explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) {
    copy(memory_->data(), values.data(), values.size_bytes());
  }

  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_->data()); }
  /// Waits for the stream, and fails if the guard was written.
  [[nodiscard]] std::vector<T> read() const {
    std::vector<std::byte> bytes(count_ * sizeof(T) + kGuard);
    copy(bytes.data(), memory_->data(), bytes.size());
    for (std::size_t i = count_ * sizeof(T); i < bytes.size(); ++i) {
      if (bytes[i] != kPattern) throw std::runtime_error("a kernel wrote behind its output");
    }
    std::vector<T> values(count_);
    std::memcpy(values.data(), bytes.data(), count_ * sizeof(T));
    return values;
  }

 private:
  static constexpr std::size_t kGuard = 256;
  static constexpr std::byte kPattern{0xa5};

  static void copy(void* to, const void* from, std::size_t bytes) {
    tools::cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, gpu_queue()), "copy test data");
    finish();
  }

  std::size_t count_;
  std::unique_ptr<Buffer> memory_;
};

inline std::vector<std::uint16_t> to_bf16(std::span<const float> values) {
  std::vector<std::uint16_t> bits;
  for (const float value : values) bits.push_back(tools::to_bf16(value));
  return bits;
}

inline std::vector<float> from_bf16(std::span<const std::uint16_t> bits) {
  std::vector<float> values;
  for (const std::uint16_t value : bits) values.push_back(tools::from_bf16(value));
  return values;
}

}  // namespace sluice::test
