#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/select/masses.hpp"
#include "sluice/units.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kThreads = 128;
constexpr std::uint32_t kMaxTasks = 65535;  // The largest second dimension of a grid.
constexpr float kLn2 = 0.69314718055994530942f;

/// One thread per run and query head; blockIdx.y is the task.
__global__ void __launch_bounds__(kThreads)
    mass_kernel(const __grid_constant__ TaskArray<MassTask> tasks, std::uint32_t first_task, std::uint32_t group) {
  const MassTask task = tasks[first_task + blockIdx.y];
  const std::uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  const std::uint32_t run = at / group;
  if (run >= task.runs) return;
  const std::uint32_t word = task.lists[run];
  const std::uint32_t count = word & ((1u << MassTask::kCountBits) - 1);
  const float* const octets = task.octets + std::uint64_t{word >> MassTask::kCountBits} * group + at % group;
  float top = -INFINITY;
  for (std::uint32_t i = 0; i < count; ++i) top = fmaxf(top, octets[std::uint64_t{i} * group]);
  float mass = 0.f;
  if (top != -INFINITY) {  // Or else nothing weighs anything, and -inf less -inf is not a number.
    for (std::uint32_t i = 0; i < count; ++i) mass += exp2f(octets[std::uint64_t{i} * group] - top);
  }
  task.out[at] = mass > 0.f ? (top + log2f(mass)) * kLn2 : -INFINITY;
}

}  // namespace

void launch_masses(const TaskArray<MassTask>& tasks, std::uint32_t most_runs, std::uint32_t group,
                   cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(div_up(std::uint64_t{most_runs} * group, kThreads));
  if (blocks == 0) return;  // A zero-sized grid is a launch error.
  for (std::uint32_t first = 0; first < tasks.count; first += kMaxTasks) {
    const std::uint32_t count = tasks.count - first < kMaxTasks ? tasks.count - first : kMaxTasks;
    mass_kernel<<<dim3(blocks, count), kThreads, 0, stream>>>(tasks, first, group);
    check(cudaGetLastError(), "launch masses");
  }
}

void load_mass_kernels() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, mass_kernel), "load the mass kernel");
}

}  // namespace sluice::gpu
