#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>
#include <span>

namespace sluice::gpu {

enum class MemoryKind : std::uint8_t {
  device,
  pinned,    ///< of the host; the device reads and writes it under the same address
  pageable,  ///< of the host; only the driver's own copies may touch it
};

struct MemoryRange {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  MemoryKind kind = MemoryKind::pageable;
  [[nodiscard]] bool holds(const std::byte* at, std::uint64_t bytes) const noexcept {
    return at >= begin && at < end && bytes <= static_cast<std::uint64_t>(end - at);
  }
};

/// What a device has allocated and registered. Asking the driver where an address lies takes its lock for every
/// address; a batch of thousands of copies asks here, where neighbours are found without a search.
/// Thread safety: full.
class MemoryMap {
 public:
  /// False, and nothing changed, if part of the range is there already.
  [[nodiscard]] bool insert(std::span<const std::byte> memory, MemoryKind kind);
  void erase(const std::byte* begin) noexcept;

  /// Holds the map still while one batch is looked up. One thread; short-lived.
  class Reader {
   public:
    explicit Reader(const MemoryMap& map) : map_(map), lock_(map.mutex_) {}
    /// Where [at, at + bytes) lies. Memory that is not the device's own counts as a range of just that size, of the
    /// kind that the driver says.
    [[nodiscard]] MemoryRange find(const std::byte* at, std::uint64_t bytes);

   private:
    const MemoryMap& map_;
    std::shared_lock<std::shared_mutex> lock_;
    MemoryRange last_[2];  ///< one each for the two sides of a copy
    unsigned oldest_ = 0;
  };

 private:
  mutable std::shared_mutex mutex_;
  std::map<const std::byte*, MemoryRange> ranges_;  ///< by begin, disjoint; guarded by mutex_
};

}  // namespace sluice::gpu
