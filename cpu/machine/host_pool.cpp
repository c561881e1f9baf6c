#include "cpu/machine/host_pool.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "cpu/machine/frame_set.hpp"
#include "cpu/machine/slab.hpp"
#include "sluice/error.hpp"

namespace sluice::cpu {
namespace {

std::uint32_t frame_count(const HostPoolOptions& options, const Topology& topology) {
  const std::uint64_t page_bytes = options.layout.page_bytes();
  if (page_bytes == 0)
    throw Error(Errc::invalid_argument, "host pool: layout has pages of 0 bytes; set page_tokens and head_dim");
  if (options.numa_node >= topology.numa_nodes())
    throw Error(Errc::invalid_argument, "host pool: numa_node " + std::to_string(options.numa_node) +
                                            " is not there; the machine has " + std::to_string(topology.numa_nodes()) +
                                            ", counted from 0");
  const std::uint64_t frames = options.bytes / page_bytes;
  if (frames == 0)
    throw Error(Errc::invalid_argument, "host pool: " + std::to_string(options.bytes) + " bytes hold no page of " +
                                            std::to_string(page_bytes) + " bytes; give the pool more memory");
  if (frames >= kNone)
    throw Error(Errc::invalid_argument,
                "host pool: " + std::to_string(frames) + " pages are more than 32-bit frame indices; use larger pages");
  return static_cast<std::uint32_t>(frames);
}

/// Whole pages of the cache, so that none spans two registrations, and whole pages of the operating
/// system, because those can be pinned only once. At least one such piece, even if it exceeds the limit.
std::uint64_t chunk_bytes(const HostPoolOptions& options) {
  const std::uint64_t unit = std::lcm(options.layout.page_bytes(), Slab::os_page_bytes());
  return std::max<std::uint64_t>(options.register_chunk_bytes / unit, 1) * unit;
}

/// All chunks or none: if one is refused, those before it are unregistered by unwinding.
std::vector<std::unique_ptr<Registration>> register_all(std::span<std::byte> memory, std::uint64_t chunk,
                                                        Device& device) {
  const std::uint64_t chunks = div_up(memory.size(), chunk);
  std::vector<std::unique_ptr<Registration>> registrations;
  registrations.reserve(chunks);
  for (std::uint64_t i = 0; i < chunks; ++i) {
    const auto piece = memory.subspan(i * chunk, std::min(chunk, memory.size() - i * chunk));
    try {
      registrations.push_back(device.register_host(piece));
    } catch (const Error& error) {
      throw Error(error.code(), "host pool: pinning piece " + std::to_string(i + 1) + " of " + std::to_string(chunks) +
                                    " (" + std::to_string(piece.size()) + " bytes) failed: " + error.what() +
                                    "; use a smaller pool or smaller pieces");
    }
  }
  return registrations;
}

}  // namespace

struct HostPool::Impl {
  PageLayout layout;
  std::uint32_t frames;
  Slab slab;  ///< first: it checks the size before the tables of a pool that cannot exist are filled
  FrameSet free;
  std::vector<std::uint32_t> generations;                    ///< [frames], of the current use or, if free, of the next
  std::vector<std::unique_ptr<Registration>> registrations;  ///< destroyed before the slab that they pin

  Impl(const HostPoolOptions& options, const Topology& topology, const Workers& workers, Device& device)
      : layout(options.layout),
        frames(frame_count(options, topology)),
        slab({.bytes = frames * layout.page_bytes(), .numa_node = options.numa_node, .huge_pages = options.huge_pages},
             topology, workers),
        free(frames),
        generations(frames, 0),
        registrations(register_all(slab.memory(), chunk_bytes(options), device)) {}

  [[nodiscard]] bool live(PageRef page) const noexcept {
    return page.frame < frames && generations[page.frame] == page.generation && !free.contains(page.frame);
  }
};

HostPool::HostPool(const HostPoolOptions& options, const Topology& topology, const Workers& workers, Device& device)
    : impl_(std::make_unique<Impl>(options, topology, workers, device)) {}

HostPool::~HostPool() = default;

std::byte* HostPool::base() const noexcept { return impl_->slab.memory().data(); }
const PageLayout& HostPool::layout() const noexcept { return impl_->layout; }
std::uint32_t HostPool::frames() const noexcept { return impl_->frames; }
std::uint32_t HostPool::free_frames() const noexcept { return impl_->free.size(); }
bool HostPool::live(PageRef page) const noexcept { return impl_->live(page); }

std::vector<PageRef> HostPool::allocate(std::uint32_t count) {
  if (count > free_frames())
    throw Error(Errc::out_of_capacity, "host pool: asked for " + std::to_string(count) + " pages, " +
                                           std::to_string(free_frames()) + " of " + std::to_string(frames()) +
                                           " are free; release sequences or give the pool more memory");
  std::vector<PageRef> pages(count);
  for (PageRef& page : pages) {
    page.frame = impl_->free.take_lowest();
    page.generation = impl_->generations[page.frame];
  }
  return pages;
}

void HostPool::release(PageRef page) {
  if (!live(page))
    throw Error(Errc::invalid_argument, "host pool: frame " + std::to_string(page.frame) + " generation " +
                                            std::to_string(page.generation) +
                                            " is not in use; it was released before or belongs to another pool");
  ++impl_->generations[page.frame];
  impl_->free.insert(page.frame);
}

}  // namespace sluice::cpu
