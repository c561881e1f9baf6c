#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "sluice/device.hpp"

namespace sluice::cpu {

/// A process of those that one launcher started on this machine, as LOCAL_RANK and LOCAL_WORLD_SIZE (torchrun) or Open
/// MPI's variables say; one of one without them, or if they make no sense.
struct LocalRank {
  std::uint32_t rank = 0;
  std::uint32_t ranks = 1;
};
[[nodiscard]] LocalRank local_rank();

/// [ranks] the node nearest to each rank's device, if rank i has device i of those that the process sees, as launchers
/// have it. kNone for all where the own device is another, or the machine does not say of one where it is: all ranks
/// must come to the same answer, for they do not ask each other. `root`: see Topology::nearest_node.
[[nodiscard]] std::vector<std::uint32_t> rank_nodes(const Topology& machine, const LocalRank& local,
                                                    const DeviceInfo& device, const std::string& root = "/");

/// The machine with the part of rank `rank` of its cores: as many for each, disjoint, those of its node first, shared
/// by the ranks of that node. Without a node (kNone) neighbours. And as much of the control group's quota. With more
/// ranks than cores some share one.  @throws Error{Errc::invalid_argument} if `nodes` [ranks] has no such rank
[[nodiscard]] Topology rank_part(const Topology& machine, std::uint32_t rank, std::span<const std::uint32_t> nodes);

/// The cores that an Engine on `device` takes: those of `pus`; without any, what the process is bound to or, where it
/// is not, its part of the machine, so that several processes of one launcher do not stand in each other's way.
/// @throws as Topology::of_pus
[[nodiscard]] Topology chosen_cores(const Topology& machine, std::span<const std::uint32_t> pus,
                                    const DeviceInfo& device);

}  // namespace sluice::cpu
