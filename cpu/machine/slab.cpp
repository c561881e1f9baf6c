#include "cpu/machine/slab.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>
#include <vector>

#include "cpu/machine/limits.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::cpu {
namespace {

constexpr std::uint64_t kHugePageBytes = 2 * MiB;
constexpr std::uint64_t kTouchBytes = 16 * MiB;  ///< per work item: some milliseconds of page faults

std::string gib(std::uint64_t bytes) {
  const std::uint64_t tenths = bytes / (GiB / 10);
  return std::to_string(bytes) + " bytes (" + std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " GiB)";
}

}  // namespace

WorkersOptions touching(const Topology& topology, std::uint32_t numa_node) {
  const std::vector<Topology::Core> cores = topology.cores_near(numa_node);
  const auto near = static_cast<std::uint32_t>(
      std::ranges::count_if(cores, [numa_node](const Topology::Core& core) { return core.numa_node == numa_node; }));
  const std::uint32_t most = topology.cores();
  return {
      .threads = near == 0 ? most : std::min(near, most), .numa_node = numa_node, .spin = std::chrono::microseconds(0)};
}

/// Memory of its own, for a worker that does not return may still be touching it.
struct Slab::Mapping final : Kept {
  explicit Mapping(std::uint64_t wanted)
      : bytes(wanted), data(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Mapping() override {
    if (data != MAP_FAILED) (void)::munmap(data, bytes);
  }
  std::uint64_t bytes;
  void* data;
};

Slab::Slab(const SlabOptions& options, const Topology& topology, const Workers& workers) : bytes_(options.bytes) {
  const std::uint64_t available = available_memory_bytes();
  if (bytes_ > available)
    throw Error(Errc::out_of_capacity, "host memory: asked for " + gib(bytes_) + ", the machine has " + gib(available) +
                                           " left; ask for less or raise the container's memory limit");
  const bool huge = options.huge_pages == HugePages::transparent && bytes_ >= kHugePageBytes;
  map(huge ? kHugePageBytes : os_page_bytes());
  // Both are requests: a kernel or a container that refuses them costs speed, not correctness.
  if (huge) (void)::madvise(data_, bytes_, MADV_HUGEPAGE);
  (void)topology.bind_memory(data_, bytes_, options.numa_node);
  try {
    touch(workers);
  } catch (...) {
    if (workers.lost()) workers.keep(std::move(mapping_));
    throw;
  }
}

std::uint64_t Slab::os_page_bytes() noexcept {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void Slab::map(std::uint64_t alignment) {
  // mmap aligns to OS pages only; what is mapped in excess is never touched and so costs nothing.
  auto mapping = std::make_unique<Mapping>(bytes_ + (alignment - os_page_bytes()));
  if (mapping->data == MAP_FAILED) {
    const std::string cause = std::generic_category().message(errno);
    throw Error(Errc::out_of_capacity, "host memory: mmap of " + gib(bytes_) + " failed (" + cause +
                                           "), the machine has " + gib(available_memory_bytes()) +
                                           " left; ask for less or raise `ulimit -v`");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping->data);
  data_ = static_cast<std::byte*>(mapping->data) + (div_up(address, alignment) * alignment - address);
  mapping_ = std::move(mapping);
}

void Slab::touch(const Workers& workers) const {
  const auto pieces = static_cast<std::uint32_t>(div_up(bytes_, kTouchBytes));
  workers.parallel_for(pieces, [data = data_, bytes = bytes_](std::uint32_t piece) {
    const std::uint64_t begin = piece * kTouchBytes;
    const std::uint64_t end = std::min(begin + kTouchBytes, bytes);
    for (std::uint64_t at = begin; at < end; at += os_page_bytes())
      *const_cast<volatile std::byte*>(data + at) = std::byte{0};
  });
}

}  // namespace sluice::cpu
