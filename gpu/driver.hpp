#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice::gpu {

/// The entry points of the driver that the runtime API lacks, found at run time, so that nothing links libcuda and
/// a program starts where there is none.
class Driver {
 public:
  /// Entry points are missing without a driver or with one that is too old.
  static const Driver& instance();

  /// Whether streams of this device can write and wait for 64-bit words by themselves.
  [[nodiscard]] bool has_memory_operations(int ordinal) const noexcept;

  /// The stream writes `value` to `word` after everything before it is visible to the whole system.
  [[nodiscard]] cudaError_t write(cudaStream_t stream, std::uint64_t* word, std::uint64_t value) const noexcept;
  /// The stream first writes `ticket` to `arrived`, then waits until `word` >= `value`.
  [[nodiscard]] cudaError_t arrive_and_wait(cudaStream_t stream, std::uint64_t* arrived, std::uint64_t ticket,
                                            const std::uint64_t* word, std::uint64_t value) const noexcept;

 private:
  using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
  using BatchOperations = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
  using GetAttribute = CUresult (*)(int*, CUdevice_attribute, CUdevice);

  Driver() noexcept;

  WriteValue write_value_ = nullptr;
  BatchOperations batch_operations_ = nullptr;
  GetAttribute get_attribute_ = nullptr;
};

}  // namespace sluice::gpu
