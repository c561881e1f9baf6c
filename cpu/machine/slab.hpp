#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "cpu/machine/topology.hpp"
#include "cpu/threads/kept.hpp"
#include "cpu/threads/workers.hpp"

namespace sluice::cpu {

/// 2 MiB pages for a slab: fewer TLB misses for kernels that hop between pages of the cache.
enum class HugePages : std::uint8_t {
  off,
  transparent,  ///< madvise; the kernel falls back to 4 KiB pages on its own
};

struct SlabOptions {
  std::uint64_t bytes = 0;
  std::uint32_t numa_node = 0;
  HugePages huge_pages = HugePages::transparent;
};

/// Workers that touch memory of a node: a thread for each of its cores that may be used and that the control group
/// grants time for, bound to it, so that memory lies there even where the system refuses to bind it. Of a node without
/// such cores those of the others do.
[[nodiscard]] WorkersOptions touching(const Topology& topology, std::uint32_t numa_node);

/// Anonymous memory of the host, bound to a NUMA node as far as the system allows and touched in parallel,
/// so that neither a kernel nor a registration meets a page fault. Zero-filled. Unmapped by the destructor, or
/// by the last worker that touches it, should the constructor have given that worker up.
class Slab {
 public:
  /// @throws Error{Errc::out_of_capacity} naming what was asked and what the machine has left, before a
  /// single page was touched: the out-of-memory killer would not say why.
  Slab(const SlabOptions& options, const Topology& topology, const Workers& workers);
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  [[nodiscard]] std::span<std::byte> memory() const noexcept { return {data_, bytes_}; }
  /// Granularity of the operating system's pages, in bytes.
  [[nodiscard]] static std::uint64_t os_page_bytes() noexcept;

 private:
  struct Mapping;

  void map(std::uint64_t alignment);
  void touch(const Workers& workers) const;

  std::unique_ptr<Kept> mapping_;
  std::byte* data_ = nullptr;  ///< its first aligned address
  std::uint64_t bytes_ = 0;
};

}  // namespace sluice::cpu
