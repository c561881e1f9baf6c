#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "tools/llama/cuda/kernels.hpp"

namespace sluice::tools::cuda {

/// cuBLASLt on the current GPU, by its own heuristic. The library is half a gigabyte, so it is neither linked nor
/// bundled: it is loaded when the first product needs it.
/// Thread safety: all members may be called from several threads, with different workspaces.
class CublasLt {
 public:
  /// Scratch that one product may use.
  static constexpr std::uint64_t kWorkspaceBytes = 32 * 1024 * 1024;

  CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  /// Enqueues one product. The first of a shape asks the heuristic, some 100 us.
  /// @param workspace  kWorkspaceBytes of device memory, in use until the stream has passed the product
  /// @throws Error{Errc::unsupported} if the library is not installed; Error{Errc::device} naming its own reason.
  void multiply(const ProductArgs& args, std::span<std::byte> workspace, cudaStream_t stream) const;

 private:
  struct Impl;
  Impl& impl_;  ///< shared by all of the device, see there
};

}  // namespace sluice::tools::cuda
