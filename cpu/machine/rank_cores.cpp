#include "cpu/machine/rank_cores.hpp"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "cpu/machine/core_shares.hpp"
#include "cpu/machine/limits.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::cpu {

LocalRank local_rank() {
  const auto read = [](const char* name) -> std::optional<std::uint32_t> {
    const char* const text = std::getenv(name);
    std::uint32_t number = 0;
    if (text == nullptr || *text == '\0') return {};
    const char* const end = text + std::strlen(text);
    const auto [stop, error] = std::from_chars(text, end, number);
    return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
  };
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"}};
  for (const auto& [rank_name, ranks_name] : kNames) {
    const auto rank = read(rank_name);
    const auto ranks = read(ranks_name);
    if (rank && ranks && *rank < *ranks) return {.rank = *rank, .ranks = *ranks};
  }
  return {};
}

std::vector<std::uint32_t> rank_nodes(const Topology& machine, const LocalRank& local, const DeviceInfo& device,
                                      const std::string& root) {
  std::vector<std::uint32_t> nodes(local.ranks, kNone);
  const std::vector<std::string>& visible = device.visible_bus_ids;
  if (visible.size() < local.ranks || visible[local.rank] != device.pci_bus_id) return nodes;
  std::vector<std::uint32_t> known;
  for (std::uint32_t rank = 0; rank < local.ranks; ++rank) {
    const std::optional<std::uint32_t> node = machine.nearest_node(visible[rank], root);
    if (!node) return nodes;
    known.push_back(*node);
  }
  return known;
}

Topology rank_part(const Topology& machine, std::uint32_t rank, std::span<const std::uint32_t> nodes) {
  if (rank >= nodes.size())
    throw Error(Errc::invalid_argument,
                "rank " + std::to_string(rank) + " of " + std::to_string(nodes.size()) + " is none; ranks begin at 0");
  std::vector<CoreClaim> claims;
  claims.reserve(nodes.size());
  std::vector<const CoreClaim*> all;
  for (const std::uint32_t node : nodes) {
    claims.push_back({.topology = machine, .numa_node = node});
    all.push_back(&claims.back());
  }
  const Topology part = machine.of_pus(divided(all)[rank].pus);
  return machine.quota() == kNoLimit ? part : part.limited(div_up(machine.quota(), nodes.size()));
}

Topology chosen_cores(const Topology& machine, std::span<const std::uint32_t> pus, const DeviceInfo& device) {
  if (!pus.empty()) return machine.of_pus(pus);
  if (machine.bound()) return machine;  // A launcher that binds has shared the machine out.
  const LocalRank local = local_rank();
  if (local.ranks == 1) return machine;
  return rank_part(machine, local.rank, rank_nodes(machine, local, device));
}

}  // namespace sluice::cpu
