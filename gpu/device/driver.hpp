#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "sluice/step/page.hpp"

namespace sluice::gpu {

/// A tensor of 16-bit elements, the fastest dimension first, and the box of it that one copy brings to shared memory.
struct TensorBoxes {
  std::byte* base = nullptr;
  std::array<std::uint64_t, 4> sizes{};
  std::array<std::uint64_t, 3> strides{};  ///< bytes between two of the second to fourth dimension, multiples of 16
  std::array<std::uint32_t, 4> box{};      ///< at most 256 each; its rows are of 128 bytes and written swizzled
};

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

  /// The stream waits until one of these bits of `word` is set, which costs no thread block. There is no limit to
  /// that: the host must set one.
  [[nodiscard]] cudaError_t wait_for_bits(cudaStream_t stream, const std::uint64_t* word,
                                          std::uint64_t bits) const noexcept;

  /// Whether there are tensor maps.
  [[nodiscard]] bool has_tensor_maps() const noexcept { return encode_tiled_ != nullptr; }
  /// Costs microseconds. The memory is not looked at.
  [[nodiscard]] cudaError_t map_tensor(CUtensorMap& map, const TensorBoxes& tensor) const noexcept;

 private:
  using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
  using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
  using BatchOperations = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
  using GetAttribute = CUresult (*)(int*, CUdevice_attribute, CUdevice);
  using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

  Driver() noexcept;

  WriteValue write_value_ = nullptr;
  WaitValue wait_value_ = nullptr;
  BatchOperations batch_operations_ = nullptr;
  GetAttribute get_attribute_ = nullptr;
  EncodeTiled encode_tiled_ = nullptr;
};

/// Pages as [frame, K or V, row, column], of which a copy brings 64 columns of up to `rows` rows of a page. Of a frame
/// behind the first `frames` it brings zeros, whatever lies there.
/// @throws Error{Errc::device} if the driver refuses the layout.
[[nodiscard]] CUtensorMap map_pages(const KvView& kv, std::uint32_t rows, std::uint64_t frames);

}  // namespace sluice::gpu
