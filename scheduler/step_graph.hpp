#pragma once

#include <cstdint>
#include <vector>

#include "sluice/plan.hpp"
#include "sluice/policy.hpp"

namespace sluice::scheduler {

/// The work of one layer of one decode step (DESIGN section 3), one kind per node.
enum class NodeKind : std::uint8_t {
  append,          ///< k, v of the new token -> open page (device)
  attend_near,     ///< near pages -> near partial (device)
  rank_pages,      ///< q x digests -> best pages per query head (device)
  hand_over,       ///< q, k, v and ranked pages -> pinned memory, flag (device)
  write_through,   ///< k, v -> host copy of the open page (cpu; waits for the flag)
  select,          ///< q -> Selection per KV head (cpu)
  place,           ///< Selection -> far | fetch (cpu)
  fetch,           ///< fetched pages -> staging slots (link)
  attend_fetched,  ///< staging slots -> fetched partial (device)
  progress,        ///< pages by rank -> partials, until the share attended is enough (cpu; queues on link and device)
  attend_far,      ///< far selection -> far partial (cpu)
  merge,           ///< partials -> out (device)
  observe,         ///< weights -> score tables, then candidates and hot pages of the next step (cpu, background)
  promote,         ///< hot pages -> near slots (link, background)
};

[[nodiscard]] const char* to_string(NodeKind kind) noexcept;

struct Node {
  NodeKind kind{};
  Lane lane{};
  bool background = false;            ///< not waited for by the step; the layer's next step waits
  std::vector<std::uint32_t> after;   ///< indices of nodes that must come first; all smaller than this node's
};

/// Nodes in an order in which they may be issued: device and link nodes as early as their inputs allow.
struct StepGraph {
  std::vector<Node> nodes;
};

/// Which of the graph's optional branches a batch of sequences needs.
struct StepShape {
  bool rank_pages = false;  ///< some policy ranks pages, or has the device estimate tokens
  bool select = true;       ///< something may be attended beyond the near set
  bool fetch = false;       ///< placement may fetch
  bool observe = false;     ///< some policy keeps history
  bool progress = false;    ///< some policy's pages are visited by the device until they hold enough
  friend bool operator==(const StepShape&, const StepShape&) = default;
};

/// Whether a device can find what the policy selects: it ranks pages, or takes all, estimates their tokens by 4-bit
/// copies and cuts them by top-p. Other sources are known to the CPU alone.
[[nodiscard]] bool prunes_on_device(const PolicySpec& spec) noexcept;
[[nodiscard]] StepShape step_shape(const PolicySpec& spec, PlacementMode mode) noexcept;
[[nodiscard]] StepShape unite(StepShape a, StepShape b) noexcept;
[[nodiscard]] StepGraph build_step_graph(const StepShape& shape);

}  // namespace sluice::scheduler
