#include "cpu/machine/topology.hpp"

#include <hwloc.h>
#include <hwloc/linux.h>

#include <algorithm>
#include <cctype>
#include <new>
#include <sstream>
#include <utility>

#include "cpu/machine/limits.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::cpu {
namespace {

struct FreeBitmap {
  void operator()(hwloc_bitmap_t bitmap) const noexcept { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, FreeBitmap>;

struct DestroyTopology {
  void operator()(hwloc_topology_t topology) const noexcept { hwloc_topology_destroy(topology); }
};
using Handle = std::unique_ptr<hwloc_topology, DestroyTopology>;

Handle create() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0)
    throw Error(Errc::io,
                "hwloc cannot be initialised; check that memory is left and that libhwloc matches its plugins");
  return Handle(raw);
}

std::uint32_t count_of(hwloc_topology_t topology, hwloc_obj_type_t type) noexcept {
  const int count = hwloc_get_nbobjs_by_type(topology, type);
  return count > 0 ? static_cast<std::uint32_t>(count) : 0;
}

std::string size_text(std::uint64_t bytes) {
  if (bytes >= GiB) return std::to_string(bytes / GiB) + " GiB";
  if (bytes >= MiB) return std::to_string(bytes / MiB) + " MiB";
  return std::to_string(bytes / KiB) + " KiB";
}

}  // namespace

struct Topology::Impl {
  Handle handle;
  Bitmap usable;            ///< PUs of the topology that the process is also bound to
  std::vector<Core> cores;  ///< at least one, in hwloc's logical order
  std::uint64_t quota = kNoLimit;

  explicit Impl(Handle loaded);
  void add_cores(hwloc_obj_type_t type);
  [[nodiscard]] bool real() const noexcept { return hwloc_topology_is_thissystem(handle.get()) != 0; }
  [[nodiscard]] hwloc_obj_t node(std::uint32_t index) const noexcept {
    return hwloc_get_obj_by_type(handle.get(), HWLOC_OBJ_NUMANODE, index);
  }
  [[nodiscard]] std::uint32_t node_of(unsigned pu) const noexcept;
  /// That PU alone, to bind a thread to; null if the process may not use it. hwloc itself reports success for binding on
  /// a machine that is not this one.
  [[nodiscard]] Bitmap one(std::uint32_t pu) const noexcept {
    if (!real() || hwloc_bitmap_isset(usable.get(), pu) == 0) return nullptr;
    Bitmap set(hwloc_bitmap_alloc());
    return set && hwloc_bitmap_only(set.get(), pu) == 0 ? std::move(set) : nullptr;
  }
};

Topology::Impl::Impl(Handle loaded) : handle(std::move(loaded)), usable(hwloc_bitmap_alloc()) {
  if (!usable) throw std::bad_alloc();
  // Control groups already shaped the topology; the affinity mask (taskset, MPI launchers) did not.
  const bool bound = real() && hwloc_get_cpubind(handle.get(), usable.get(), HWLOC_CPUBIND_PROCESS) == 0;
  const hwloc_const_cpuset_t all = hwloc_topology_get_topology_cpuset(handle.get());
  if (!bound) hwloc_bitmap_copy(usable.get(), all);
  hwloc_bitmap_and(usable.get(), usable.get(), all);
  if (hwloc_bitmap_iszero(usable.get()) != 0) hwloc_bitmap_copy(usable.get(), all);

  add_cores(HWLOC_OBJ_CORE);
  if (cores.empty()) add_cores(HWLOC_OBJ_PU);  // Some virtual machines hide their cores.
  if (cores.empty()) cores.push_back({});
  if (real()) quota = cpu_quota();
}

void Topology::Impl::add_cores(hwloc_obj_type_t type) {
  const Bitmap here(hwloc_bitmap_alloc());
  if (!here) throw std::bad_alloc();
  for (hwloc_obj_t obj = nullptr; (obj = hwloc_get_next_obj_by_type(handle.get(), type, obj)) != nullptr;) {
    hwloc_bitmap_and(here.get(), obj->cpuset, usable.get());
    const int first = hwloc_bitmap_first(here.get());
    if (first < 0) continue;
    const auto pu = static_cast<std::uint32_t>(first);
    const auto core = static_cast<std::uint32_t>(hwloc_bitmap_first(obj->cpuset));
    cores.push_back({.pu = pu, .numa_node = node_of(pu), .core = core});
  }
}

std::uint32_t Topology::Impl::node_of(unsigned pu) const noexcept {
  const std::uint32_t nodes = count_of(handle.get(), HWLOC_OBJ_NUMANODE);
  for (std::uint32_t i = 0; i < nodes; ++i)
    if (hwloc_bitmap_isset(node(i)->cpuset, pu) != 0) return i;
  return kNone;
}

Topology::Topology() {
  Handle handle = create();
  if (hwloc_topology_load(handle.get()) != 0)
    throw Error(Errc::io, "hwloc cannot read this machine's topology; check that /sys and /proc are mounted");
  impl_ = std::make_shared<const Impl>(std::move(handle));
}

Topology::Topology(const std::string& synthetic) {
  Handle handle = create();
  if (hwloc_topology_set_synthetic(handle.get(), synthetic.c_str()) != 0 || hwloc_topology_load(handle.get()) != 0)
    throw Error(Errc::invalid_argument,
                "'" + synthetic + "' is no synthetic hwloc topology; write e.g. \"numa:2 core:4 pu:2\"");
  impl_ = std::make_shared<const Impl>(std::move(handle));
}

Topology Topology::from_xml(const std::string& path) {
  Handle handle = create();
  if (hwloc_topology_set_io_types_filter(handle.get(), HWLOC_TYPE_FILTER_KEEP_IMPORTANT) != 0 ||
      hwloc_topology_set_xml(handle.get(), path.c_str()) != 0 || hwloc_topology_load(handle.get()) != 0)
    throw Error(Errc::invalid_argument, "'" + path + "' is no topology that hwloc can read; write it with lstopo");
  return Topology(std::make_shared<const Impl>(std::move(handle)));
}

std::uint32_t Topology::numa_nodes() const noexcept {
  return std::max(1u, count_of(impl_->handle.get(), HWLOC_OBJ_NUMANODE));
}

const std::vector<Topology::Core>& Topology::chosen() const noexcept { return chosen_ ? *chosen_ : impl_->cores; }

bool Topology::bound() const noexcept {
  return hwloc_bitmap_isequal(impl_->usable.get(), hwloc_topology_get_topology_cpuset(impl_->handle.get())) == 0;
}

std::uint32_t Topology::cores() const noexcept {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(chosen().size(), quota()));
}

std::uint64_t Topology::quota() const noexcept { return quota_ != 0 ? quota_ : impl_->quota; }

Topology Topology::of_pus(std::span<const std::uint32_t> pus) const {
  std::vector<Core> cores;
  for (const std::uint32_t pu : pus) {
    const std::string name = "PU " + std::to_string(pu);
    const hwloc_obj_t object = hwloc_get_pu_obj_by_os_index(impl_->handle.get(), pu);
    if (object == nullptr || hwloc_bitmap_isset(impl_->usable.get(), pu) == 0)
      throw Error(Errc::invalid_argument, name +
                                              " is none that this process may use; `taskset -p` and `sluice doctor` "
                                              "show those");
    const hwloc_obj_t core = hwloc_get_ancestor_obj_by_type(impl_->handle.get(), HWLOC_OBJ_CORE, object);
    for (const Core& other : cores) {
      const bool same = other.pu == pu || (core != nullptr && hwloc_bitmap_isset(core->cpuset, other.pu) != 0);
      if (same)
        throw Error(Errc::invalid_argument,
                    name + " and PU " + std::to_string(other.pu) + " are of one core; name each core once");
    }
    const int first = core != nullptr ? hwloc_bitmap_first(core->cpuset) : static_cast<int>(pu);
    cores.push_back({.pu = pu, .numa_node = impl_->node_of(pu), .core = static_cast<std::uint32_t>(first)});
  }
  if (cores.empty()) throw Error(Errc::invalid_argument, "no core was named; name at least one");
  Topology chosen = *this;
  chosen.chosen_ = std::make_shared<const std::vector<Core>>(std::move(cores));
  return chosen;
}

Topology Topology::limited(std::uint64_t cpus) const {
  Topology less = *this;
  less.quota_ = std::max<std::uint64_t>(cpus, 1);
  return less;
}

std::vector<Topology::Core> Topology::cores_near(std::uint32_t numa_node) const {
  std::vector<Core> cores = chosen();
  std::stable_partition(cores.begin(), cores.end(),
                        [numa_node](const Core& core) { return core.numa_node == numa_node; });
  return cores;
}

std::vector<std::uint32_t> Topology::core_order(std::uint32_t numa_node) const {
  std::vector<std::uint32_t> order;
  for (const Core& core : cores_near(numa_node)) order.push_back(core.pu);
  return order;
}

std::optional<std::uint32_t> Topology::nearest_node(const std::string& pci_bus_id, const std::string& root) const {
  const hwloc_topology_t topology = impl_->handle.get();
  const Bitmap near(hwloc_bitmap_alloc());
  if (!near) throw std::bad_alloc();
  if (const hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology, pci_bus_id.c_str()); device != nullptr) {
    hwloc_bitmap_copy(near.get(), hwloc_get_non_io_ancestor_obj(topology, device)->cpuset);
  } else {
    // Of this machine hwloc was not asked for devices, which takes long; the kernel knows the one that matters.
    std::string name = pci_bus_id;
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    const std::string file = root + "/sys/bus/pci/devices/" + name + "/local_cpus";
    const bool elsewhere = synthetic() && root == "/";
    if (name.empty() || elsewhere || hwloc_linux_read_path_as_cpumask(file.c_str(), near.get()) != 0) return {};
  }
  std::optional<std::uint32_t> nearest;
  bool all = true;
  for (std::uint32_t i = 0; i < count_of(topology, HWLOC_OBJ_NUMANODE); ++i) {
    const hwloc_const_cpuset_t cores = impl_->node(i)->cpuset;
    if (hwloc_bitmap_iszero(cores) != 0) continue;  // Memory without cores.
    const bool touches = hwloc_bitmap_intersects(cores, near.get()) != 0;
    all = all && touches;
    if (touches && !nearest) nearest = i;
  }
  return all ? std::nullopt : nearest;
}

bool Topology::synthetic() const noexcept { return !impl_->real(); }

bool Topology::bind_this_thread(std::uint32_t pu) const noexcept {
  const Bitmap set = impl_->one(pu);
  return set && hwloc_set_cpubind(impl_->handle.get(), set.get(), HWLOC_CPUBIND_THREAD) == 0;
}

bool Topology::bind_thread(std::thread::native_handle_type thread, std::uint32_t pu) const noexcept {
  const Bitmap set = impl_->one(pu);
  return set && hwloc_set_thread_cpubind(impl_->handle.get(), thread, set.get(), 0) == 0;
}

std::optional<std::uint32_t> Topology::pu_of_this_thread() const noexcept {
  const Bitmap set(hwloc_bitmap_alloc());
  if (synthetic() || !set) return {};
  if (hwloc_get_last_cpu_location(impl_->handle.get(), set.get(), HWLOC_CPUBIND_THREAD) != 0) return {};
  const int pu = hwloc_bitmap_first(set.get());
  return pu < 0 ? std::nullopt : std::optional(static_cast<std::uint32_t>(pu));
}

std::vector<std::uint32_t> Topology::binding_of_this_thread() const {
  const Bitmap set(hwloc_bitmap_alloc());
  if (!set) throw std::bad_alloc();
  std::vector<std::uint32_t> pus;
  if (synthetic() || hwloc_get_cpubind(impl_->handle.get(), set.get(), HWLOC_CPUBIND_THREAD) != 0) return pus;
  for (int pu = hwloc_bitmap_first(set.get()); pu >= 0; pu = hwloc_bitmap_next(set.get(), pu))
    pus.push_back(static_cast<std::uint32_t>(pu));
  return pus;
}

bool Topology::bind_this_thread(std::span<const std::uint32_t> pus) const noexcept {
  const Bitmap set(hwloc_bitmap_alloc());
  if (synthetic() || !set || pus.empty()) return false;
  for (const std::uint32_t pu : pus) {
    if (hwloc_bitmap_set(set.get(), pu) != 0) return false;
  }
  return hwloc_set_cpubind(impl_->handle.get(), set.get(), HWLOC_CPUBIND_THREAD) == 0;
}

bool Topology::bind_memory(void* data, std::uint64_t bytes, std::uint32_t numa_node) const noexcept {
  const hwloc_obj_t node = impl_->node(numa_node);
  if (synthetic() || node == nullptr || data == nullptr || bytes == 0) return false;
  // Not STRICT: a full node spills to its neighbour, which is slow; strictly bound memory would kill instead.
  return hwloc_set_area_membind(impl_->handle.get(), data, bytes, node->nodeset, HWLOC_MEMBIND_BIND,
                                HWLOC_MEMBIND_BYNODESET) == 0;
}

std::string Topology::summary() const {
  const hwloc_topology_t topology = impl_->handle.get();
  std::ostringstream text;
  text << numa_nodes() << " NUMA node(s), " << chosen().size() << " core(s), "
       << hwloc_bitmap_weight(impl_->usable.get()) << " PU(s)";
  for (const auto& [type, name] :
       {std::pair{HWLOC_OBJ_L1CACHE, "L1d"}, std::pair{HWLOC_OBJ_L2CACHE, "L2"}, std::pair{HWLOC_OBJ_L3CACHE, "L3"}}) {
    const hwloc_obj_t cache = hwloc_get_obj_by_type(topology, type, 0);
    if (cache == nullptr || cache->attr->cache.size == 0) continue;
    text << ", " << name << ' ' << count_of(topology, type) << " x " << size_text(cache->attr->cache.size);
  }
  if (impl_->quota != kNoLimit) text << ", quota of " << impl_->quota << " CPU(s)";
  if (synthetic()) text << ", synthetic";
  return text.str();
}

}  // namespace sluice::cpu
