#include "tools/cli/text/facts.hpp"

#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>

#include "cpu/kernels/kernels.hpp"
#include "cpu/machine/limits.hpp"
#include "cpu/machine/topology.hpp"
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::tools {
namespace {

std::uint64_t meminfo_bytes(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(key + ":", 0) == 0) return std::stoull(line.substr(key.size() + 1)) * KiB;
  }
  return 0;
}

std::string operating_system() {
  utsname name{};
  if (::uname(&name) != 0) return "unknown";
  return std::string(name.sysname) + " " + name.release + " " + name.machine;
}

}  // namespace

const char* version() noexcept { return SLUICE_VERSION; }

MemoryFacts memory_facts() {
  MemoryFacts facts{.total = meminfo_bytes("MemTotal"), .available = cpu::available_memory_bytes()};
  // Without /proc only control groups limit it, and one without a limit has a number that no machine has bytes for.
  constexpr std::uint64_t kMore = std::uint64_t{1} << 50;
  if (facts.total == 0 && facts.available >= kMore) facts.available = MemoryFacts::kNoLimit;
  rlimit locked{};
  if (::getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY) {
    facts.locked_limit = locked.rlim_cur;
  }
  return facts;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::uint64_t last_level_cache_bytes() noexcept {
  const long bytes = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? static_cast<std::uint64_t>(bytes) : 32 * MiB;
}

Json host_facts() {
  const MemoryFacts memory = memory_facts();
  Json facts = {
      {"cpu", cpu_model()}, {"isa", nullptr}, {"cores", nullptr}, {"numa_nodes", nullptr}, {"topology", nullptr}};
  try {
    const cpu::Topology topology;
    facts["cores"] = topology.cores();
    facts["numa_nodes"] = topology.numa_nodes();
    facts["topology"] = topology.summary();
    facts["isa"] = cpu::fastest_kernels().name;
  } catch (const Error&) {
    // A report without a machine map is still a report; `doctor` is where the reason is told.
  }
  facts["memory_bytes"] = memory.total;
  facts["memory_available_bytes"] = memory.available == MemoryFacts::kNoLimit ? Json() : Json(memory.available);
  facts["os"] = operating_system();
  facts["compiler"] = __VERSION__;
  facts["gpu"] = cuda_devices() == 0 ? Json() : Json(cuda_device_facts(0).name);
  return facts;
}

}  // namespace sluice::tools
