// How many columns, and how many diagonals, make a share of gamma of the representative attention: a descent through
// the bits of the weights. Each step counts the weights of a bin and adds up their mantissas as whole numbers, which
// needs no order: the weights of a bin have one exponent.

#include <cmath>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/load.hpp"
#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/prefill/flex.hpp"

namespace sluice::gpu {
namespace {

using namespace detail;

constexpr std::uint32_t kThreads = 1024;
constexpr std::uint32_t kMarkThreads = 256;
constexpr std::uint32_t kBins = 2048;

/// Bits of one step of the descent; those above are fixed.
struct Step {
  std::uint32_t shift = 0;
  std::uint32_t width = 0;
};
/// Eight bits of exponent and three of mantissa first; a weight has no sign.
constexpr int kSteps = 3;
__host__ __device__ constexpr Step step_at(int i) {
  return i == 0 ? Step{.shift = 20, .width = 11} : Step{.shift = i == 1 ? 10u : 0u, .width = 10};
}
static_assert(1u << step_at(0).width == kBins);

/// Lines and what they weigh together.
struct Load {
  double mass;
  std::uint32_t count;
};

struct Memory {
  Load parts[kThreads / 32];  ///< of the bins
  std::uint32_t count[kBins];
  std::uint32_t low[kBins];  ///< sums of the lower and of the upper 12 bits of the mantissas
  std::uint32_t high[kBins];
  std::uint32_t prefix;  ///< fixed bits
  std::uint32_t above;   ///< lines with larger ones
  double mass_above;     ///< and their weight
  double need;
};

/// Weights of a row, four at a time: use(index, bits) for all that weigh anything.
template <class Use>
__device__ void for_each_weight(const float* weights, std::uint64_t count, const Use& use) {
#pragma unroll 4
  for (std::uint32_t i = threadIdx.x; i < count / 4; i += kThreads) {
    const float4 four = reinterpret_cast<const float4*>(weights)[i];
    const std::uint32_t bits[4] = {__float_as_uint(four.x), __float_as_uint(four.y), __float_as_uint(four.z),
                                   __float_as_uint(four.w)};
#pragma unroll
    for (std::uint32_t e = 0; e < 4; ++e) {
      if (bits[e] != 0) use(4 * i + e, bits[e]);
    }
  }
}

__device__ void clear_bins(Memory& memory) {
  for (std::uint32_t i = threadIdx.x; i < kBins; i += kThreads) memory.count[i] = memory.low[i] = memory.high[i] = 0;
  __syncthreads();
}

/// What the weights of a bin add up to.
__device__ double mass_of(const Memory& memory, const Step& step, std::uint32_t bin) {
  const std::uint32_t exponent = ((memory.prefix << step.width | bin) << step.shift) >> 23;
  const double mantissas = memory.high[bin] * 4096.0 + memory.low[bin];
  return ldexp(mantissas, static_cast<int>(max(exponent, 1u)) - 150);
}

/// By one warp: the first lane, in their order, with which the mass reaches `need`, or the last one that has a line;
/// which is negative if none has. `before` becomes what comes before that lane.
__device__ int reach(const Load& mine, double need, Load& before, double* all = nullptr) {
  const std::uint32_t lane = threadIdx.x % 32;
  Load to = mine;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const double mass = __shfl_up_sync(kAllLanes, to.mass, by);
    const std::uint32_t count = __shfl_up_sync(kAllLanes, to.count, by);
    if (lane >= static_cast<std::uint32_t>(by)) {
      to.mass += mass;
      to.count += count;
    }
  }
  if (all != nullptr) {
    *all = __shfl_sync(kAllLanes, to.mass, 31);
    need *= *all;
  }
  const std::uint32_t reached = __ballot_sync(kAllLanes, mine.count != 0 && before.mass + to.mass >= need);
  const std::uint32_t filled = __ballot_sync(kAllLanes, mine.count != 0);
  if (filled == 0) return -1;
  const int found = reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : 31 - __clz(static_cast<int>(filled));
  const double mass = __shfl_up_sync(kAllLanes, to.mass, 1);
  before.mass += __shfl_sync(kAllLanes, lane == 0 ? 0.0 : mass, found);
  before.count += __shfl_sync(kAllLanes, to.count - mine.count, found);
  return found;
}

/// Bin i of a step, the heaviest weights first.
__device__ Load load_of(const Memory& memory, const Step& step, std::uint32_t i) {
  const std::uint32_t bin = (1u << step.width) - 1 - i;
  const std::uint32_t count = memory.count[bin];
  return {.mass = count == 0 ? 0.0 : mass_of(memory, step, bin), .count = count};
}

/// Looks for the bin, from the heaviest weights down, with which the mass reaches what is needed; should rounding keep
/// it from that, it is the lightest. Every warp adds up a 32nd of the bins; the first one chooses among these, and
/// within. Of the first step, `need` is a share.
__device__ void enter_bin(Memory& memory, const Step& step, bool first) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t warp = threadIdx.x / 32;
  const std::uint32_t per_lane = (1u << step.width) / kThreads;
  const auto part_of = [&](std::uint32_t part) {
    Load sum{};
    for (std::uint32_t i = 0; i < per_lane; ++i) {
      const Load bin = load_of(memory, step, (part * 32 + lane) * per_lane + i);
      sum.mass += bin.mass;
      sum.count += bin.count;
    }
    return sum;
  };
  Load sum = part_of(warp);
#pragma unroll
  for (int by = 16; by > 0; by /= 2) {
    sum.mass += __shfl_xor_sync(kAllLanes, sum.mass, by);
    sum.count += __shfl_xor_sync(kAllLanes, sum.count, by);
  }
  if (lane == 0) memory.parts[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  double need = memory.need;
  double all = 1.0;
  Load before{.mass = memory.mass_above, .count = memory.above};
  const int part = reach(memory.parts[lane], need, before, first ? &all : nullptr);
  if (part < 0) return;  // Nothing weighs anything.
  need *= all;
  const std::uint32_t last = (static_cast<std::uint32_t>(part) * 32 + reach(part_of(part), need, before)) * per_lane;
  __syncwarp();  // All lanes have read what the first one overwrites.
  if (lane != 0) return;
  std::uint32_t found = last;
  for (std::uint32_t i = last; i < last + per_lane; ++i) {
    const Load bin = load_of(memory, step, i);
    if (bin.count == 0) continue;
    if (i != found && memory.count[(1u << step.width) - 1 - found] != 0) {
      const Load skipped = load_of(memory, step, found);
      before.mass += skipped.mass;
      before.count += skipped.count;
    }
    found = i;
    if (before.mass + bin.mass >= need) break;
  }
  memory.above = before.count;
  memory.mass_above = before.mass;
  memory.need = need;
  memory.prefix = memory.prefix << step.width | ((1u << step.width) - 1 - found);
}

/// The index behind the `wanted`-th of the weights that equal `bits`.
__device__ std::uint32_t end_of_ties(Memory& memory, const float* weights, std::uint64_t count, std::uint32_t bits,
                                     std::uint32_t wanted) {
  constexpr std::uint32_t kLowBits = 10;
  static_assert(kFlexMaxKeys >> kLowBits <= kBins);
  std::uint32_t found = 0;
  for (int step = 0; step < 2; ++step) {
    const bool low = step == 1;
    clear_bins(memory);
    for_each_weight(weights, count, [&](std::uint32_t index, std::uint32_t other) {
      if (other != bits || (low && index >> kLowBits != found)) return;
      atomicAdd(&memory.count[low ? index & ((1u << kLowBits) - 1) : index >> kLowBits], 1u);
    });
    __syncthreads();
    std::uint32_t bin = 0;  // Every thread walks: the bins before the one that is looked for are few.
    while (memory.count[bin] < wanted) wanted -= memory.count[bin++];
    found = low ? found << kLowBits | bin : bin;
    __syncthreads();
  }
  return found + 1;
}

/// All that weigh anything: gamma is 1.
__device__ void count_all(Memory& memory, const float* weights, std::uint64_t count, LineCut* out) {
  std::uint32_t mine = 0;
  for_each_weight(weights, count, [&](std::uint32_t, std::uint32_t) { ++mine; });
  atomicAdd(&memory.above, mine);
  __syncthreads();
  if (threadIdx.x == 0) *out = {.count = memory.above, .bits = 0, .ties_end = 0};
}

/// blockIdx.x is 2 * head, + 1 for its diagonals.
__global__ void __launch_bounds__(kThreads) flex_lines_kernel(const __grid_constant__ FlexArgs args) {
  __shared__ Memory memory;
  const FlexItem& item = args.items[blockIdx.y];
  if (item.count == 0) return;
  const std::uint64_t count = item.lines();
  const float* const weights = (blockIdx.x % 2 == 0 ? item.columns : item.diagonals) + blockIdx.x / 2 * count;
  LineCut* const out = item.cuts + blockIdx.x;
  if (threadIdx.x == 0) {
    memory.prefix = memory.above = 0;
    memory.mass_above = 0.0;
    memory.need = static_cast<double>(args.spec.gamma);
  }
  __syncthreads();
  if (args.spec.gamma >= 1.f) return count_all(memory, weights, count, out);
  for (int i = 0; i < kSteps; ++i) {
    const Step step = step_at(i);
    clear_bins(memory);
    const std::uint32_t prefix = memory.prefix;
    for_each_weight(weights, count, [&](std::uint32_t, std::uint32_t bits) {
      if (bits >> step.shift >> step.width != prefix) return;
      const std::uint32_t bin = bits >> step.shift & ((1u << step.width) - 1);
      const std::uint32_t mantissa = (bits & 0x7f'ffffu) | (bits >> 23 != 0 ? 0x80'0000u : 0u);
      atomicAdd(&memory.count[bin], 1u);
      atomicAdd(&memory.low[bin], mantissa & 0xfffu);
      atomicAdd(&memory.high[bin], mantissa >> 12);
    });
    __syncthreads();
    enter_bin(memory, step, i == 0);
    __syncthreads();
  }
  const std::uint32_t bits = memory.prefix;
  if (bits == 0) {
    if (threadIdx.x == 0) *out = {};
    return;
  }
  // All that are left in the last bin are equal: as many as it takes.
  const std::uint32_t equal = memory.count[bits & ((1u << step_at(kSteps - 1).width) - 1)];
  const double lacking = (memory.need - memory.mass_above) / static_cast<double>(__uint_as_float(bits));
  const std::uint32_t above = memory.above;
  const std::uint32_t ties = min(max(static_cast<std::uint32_t>(ceil(fmin(lacking, 2e9))), 1u), equal);
  std::uint32_t end = kFlexMaxKeys;
  __syncthreads();
  if (args.spec.lines && ties != equal) end = end_of_ties(memory, weights, count, bits, ties);
  if (threadIdx.x == 0) *out = {.count = above + ties, .bits = bits, .ties_end = end};
}

/// A warp looks at the chosen lines of one block of columns and of one block offset. blockIdx.y is the head.
__global__ void __launch_bounds__(kMarkThreads) flex_marks_kernel(const __grid_constant__ FlexArgs args) {
  const FlexItem& item = args.items[blockIdx.z];
  const std::uint32_t head = blockIdx.y;
  const std::uint32_t block = (blockIdx.x * kMarkThreads + threadIdx.x) / 32;
  if (block >= item.key_blocks) return;
  const auto chosen = [&](const float* weights, const LineCut& cut, std::uint32_t index) {
    const std::uint32_t bits = __float_as_uint(weights[head * item.lines() + index]);
    return bits > cut.bits || (bits == cut.bits && index < cut.ties_end);
  };
  const LineCut columns = item.cuts[2 * head];
  const LineCut diagonals = item.cuts[2 * head + 1];
  std::uint32_t marks = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kPrefillBlock / 32; ++i) {
    const std::uint32_t index = block * kPrefillBlock + i * 32 + threadIdx.x % 32;
    if (chosen(item.columns, columns, index)) marks |= kMarkColumn;
    if (chosen(item.diagonals, diagonals, index))
      marks |= kMarkDiagonal | (index % kPrefillBlock != 0 ? kMarkSpill : 0u);
  }
  marks = __reduce_or_sync(kAllLanes, marks);
  if (threadIdx.x % 32 == 0) item.marks[std::uint64_t{head} * item.key_blocks + block] = marks;
}

}  // namespace

void launch_flex_lines(const FlexArgs& args, const FlexExtent& extent, cudaStream_t stream) {
  flex_lines_kernel<<<dim3(2 * args.group, extent.items), kThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the line counts of select_blocks");
  if (!args.spec.lines) return;
  constexpr std::uint32_t kBlocks = kMarkThreads / 32;
  const dim3 grid((extent.key_blocks + kBlocks - 1) / kBlocks, args.group, extent.items);
  flex_marks_kernel<<<grid, kMarkThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "launch the line marks of select_blocks");
}

void load_flex_line_kernels() {
  load_kernel(flex_lines_kernel, "load the line counts of select_blocks");
  load_kernel(flex_marks_kernel, "load the line marks of select_blocks");
}

}  // namespace sluice::gpu
