#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sluice::cpu {

/// Machine topology through hwloc: what this process may use, not what the machine has.
/// Immutable after construction; safe to share between threads. Copies are cheap: they share what was read.
class Topology {
 public:
  /// The machine that this process runs on.  @throws Error{Errc::io} if hwloc cannot read it.
  Topology();
  /// A machine that nobody owns, in hwloc's synthetic language, e.g. "numa:2 core:4 pu:2".
  /// Binding calls do nothing on it.  @throws Error{Errc::invalid_argument} naming the description.
  explicit Topology(const std::string& synthetic);

  [[nodiscard]] std::uint32_t numa_nodes() const noexcept;
  /// Physical cores that the process may use, over all nodes; at least 1. Fewer than core_order() lists
  /// where a control group grants less CPU time than that.
  [[nodiscard]] std::uint32_t cores() const noexcept;
  /// OS index of the first PU of each usable core, cores of `numa_node` (logical
  /// index, below numa_nodes()) first, then the rest.
  [[nodiscard]] std::vector<std::uint32_t> core_order(std::uint32_t numa_node) const;
  [[nodiscard]] bool synthetic() const noexcept;
  /// Total memory of a node in bytes; 0 if unknown.
  [[nodiscard]] std::uint64_t node_memory_bytes(std::uint32_t numa_node) const noexcept;
  /// Binds the calling thread to one PU. False if the system refuses; never throws.
  bool bind_this_thread(std::uint32_t pu) const noexcept;
  /// Asks for [data, data + bytes) to live on a node. False if the system refuses; never throws.
  bool bind_memory(void* data, std::uint64_t bytes, std::uint32_t numa_node) const noexcept;
  /// One line for `doctor`: nodes, cores, PUs, caches.
  [[nodiscard]] std::string summary() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace sluice::cpu
