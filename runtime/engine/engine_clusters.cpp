// Sequences whose policies choose among clusters on the device: when their keys are clustered. The device does it in
// the order of the stream, before the forward that is planned: what is chosen never depends on how far it has got.
#include <string>

#include "runtime/engine/impl.hpp"

namespace sluice {

void Engine::Impl::require_clusters(SequenceId id, const Sequence& sequence, std::uint32_t tokens) const {
  if (sequence.clusters.slot == kNone) return;
  scheduler::ClusterSchedule schedule = sequence.clusters.schedule;
  schedule.advance(tokens);
  if (schedule.clusters() <= memory.largest().max_clusters) return;
  throw Error(Errc::out_of_capacity, "plan: keys of sequence " + std::to_string(id.value) + " would be in " +
                                         std::to_string(schedule.clusters()) + " clusters, and there is room for " +
                                         std::to_string(memory.largest().max_clusters) +
                                         "; name the policy in EngineOptions::policies, or make larger ones "
                                         "(clusters:size=)");
}

std::vector<ForwardClustering> Engine::Impl::due_clusterings(std::span<const Wanted> wanted) const {
  std::vector<ForwardClustering> due;
  for (const auto& [sequence, item] : wanted) {
    Sequence::Clusters& clusters = sequence->clusters;
    if (item.prefill || clusters.slot == kNone) continue;
    clusters.schedule.advance(sequence->planned);
    const PolicySpec& spec = sequence->spec;
    clusters.schedule.for_each_behind(clusters.made, [&](std::uint32_t first, std::uint32_t count,
                                                         std::uint32_t first_cluster, std::uint32_t number) {
      due.push_back({.list = sequence->pages().slot(),
                     .slot = clusters.slot,
                     .first = first,
                     .count = count,
                     .first_cluster = first_cluster,
                     .clusters = number,
                     .iterations = spec.clusters.iterations,
                     .dense_layers = spec.dense_layers,
                     .dense_every = spec.dense_every});
    });
  }
  return due;
}

void Engine::Impl::note_clustered(std::span<const Wanted> wanted) noexcept {
  for (const auto& [sequence, item] : wanted) {
    Sequence::Clusters& clusters = sequence->clusters;
    if (!item.prefill && clusters.slot != kNone) clusters.made = clusters.schedule.clustered();
  }
}

}  // namespace sluice
