#include "gpu/device/memory_map.hpp"

#include <cuda_runtime_api.h>

#include <iterator>
#include <mutex>

namespace sluice::gpu {
namespace {

MemoryKind ask_driver(const std::byte* at) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, at) != cudaSuccess) {
    (void)cudaGetLastError();
    return MemoryKind::pageable;
  }
  switch (attributes.type) {
    case cudaMemoryTypeDevice:
    case cudaMemoryTypeManaged: return MemoryKind::device;
    case cudaMemoryTypeHost: return attributes.devicePointer == at ? MemoryKind::pinned : MemoryKind::pageable;
    case cudaMemoryTypeUnregistered: break;
  }
  return MemoryKind::pageable;
}

}  // namespace

bool MemoryMap::insert(std::span<const std::byte> memory, MemoryKind kind) {
  const MemoryRange range{.begin = memory.data(), .end = memory.data() + memory.size(), .kind = kind};
  const std::lock_guard lock(mutex_);
  const auto next = ranges_.lower_bound(range.begin);
  if (next != ranges_.end() && next->second.begin < range.end) return false;
  if (next != ranges_.begin() && std::prev(next)->second.end > range.begin) return false;
  ranges_.emplace(range.begin, range);
  return true;
}

void MemoryMap::erase(const std::byte* begin) noexcept {
  const std::lock_guard lock(mutex_);
  ranges_.erase(begin);
}

MemoryRange MemoryMap::Reader::find(const std::byte* at, std::uint64_t bytes) {
  for (const MemoryRange& range : last_) {
    if (range.holds(at, bytes)) return range;
  }
  MemoryRange found{.begin = at, .end = at + bytes, .kind = MemoryKind::pageable};
  const auto next = map_.ranges_.upper_bound(at);
  if (next != map_.ranges_.begin() && std::prev(next)->second.holds(at, bytes)) {
    found = std::prev(next)->second;
  } else {
    found.kind = ask_driver(at);
  }
  last_[oldest_] = found;
  oldest_ = 1 - oldest_;
  return found;
}

}  // namespace sluice::gpu
