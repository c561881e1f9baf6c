#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sluice/units.hpp"

namespace sluice::cpu {

/// Machine topology through hwloc: what this process may use, not what the machine has.
/// Immutable after construction; safe to share between threads. Copies are cheap: they share what was read.
class Topology {
 public:
  /// A core by the one PU that a worker is bound to. Hyper-threads of a core share its load ports,
  /// so a second worker on them gains nothing on memory-bound kernels.
  struct Core {
    std::uint32_t pu = 0;
    std::uint32_t numa_node = kNone;
    std::uint32_t core = 0;  ///< OS index of the core's first PU: the same for all PUs of a core
  };

  /// The machine that this process runs on.  @throws Error{Errc::io} if hwloc cannot read it.
  Topology();
  /// An imaginary machine, in hwloc's synthetic language, e.g. "numa:2 core:4 pu:2".
  /// Binding calls do nothing on it.  @throws Error{Errc::invalid_argument} naming the description.
  explicit Topology(const std::string& synthetic);
  /// A machine that hwloc has described as XML (`lstopo machine.xml`), its PCI devices included. Binding calls do
  /// nothing on it.  @throws Error{Errc::invalid_argument} naming the file.
  [[nodiscard]] static Topology from_xml(const std::string& path);

  [[nodiscard]] std::uint32_t numa_nodes() const noexcept;
  /// Physical cores that the process may use, over all nodes; at least 1. Fewer than core_order() lists
  /// where a control group grants less CPU time than that.
  [[nodiscard]] std::uint32_t cores() const noexcept;
  /// OS index of the first PU of each usable core, cores of `numa_node` (logical
  /// index, below numa_nodes()) first, then the rest.
  [[nodiscard]] std::vector<std::uint32_t> core_order(std::uint32_t numa_node) const;
  /// The same cores in the same order.
  [[nodiscard]] std::vector<Core> cores_near(std::uint32_t numa_node) const;
  /// CPUs worth of time that the control group grants; kNoLimit (cpu/machine/limits.hpp) without a quota.
  [[nodiscard]] std::uint64_t quota() const noexcept;
  /// The same machine with these cores alone, given by the OS index of any of their PUs.
  /// @throws Error{Errc::invalid_argument} naming the PU that the process may not use, or the core that is there twice.
  [[nodiscard]] Topology of_pus(std::span<const std::uint32_t> pus) const;
  /// The same cores with `cpus` CPUs worth of time, at least one.
  [[nodiscard]] Topology limited(std::uint64_t cpus) const;
  /// Whether the process may run on some of the machine's PUs only, by an affinity mask.
  [[nodiscard]] bool bound() const noexcept;
  /// Whether it is another machine than this one.
  [[nodiscard]] bool synthetic() const noexcept;
  /// The node (logical index) whose cores are nearest to a PCI device, given as "0000:1b:00.0". Empty if the machine
  /// does not say: no such device, or one that is as near to all nodes, as in many virtual machines. `root` is "/", or
  /// a directory with a `sys` of its own for tests.
  [[nodiscard]] std::optional<std::uint32_t> nearest_node(const std::string& pci_bus_id,
                                                          const std::string& root = "/") const;
  /// Binds the calling thread to one PU. False if the system refuses; never throws.
  bool bind_this_thread(std::uint32_t pu) const noexcept;
  /// Binds another thread of this process to one PU, whether it runs or not. Likewise.
  bool bind_thread(std::thread::native_handle_type thread, std::uint32_t pu) const noexcept;
  /// OS index of the PU that the calling thread runs on, or did a moment ago; empty if the system does not say, or on a
  /// machine that is not this one.
  [[nodiscard]] std::optional<std::uint32_t> pu_of_this_thread() const noexcept;
  /// PUs that the calling thread may run on, by OS index, ascending; empty if the system does not say, or on a machine
  /// that is not this one.
  [[nodiscard]] std::vector<std::uint32_t> binding_of_this_thread() const;
  /// Lets the calling thread run on these, whether the topology knows them or not. False if the system refuses.
  bool bind_this_thread(std::span<const std::uint32_t> pus) const noexcept;
  /// Asks for [data, data + bytes) to live on a node. False if the system refuses; never throws.
  bool bind_memory(void* data, std::uint64_t bytes, std::uint32_t numa_node) const noexcept;
  /// One line for `doctor`: nodes, cores, PUs, caches.
  [[nodiscard]] std::string summary() const;

 private:
  struct Impl;
  explicit Topology(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  [[nodiscard]] const std::vector<Core>& chosen() const noexcept;

  std::shared_ptr<const Impl> impl_;
  std::shared_ptr<const std::vector<Core>> chosen_;  ///< null: all that the process may use
  std::uint64_t quota_ = 0;                          ///< CPUs worth of time; 0: what the control group grants
};

}  // namespace sluice::cpu
