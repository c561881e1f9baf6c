#include "gpu/kernels/prefill/prefill_hopper.cuh"

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/compiled.hpp"
#include "gpu/kernels/load.hpp"

namespace sluice::gpu {
namespace detail {
namespace {

template <int kDim>
__device__ void write_rows(const HopperRows<kDim>& rows, const PrefillItem& item, const PrefillArgs& args,
                           const QueryBlock& block, std::uint32_t position) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float mass = rows.mass[half];
    mass += __shfl_xor_sync(kAllLanes, mass, 1);
    mass += __shfl_xor_sync(kAllLanes, mass, 2);
    const std::uint32_t token = position + 8 * half - item.first;
    if (token >= item.count) continue;
    const float base = rows.top[half] == -INFINITY ? 0.f : rows.top[half] * (args.score_scale * kLog2E);
    RowPart<kDim> part;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      part[n] = make_float2(rows.out[4 * n + 2 * half], rows.out[4 * n + 2 * half + 1]);
    write_row<kDim>(item, args, token, block.head, mass, base, part);
  }
}

/// One warpgroup of two: attends 64 rows to the tiles of the ring.
template <class T, int kDim, bool kCapped>
__device__ void attend_rows(const PrefillItem& item, const PrefillArgs& args, const QueryBlock& block,
                            HopperMemory<kDim>& memory, Ring& ring) {
  const int group = static_cast<int>(threadIdx.x / kWarpgroup) - 1;
  const int other = 1 - group;
  const float scale = args.score_scale * kLog2E;
  const std::uint32_t first_row = 64 * group;
  const std::uint32_t position = block.position + first_row + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
  copy_queries(memory.q, item, args.shape, block, first_row);
  publish_stores();
  named_sync(kAlone + group, kWarpgroup);

  const std::uint32_t full_begin = max(block.key_begin, first_seen(block.position + kTile - 1, block.reach));
  const auto masked = [&](std::uint32_t tile) {
    return (tile + 1) * kTile > min(block.key_end, block.position) || tile * kTile < full_begin;
  };
  const std::uint32_t q = shared_address(memory.q.bytes) + first_row * kSlabRowBytes;
  HopperRows<kDim> rows;
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) rows.out[i] = 0.f;
  rows.top[0] = rows.top[1] = -INFINITY;
  rows.mass[0] = rows.mass[1] = 0.f;

  float scores[64];
  float factor[2];
  std::uint32_t weights[kTile / 16][4];
  Stage stage;
  ring.full_k[0].wait(0);
  std::uint32_t tile = ring.tile[0];
  if (tile != kNoTile) {
    begin_products();
    score_keys<T, kDim>(scores, q, shared_address(memory.k[0].bytes));
    commit_products();
    wait_products<0>();
    pin_registers(scores);
    release(ring.empty_k[0]);
    if constexpr (kCapped) cap_products(scores, args.score_scale, args.softcap);
    if (masked(tile)) mask_scores(scores, block, position, tile);
    weigh_scores(scores, rows, factor, scale);
    pack_weights<T>(weights, scores);
    if (group == 1) named_arrive(kTurn + other, 2 * kWarpgroup);  // The first turn is the other's.
    Stage next = stage;
    next.next();
    ring.full_k[next.index].wait(next.parity);
    std::uint32_t next_tile = ring.tile[next.index];
    while (next_tile != kNoTile) {
      named_sync(kTurn + group, 2 * kWarpgroup);
      pin_registers(scores);
      pin_registers(rows.out);
      begin_products();
      score_keys<T, kDim>(scores, q, shared_address(memory.k[next.index].bytes));
      commit_products();
      ring.full_v[stage.index].wait(stage.parity);
      begin_products();
      add_values<T, kDim>(rows.out, weights, shared_address(memory.v[stage.index].bytes));
      commit_products();
      named_arrive(kTurn + other, 2 * kWarpgroup);
      wait_products<1>();
      pin_registers(scores);
      release(ring.empty_k[next.index]);
      if constexpr (kCapped) cap_products(scores, args.score_scale, args.softcap);
      if (masked(next_tile)) mask_scores(scores, block, position, next_tile);
      weigh_scores(scores, rows, factor, scale);
      // Looking at the ring here also keeps the assembler from waiting for O += P V before the weights are made.
      SharedBarrier& done = ring.empty_v[stage.index];
      tile = next_tile;
      stage = next;
      next.next();
      ring.full_k[next.index].wait(next.parity);
      next_tile = ring.tile[next.index];
      wait_products<0>();
      pin_registers(rows.out);
      release(done);
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) rows.out[i] *= factor[i % 4 / 2];
      pack_weights<T>(weights, scores);
    }
    if (group == 0) named_sync(kTurn + group, 2 * kWarpgroup);  // The turn that was not taken.
    ring.full_v[stage.index].wait(stage.parity);
    if ((tile + 1) * kTile > block.key_end) {
      clear_values(memory.v[stage.index], block.key_end - tile * kTile);
      publish_stores();
      named_sync(kAlone + group, kWarpgroup);
    }
    pin_registers(rows.out);
    begin_products();
    add_values<T, kDim>(rows.out, weights, shared_address(memory.v[stage.index].bytes));
    commit_products();
    wait_products<0>();
    pin_registers(rows.out);
  }
  write_rows(rows, item, args, block, position);
}

template <class T, int kDim, bool kCapped>
__global__ void __launch_bounds__(kHopperThreads, 1)
    prefill_hopper_kernel(const __grid_constant__ CUtensorMap pages, const __grid_constant__ PrefillArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ Ring ring;
  extern __shared__ uint4 shared[];
  const std::uint32_t padding = (1024 - shared_address(shared) % 1024) % 1024;
  auto& memory = *reinterpret_cast<HopperMemory<kDim>*>(reinterpret_cast<std::byte*>(shared) + padding);
  const PrefillItem& item = args.items[blockIdx.z];
  if (item.count == 0 || blockIdx.y >= item.query_blocks) return;
  // The last blocks have the most keys and go first; the heads of a group share what they read in the L2 cache.
  const QueryBlock block = query_block(item, item.query_blocks - 1 - blockIdx.y, blockIdx.x);
  if (threadIdx.x == 0) {
    prefetch_map(pages);
    for (int i = 0; i < kStages; ++i) {
      ring.full_k[i].init(kSlabs<kDim>);
      ring.full_v[i].init(kSlabs<kDim>);
      ring.empty_k[i].init(kConsumers * kWarpgroup / 32);
      ring.empty_v[i].init(kConsumers * kWarpgroup / 32);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers<40>();
    if (threadIdx.x < 64 * kSlabs<kDim>) copy_tiles<kDim>(pages, item, block, memory, ring);
  } else {
    take_registers<232>();
    attend_rows<T, kDim, kCapped>(item, args, block, memory, ring);
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
    kernel<<<dim3(args.group, extent.blocks, extent.items), detail::kHopperThreads, shared_bytes, stream>>>(pages,
                                                                                                            args);
  });
  check(cudaGetLastError(), "launch prefill");
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
