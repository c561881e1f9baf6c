#include "gpu/kernels/prefill/prefill_hopper.cuh"

#include "gpu/kernels/compiled.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/overlap.cuh"
#include "gpu/kernels/overlap.hpp"
#include "gpu/kernels/prefill/prefill_weights.cuh"

namespace sluice::gpu {
namespace detail {
namespace {

/// A stage as consumers need it. The next tile's is worked out while weights are made, since nothing hides what stands
/// between them and the products.
template <int kDim>
struct ConsumedStage {
  static constexpr std::uint32_t kStep = sizeof(Slabs<kDim>) / 16;
  std::uint32_t ring = 0;  ///< where its RingStage is
  std::uint32_t keys = 0;  ///< low word of their descriptor
  std::uint32_t index = 0;
  std::uint32_t parity = 0;

  [[nodiscard]] __device__ std::uint32_t values() const {
    return keys + kStages * kStep + describe_low(0, kSlabBytes) - describe_low(0, kRowsLeading);
  }
  [[nodiscard]] __device__ std::uint32_t full_k() const { return ring + offsetof(RingStage, full_k); }
  [[nodiscard]] __device__ std::uint32_t full_v() const { return ring + offsetof(RingStage, full_v); }
  [[nodiscard]] __device__ std::uint32_t tile() const { return load_shared(ring + offsetof(RingStage, tile)); }
  [[nodiscard]] __device__ std::uint32_t next_tile() const { return load_shared(ring + offsetof(RingStage, next)); }
  __device__ void release_keys() const { release(ring + offsetof(RingStage, empty_k)); }
  __device__ void release_values() const { release(ring + offsetof(RingStage, empty_v)); }

  [[nodiscard]] __device__ ConsumedStage next() const {
    constexpr std::uint32_t kLast = kStages - 1;
    constexpr std::uint32_t kRingStep = sizeof(RingStage);
    if (index != kLast) return {ring + kRingStep, keys + kStep, index + 1, parity};
    return {ring - kLast * kRingStep, keys - kLast * kStep, 0, parity ^ 1};
  }

 private:
  __device__ static void release(std::uint32_t empty) {
    if (threadIdx.x % 32 == 0) arrive_at(empty);
  }
};

/// One warpgroup of two: attends 64 rows to the tiles of the ring.
template <class T, int kDim, bool kCapped>
class RowGroup {
 public:
  __device__ RowGroup(const PrefillArgs& args, const PrefillItem& item, const QueryBlock& block,
                      HopperMemory<kDim>& memory, Ring& ring)
      : args_(args),
        item_(item),
        block_(block),
        memory_(memory),
        group_(of_warp(threadIdx.x / kWarpgroup - 1)),
        queries_(of_warp(describe_low(shared_address(memory.q.bytes) + 64 * group_ * kSlabRowBytes, kRowsLeading))),
        position_(block.position + 64 * group_ + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4),
        full_begin_(max(block.key_begin, first_seen(block.position + kTile - 1, block.reach))),
        full_end_(min(block.key_end, block.position)),
        stage_{.ring = of_warp(shared_address(&ring)),
               .keys = of_warp(describe_low(shared_address(memory.k[0].bytes), kRowsLeading))} {}

  __device__ void attend() {
    copy_queries(memory_.q, item_, args_.shape, block_, 64 * group_);
    publish_stores();
    named_sync(kAlone + group_, kWarpgroup);
    wait_at(stage_.full_k(), stage_.parity);
    std::uint32_t tile = of_warp(stage_.tile());
    std::uint32_t after = of_warp(stage_.next_tile());
    if (tile != kNoTile) {
      attend_first(tile);
      if (group_ == 1) named_arrive(turn_of(0), 2 * kWarpgroup);  // The first turn is the other's.
      ConsumedStage<kDim> next = stage_.next();
      while (after != kNoTile) {
        tile = after;
        after = attend_next(tile, next);
      }
      if (group_ == 0) named_sync(turn_of(0), 2 * kWarpgroup);  // The turn that was not taken.
      add_last(tile);
    }
    write();
  }

 private:
  [[nodiscard]] __device__ static int turn_of(std::uint32_t group) { return static_cast<int>(kTurn + group); }
  [[nodiscard]] __device__ float scale() const { return args_.score_scale * kLog2E; }

  /// scores = Q K^T
  __device__ void start_scores(const ConsumedStage<kDim>& stage) {
    begin_products();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const std::uint32_t at = (step / 4 * kSlabBytes + step % 4 * 32) / 16;
      multiply_rows<T>(scores_, describe(queries_ + at), describe(stage.keys + at), step != 0);
    }
    commit_products();
  }
  /// out += P V
  __device__ void start_values(const ConsumedStage<kDim>& stage) {
    begin_products();
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step)
      multiply_columns<T>(out_, weights_[step], describe(stage.values() + step * 16 * kSlabRowBytes / 16));
    commit_products();
  }
  /// When the products are there.
  __device__ void take_scores(const ConsumedStage<kDim>& stage, std::uint32_t tile) {
    pin_registers(scores_);
    stage.release_keys();
    if constexpr (kCapped) cap_products(scores_, args_.score_scale, args_.softcap);
    if ((tile + 1) * kTile > full_end_ || tile * kTile < full_begin_) mask_scores(scores_, block_, position_, tile);
  }

  __device__ void attend_first(std::uint32_t tile) {
    start_scores(stage_);
    wait_products<0>();
    take_scores(stage_, tile);
    const RowChange change = raise_tops(scores_, sums_, scale());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weigh_row(scores_, sums_, change, scale(), half);
      pack_row<T>(weights_, scores_, half);
    }
  }

  /// Scores of the tile in the stage `next`, the last tile's values, and the tile's weights. Both stages go on. Returns
  /// the tile after it.
  __device__ std::uint32_t attend_next(std::uint32_t tile, ConsumedStage<kDim>& next) {
    wait_at(next.full_k(), next.parity);
    named_sync(turn_of(group_), 2 * kWarpgroup);
    pin_registers(scores_);
    pin_registers(out_);
    start_scores(next);
    wait_at(stage_.full_v(), stage_.parity);
    start_values(stage_);
    named_arrive(turn_of(1 - group_), 2 * kWarpgroup);
    std::uint32_t after = next.next_tile();
    wait_products<1>();
    take_scores(next, tile);
    const RowChange change = raise_tops(scores_, sums_, scale());
    weigh_row(scores_, sums_, change, scale(), 0);
    after = of_warp(after);
    const ConsumedStage<kDim> done = stage_;
    stage_ = next;
    next = next.next();
    asm volatile("" : "+r"(next.ring), "+r"(next.keys), "+r"(next.index), "+r"(next.parity), "+r"(after));
    // These values have long been there. Without a look at them the assembler would wait for O += P V before it has
    // made any weights; from here on it is scaled in the shadow of the other row's.
    wait_at(done.full_v(), done.parity);
    wait_products<0>();
    pin_registers(out_);
    done.release_values();
    scale_row(out_, change.factor[0], 0);
    weigh_row(scores_, sums_, change, scale(), 1);
    pack_row<T>(weights_, scores_, 0);
    scale_row(out_, change.factor[1], 1);
    pack_row<T>(weights_, scores_, 1);
    return after;
  }

  __device__ void add_last(std::uint32_t tile) {
    wait_at(stage_.full_v(), stage_.parity);
    if ((tile + 1) * kTile > block_.key_end) {
      clear_values(memory_.v[stage_.index], block_.key_end - tile * kTile);
      publish_stores();
      named_sync(kAlone + group_, kWarpgroup);
    }
    pin_registers(out_);
    start_values(stage_);
    wait_products<0>();
    pin_registers(out_);
  }

  __device__ void write() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float mass = sums_.mass[half];
      mass += __shfl_xor_sync(kAllLanes, mass, 1);
      mass += __shfl_xor_sync(kAllLanes, mass, 2);
      const float base = sums_.top[half] == -INFINITY ? 0.f : sums_.top[half] * scale();
      RowPart<kDim> part;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) part[n] = make_float2(out_[4 * n + 2 * half], out_[4 * n + 2 * half + 1]);
      const std::uint32_t token = position_ + 8 * half - item_.first;
      write_row<kDim>(item_, args_, {.token = token, .head = block_.head, .there = token < item_.count}, mass, base,
                      part);
    }
  }

  const PrefillArgs& args_;
  const PrefillItem& item_;
  const QueryBlock& block_;
  HopperMemory<kDim>& memory_;
  std::uint32_t group_;
  std::uint32_t queries_;   ///< low word of the descriptor of its rows
  std::uint32_t position_;  ///< of the thread's first row
  std::uint32_t full_begin_;
  std::uint32_t full_end_;  ///< tiles from full_begin to here need no mask
  ConsumedStage<kDim> stage_;
  float out_[kDim / 2] = {};
  float scores_[64];
  std::uint32_t weights_[kTile / 16][4];
  RowSums sums_;
};

template <class T, int kDim, bool kCapped>
__global__ void __launch_bounds__(kHopperThreads, 1)
    prefill_hopper_kernel(const __grid_constant__ CUtensorMap pages, const __grid_constant__ PrefillArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ Ring ring;
  extern __shared__ uint4 shared[];
  const std::uint32_t padding = (1024 - shared_address(shared) % 1024) % 1024;
  auto& memory = *reinterpret_cast<HopperMemory<kDim>*>(reinterpret_cast<std::byte*>(shared) + padding);
  if (threadIdx.x == 0) {
    prefetch_map(pages);
    for (RingStage& stage : ring.stages) {
      stage.full_k.init(kSlabs<kDim>);
      stage.full_v.init(kSlabs<kDim>);
      stage.empty_k.init(kConsumers * kWarpgroup / 32);
      stage.empty_v.init(kConsumers * kWarpgroup / 32);
    }
    publish_barriers();
  }
  wait_for_kernel_before();
  const PrefillItem& item = args.items[blockIdx.z];
  if (item.count == 0 || blockIdx.y >= item.query_blocks) return;
  // The last blocks have the most keys and go first; the heads of a group share what they read in the L2 cache.
  const QueryBlock block = query_block(item, item.query_blocks - 1 - blockIdx.y, blockIdx.x);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<40>();
    if (threadIdx.x < 64 * kSlabs<kDim>) TileCopier<kDim>(pages, item, block, memory, ring).copy_all();
  } else {
    take_registers<232>();
    RowGroup<T, kDim, kCapped>(args, item, block, memory, ring).attend();
  }
#endif
}

/// Calls `use` with the kernel of a dtype, head_dim and cap or none, and the shared memory that it needs.
template <bool kCapped, class Use>
void with_kernel(DType dtype, std::uint32_t head_dim, const Use& use) {
  if (dtype == DType::f16) {
    head_dim == 64 ? use(prefill_hopper_kernel<__half, 64, kCapped>, kHopperBytes<64>)
                   : use(prefill_hopper_kernel<__half, 128, kCapped>, kHopperBytes<128>);
  } else {
    head_dim == 64 ? use(prefill_hopper_kernel<__nv_bfloat16, 64, kCapped>, kHopperBytes<64>)
                   : use(prefill_hopper_kernel<__nv_bfloat16, 128, kCapped>, kHopperBytes<128>);
  }
}

template <class Use>
void with_kernel(DType dtype, std::uint32_t head_dim, bool capped, const Use& use) {
  capped ? with_kernel<true>(dtype, head_dim, use) : with_kernel<false>(dtype, head_dim, use);
}

}  // namespace
}  // namespace detail

void launch_prefill_hopper(const PrefillVariant& variant, const PrefillArgs& args, const PrefillExtent& extent,
                           const CUtensorMap& pages, cudaStream_t stream) {
  detail::with_kernel(variant.dtype, variant.head_dim, variant.capped, [&](auto* kernel, int shared_bytes) {
    const dim3 grid(args.group, extent.blocks, extent.items);
    const OverlappingLaunch launch(grid, detail::kHopperThreads, static_cast<std::uint32_t>(shared_bytes), stream);
    launch.run(kernel, "launch prefill", pages, args);
  });
}

bool load_prefill_hopper_kernels() {
  const bool there = compiled_for() == Compiled::warpgroups;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::uint32_t head_dim : {64u, 128u}) {
      const auto load = [&](auto* kernel, int shared_bytes) {
        if (there) load_kernel(kernel, "load the prefill kernels", shared_bytes);
      };
      for (const bool capped : {false, true}) detail::with_kernel(dtype, head_dim, capped, load);
    }
  }
  return there;
}

}  // namespace sluice::gpu
