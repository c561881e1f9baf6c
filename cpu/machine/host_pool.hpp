#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/machine/slab.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/device.hpp"
#include "sluice/step/page.hpp"
#include "sluice/units.hpp"

namespace sluice::cpu {

struct HostPoolOptions {
  PageLayout layout{};
  std::uint64_t bytes = 0;  ///< rounded down to whole pages; at least one page
  std::uint32_t numa_node = 0;
  /// Registered with the device in pieces of at most this size, each a multiple of the page size, so that
  /// no page spans two registrations, and of the operating system's pages; at least one such multiple.
  std::uint64_t register_chunk_bytes = 16 * GiB;
  /// Turn off where huge pages make allocation stall: a fragmented machine with defrag=madvise.
  HugePages huge_pages = HugePages::transparent;
};

/// The far tier: one NUMA-bound slab of page frames, touched in parallel and registered with the device
/// at construction. Frames never move. A free frame's generation is one higher than its last use's.
///
/// States of a frame: free -> (allocate) -> in use -> (release) -> free, generation + 1.
/// Thread safety: allocate and release from one thread at a time; reading frames from any.
class HostPool {
 public:
  /// @throws Error{Errc::out_of_capacity} naming the size and what the machine has left; Error{Errc::device}
  /// if registration is refused, after everything was rolled back; Error{Errc::invalid_argument} naming the
  /// option. The device must outlive the pool.
  HostPool(const HostPoolOptions& options, const Topology& topology, const Workers& workers, Device& device);
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  [[nodiscard]] std::byte* base() const noexcept;
  [[nodiscard]] const PageLayout& layout() const noexcept;
  [[nodiscard]] std::uint32_t frames() const noexcept;
  [[nodiscard]] std::uint32_t free_frames() const noexcept;
  [[nodiscard]] std::byte* frame(std::uint32_t index) const noexcept { return base() + index * layout().page_bytes(); }

  /// Lowest free frames first, so that pages allocated together lie together.
  /// @throws Error{Errc::out_of_capacity} if fewer than `count` are free; none is taken then.
  [[nodiscard]] std::vector<PageRef> allocate(std::uint32_t count);
  /// @throws Error{Errc::invalid_argument} for a stale reference (double free).
  void release(PageRef page);
  /// True while `page` is the current use of its frame.
  [[nodiscard]] bool live(PageRef page) const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::cpu
