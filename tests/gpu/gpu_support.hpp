#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "gpu/device/cuda_device.hpp"
#include "gpu/device/cuda_error.hpp"
#include "sluice/cuda.hpp"
#include "tests/support/stages_under_test.hpp"

/// What the tests of gpu/ share.
namespace sluice::test {

/// The first GPU, the same for all tests of an executable.
[[nodiscard]] const std::shared_ptr<Device>& gpu_device();

/// Far enough for a machine that does much else; only a defect gets there.
[[nodiscard]] inline Deadline soon() { return deadline_after(std::chrono::seconds(60)); }

/// The GPU's stages with a stream of its own. Its memory is pinned.
class GpuUnderTest final : public StagesUnderTest {
 public:
  GpuUnderTest() : stream_(gpu_device()->create_stream("test")), stages_(tools::cuda_stages_of(*gpu_device())) {}
  tools::Stages& stages() override { return *stages_; }
  ForwardVerbs& forward_verbs() override { return *gpu_device()->forward_verbs(); }
  Stream* stream() override { return stream_.get(); }
  std::byte* memory(std::uint64_t bytes) override;
  void finish() override { stream_->synchronize(soon()); }

  [[nodiscard]] cudaStream_t handle() const { return static_cast<cudaStream_t>(stream_->native_handle()); }
  /// A copy of `values` in device memory, there once the stream has passed this point.
  template <class T>
  [[nodiscard]] std::span<T> on_device(std::span<const T> values) {
    buffers_.push_back(gpu_device()->allocate(values.size_bytes() + 1));
    const std::span<T> copy(reinterpret_cast<T*>(buffers_.back()->data()), values.size());
    gpu::check(cudaMemcpyAsync(copy.data(), values.data(), values.size_bytes(), cudaMemcpyDefault, handle()),
               "copy to the device");
    return copy;
  }
  /// Waits for the stream.
  template <class T>
  [[nodiscard]] std::vector<T> from_device(std::span<const T> values) {
    finish();
    std::vector<T> copy(values.size());
    gpu::check(cudaMemcpy(copy.data(), values.data(), values.size_bytes(), cudaMemcpyDefault), "copy from the device");
    return copy;
  }

 private:
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::unique_ptr<Stream> stream_;  ///< goes first: its queue refers to the buffers
  std::shared_ptr<tools::Stages> stages_;
  std::uint64_t used_ = 0;
};

}  // namespace sluice::test
