#include "cpu/slab.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "cpu/limits.hpp"
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
    (void)::munmap(mapped_, mapped_bytes_);
    throw;
  }
}

Slab::~Slab() { (void)::munmap(mapped_, mapped_bytes_); }

std::uint64_t Slab::os_page_bytes() noexcept {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

void Slab::map(std::uint64_t alignment) {
  // mmap aligns to OS pages only; what is mapped in excess is never touched and so costs nothing.
  mapped_bytes_ = bytes_ + (alignment - os_page_bytes());
  void* const raw = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) {
    const std::string cause = std::generic_category().message(errno);
    throw Error(Errc::out_of_capacity, "host memory: mmap of " + gib(bytes_) + " failed (" + cause +
                                           "), the machine has " + gib(available_memory_bytes()) +
                                           " left; ask for less or raise `ulimit -v`");
  }
  mapped_ = static_cast<std::byte*>(raw);
  const auto address = reinterpret_cast<std::uintptr_t>(raw);
  data_ = mapped_ + (div_up(address, alignment) * alignment - address);
}

void Slab::touch(const Workers& workers) const {
  const auto pieces = static_cast<std::uint32_t>(div_up(bytes_, kTouchBytes));
  workers.parallel_for(pieces, [this](std::uint32_t piece) {
    const std::uint64_t begin = piece * kTouchBytes;
    const std::uint64_t end = std::min(begin + kTouchBytes, bytes_);
    for (std::uint64_t at = begin; at < end; at += os_page_bytes())
      *const_cast<volatile std::byte*>(data_ + at) = std::byte{0};
  });
}

}  // namespace sluice::cpu
