#pragma once

#include "gpu/kernels/prefill/flex.hpp"
#include "gpu/kernels/tma.cuh"
#include "gpu/kernels/wgmma.cuh"

/// Tiles of keys on their way from pages to shared memory by tensor copies (compute capability 9.0). Copies by the
/// threads themselves would need a fence before every product, which waits for all copies under way.
namespace sluice::gpu::detail {

inline constexpr int kHopperTiles = 4;  ///< in shared memory: one in use, the others on their way

/// A tile of keys as slabs, behind the last key anything, see wgmma.cuh.
template <int kDim>
struct alignas(1024) HopperKeys {
  static constexpr std::uint32_t kSlabBytes = kFlexTile * kSlabRowBytes;
  std::byte bytes[kDim / kSlabColumns * kSlabBytes];
};

/// The tiles of a split on their way to shared memory. One warp asks for them, a lane for one page's part of a slab.
template <int kDim>
class HopperCopies {
 public:
  __device__ HopperCopies(const CUtensorMap& pages, const FlexItem& item, HopperKeys<kDim>* tiles, SharedBarrier* full,
                          std::uint32_t begin, std::uint32_t count)
      : pages_(pages),
        frames_(item.frames),
        tiles_(tiles),
        full_(full),
        keys_(item.keys),
        begin_(begin),
        count_(count) {
    page_tokens_ = item.page_tokens;
    rows_ = min(page_tokens_, kFlexTile);
    const std::uint32_t boxes = kFlexTile / rows_;
    slab_ = threadIdx.x / boxes;
    row_ = threadIdx.x % boxes * rows_;
    start_ = box_of(0);
  }
  /// By the first warp: starts copying tile `i`; they follow each other from 0 on.
  __device__ void start(std::uint32_t i) {
    if (i >= count_) return;
    SharedBarrier& full = full_[i % kHopperTiles];
    if (threadIdx.x == 0) full.arrive_and_expect(sizeof(HopperKeys<kDim>));
    __syncwarp();
    std::byte* const to = tiles_[i % kHopperTiles].bytes + slab_ * HopperKeys<kDim>::kSlabBytes + row_ * kSlabRowBytes;
    if (slab_ < kDim / kSlabColumns) copy_box(to, pages_, start_, full);
    start_ = box_of(i + 1);  // Looked up before it is needed.
  }

 private:
  /// Rows past a page's end are zeros: behind the last key, a box begins there.
  [[nodiscard]] __device__ BoxStart box_of(std::uint32_t i) const {
    const std::uint32_t key = begin_ + i * kFlexTile + row_;
    BoxStart start{.x = static_cast<int>(slab_ * kSlabColumns), .y = static_cast<int>(page_tokens_)};
    if (slab_ < kDim / kSlabColumns && i < count_ && key < keys_) {
      start.y = static_cast<int>(key & (page_tokens_ - 1));
      start.w = static_cast<int>(frames_[key / page_tokens_]);
    }
    return start;
  }

  const CUtensorMap& pages_;
  const std::uint32_t* frames_;
  HopperKeys<kDim>* tiles_;
  SharedBarrier* full_;
  std::uint32_t keys_;
  std::uint32_t begin_;
  std::uint32_t count_;
  std::uint32_t page_tokens_ = 0;
  std::uint32_t rows_ = 0;
  std::uint32_t slab_ = 0;
  std::uint32_t row_ = 0;
  BoxStart start_;
};

/// Calls use(tile, i) for each of `count` tiles of the keys from `begin` on, all threads together, and after(i) when
/// all warps are done with it, while others may use the next. Ends with a barrier.
template <int kDim, class Use, class After>
__device__ void for_each_tile(HopperKeys<kDim> (&tiles)[kHopperTiles], SharedBarrier (&full)[kHopperTiles],
                              const CUtensorMap& pages, const FlexItem& item, std::uint32_t begin, std::uint32_t count,
                              const Use& use, const After& after) {
  constexpr std::uint32_t kAhead = kHopperTiles - 1;
  if (threadIdx.x == 0) {
    for (SharedBarrier& barrier : full) barrier.init(1);
    publish_barriers();
  }
  __syncthreads();
  HopperCopies<kDim> copies(pages, item, tiles, full, begin, count);
  const bool copier = threadIdx.x < 32;
  for (std::uint32_t i = 0; copier && i < kAhead; ++i) copies.start(i);
  for (std::uint32_t i = 0; i < count; ++i) {
    full[i % kHopperTiles].wait(i / kHopperTiles % 2);
    __syncthreads();
    if (copier) copies.start(i + kAhead);  // In the place of tile i - 1, which nobody uses any more.
    if (i != 0) after(i - 1);
    use(tiles[i % kHopperTiles], i);
  }
  __syncthreads();
  after(count - 1);
}

}  // namespace sluice::gpu::detail
