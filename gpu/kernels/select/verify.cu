#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/select/verify.hpp"

/// The verdicts of include/sluice/progress.hpp, whose functions are the host's, by a warp per query head: its lanes
/// look at pages side by side.
namespace sluice::gpu {
namespace {

constexpr std::uint32_t kLanes = 32;
constexpr std::uint32_t kMostHeads = 32;
constexpr std::uint32_t kAllLanes = 0xffff'ffffu;

struct MassSum {
  float log;
  std::uint32_t count;
};

/// `masses` of one head, `group` apart; the same for all lanes.
__device__ MassSum sum_masses(const float* masses, std::uint32_t pages, std::uint32_t group) {
  const std::uint32_t lane = threadIdx.x % kLanes;
  float top = -INFINITY;
  for (std::uint32_t i = lane; i < pages; i += kLanes) top = fmaxf(top, masses[i * group]);  // Passes NaN over.
  for (int step = kLanes / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
  MassSum sum{.log = -INFINITY, .count = 0};
  float total = 0.f;
  for (std::uint32_t i = lane; i < pages; i += kLanes) {
    const float mass = masses[i * group];
    if (isnan(mass)) continue;
    ++sum.count;
    total += mass == top ? 1.f : expf(mass - top);
  }
  for (int step = kLanes / 2; step > 0; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
  sum.count = __reduce_add_sync(kAllLanes, sum.count);
  if (top != -INFINITY) sum.log = top + logf(total);
  return sum;
}

__device__ float least_mass(const float* masses, std::uint32_t pages, std::uint32_t group) {
  float least = INFINITY;
  for (std::uint32_t i = threadIdx.x % kLanes; i < pages; i += kLanes) least = fminf(least, masses[i * group]);
  for (int step = kLanes / 2; step > 0; step /= 2) least = fminf(least, __shfl_xor_sync(kAllLanes, least, step));
  return least;
}

/// Every lane that finds it finds the same value.
__device__ float upper_median(const float* masses, std::uint32_t full, std::uint32_t count, std::uint32_t group) {
  float found = NAN;
  for (std::uint32_t i = threadIdx.x % kLanes; i < full; i += kLanes) {
    const float mass = masses[i * group];
    std::uint32_t below = 0;
    std::uint32_t equal = 0;
    for (std::uint32_t j = 0; j < full; ++j) {
      below += masses[j * group] < mass ? 1 : 0;
      equal += masses[j * group] == mass ? 1 : 0;
    }
    if (below <= count / 2 && count / 2 < below + equal) found = mass;
  }
  for (int step = kLanes / 2; step > 0; step /= 2) found = fmaxf(found, __shfl_xor_sync(kAllLanes, found, step));
  return found;
}

__device__ float add_mass(float whole, float part) {
  const float top = fmaxf(whole, part);
  if (isnan(part) || top == -INFINITY) return whole;
  if (top == INFINITY) return top;
  return top + logf(expf(whole - top) + expf(part - top));
}

__device__ void add_pages(ProgressState& state, const ProgressTask& task, const float* masses, std::uint32_t group) {
  state.mass = add_mass(state.mass, sum_masses(masses, task.pages, group).log);
  const MassSum full = sum_masses(masses, task.full, group);
  if (full.count == 0) return;
  if (task.rule == ProgressRule::mean) {
    state.unseen = full.log - logf(static_cast<float>(full.count));
  } else if (task.rule == ProgressRule::median) {
    state.unseen = upper_median(masses, task.full, full.count, group);
  } else {
    state.unseen = fminf(state.unseen, least_mass(masses, task.full, group));
  }
}

__device__ float share_of(const ProgressState& state, std::uint32_t left, float bound) {
  if (left == 0) return 1.f;
  if (!(state.mass > -INFINITY)) return 0.f;
  const float guess = state.unseen + logf(static_cast<float>(left));
  const float rest = bound > guess ? bound : guess;
  if (rest == -INFINITY) return 1.f;
  const float share = 1.f / (1.f + expf(rest - state.mass));
  return isnan(share) || isnan(bound) ? 0.f : share;
}

/// One warp per query head.
__global__ void __launch_bounds__(kLanes * kMostHeads)
    verify_kernel(const __grid_constant__ TaskArray<ProgressTask> tasks, std::uint32_t group) {
  __shared__ ProgressTask task;
  if (threadIdx.x == 0) task = tasks[blockIdx.x];
  __syncthreads();
  const std::uint32_t head = threadIdx.x / kLanes;
  ProgressState state{.mass = -INFINITY, .unseen = INFINITY, .share = 0.f};
  if (!task.first) state = task.states[head];
  if (task.extra != nullptr) state.mass = add_mass(state.mass, task.extra[head]);
  add_pages(state, task, task.masses + head, group);
  state.share = share_of(state, task.left, task.bounds == nullptr ? -INFINITY : task.bounds[head]);
  if (threadIdx.x % kLanes == 0) task.states[head] = state;
  const bool enough = task.left == 0 || (state.share >= task.mass && task.mass < 1.f);
  const bool all = __syncthreads_and(enough ? 1 : 0) != 0;
  if (threadIdx.x == 0) {
    __threadfence_system();
    const std::uint64_t word = verdict_word(task.tag, all);
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(task.verdict), "l"(word) : "memory");
  }
}

}  // namespace

void launch_verify(const TaskArray<ProgressTask>& tasks, std::uint32_t group, cudaStream_t stream) {
  verify_kernel<<<tasks.count, kLanes * group, 0, stream>>>(tasks, group);
  check(cudaGetLastError(), "launch verify");
}

void load_verify_kernels() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, verify_kernel), "load the verify kernel");
}

}  // namespace sluice::gpu
