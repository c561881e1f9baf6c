#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice::gpu {

/// The tasks of one launch, an argument of the kernel. Few travel by value, which spares the kernel a trip over the
/// link before it can start; many lie in the stream's ParamRing.
template <class Task>
struct TaskArray {
  /// Kernel arguments have 4 KiB.
  static constexpr std::size_t kInline = 2560 / sizeof(Task);

  const Task* queued = nullptr;  ///< device-readable; null: `inlined`
  std::uint32_t count = 0;
  Task inlined[kInline];

  /// Kernels read each task once per thread block.
  [[nodiscard]] constexpr const Task& operator[](std::size_t i) const {
    return queued != nullptr ? queued[i] : inlined[i];
  }
};

}  // namespace sluice::gpu
