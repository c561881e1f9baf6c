#include "scheduler/step_graph.hpp"

#include <array>
#include <initializer_list>
#include <utility>

namespace sluice::scheduler {

const char* to_string(NodeKind kind) noexcept {
  switch (kind) {
    case NodeKind::append: return "append";
    case NodeKind::attend_near: return "attend_near";
    case NodeKind::rank_pages: return "rank_pages";
    case NodeKind::hand_over: return "hand_over";
    case NodeKind::write_through: return "write_through";
    case NodeKind::select: return "select";
    case NodeKind::place: return "place";
    case NodeKind::fetch: return "fetch";
    case NodeKind::attend_fetched: return "attend_fetched";
    case NodeKind::progress: return "progress";
    case NodeKind::attend_far: return "attend_far";
    case NodeKind::merge: return "merge";
    case NodeKind::observe: return "observe";
    case NodeKind::promote: return "promote";
  }
  return "unknown";
}

bool prunes_on_device(const PolicySpec& spec) noexcept {
  const bool alone = spec.sources == static_cast<std::uint8_t>(Source::pages) ||
                     spec.sources == static_cast<std::uint8_t>(Source::exact);
  return alone && spec.estimate == Estimate::int4 && spec.budget.kind == BudgetKind::top_p;
}

StepShape step_shape(const PolicySpec& spec, PlacementMode mode) noexcept {
  // With everything near, nothing is left to select, whatever the policy.
  const bool select = mode != PlacementMode::near && (spec.sources != 0 || spec.dense_layers != 0 || spec.dense_every != 0);
  return {.rank_pages = select && (spec.uses(Source::pages) || prunes_on_device(spec)),
          .select = select,
          .fetch = select && (mode == PlacementMode::stream || mode == PlacementMode::automatic),
          .observe = select && (spec.uses(Source::history) || spec.uses(Source::clusters)),
          .progress = select && mode == PlacementMode::stream && spec.uses(Source::pages) &&
                      spec.budget.kind == BudgetKind::progressive};
}

StepShape unite(StepShape a, StepShape b) noexcept {
  return {.rank_pages = a.rank_pages || b.rank_pages,
          .select = a.select || b.select,
          .fetch = a.fetch || b.fetch,
          .observe = a.observe || b.observe,
          .progress = a.progress || b.progress};
}

namespace {

enum class When : std::uint8_t { in_step, background };

/// Appends nodes by kind; dependencies on nodes that the shape left out are dropped.
class Builder {
 public:
  void add(NodeKind kind, Lane lane, std::initializer_list<NodeKind> after, When when = When::in_step) {
    Node node{.kind = kind, .lane = lane, .background = when == When::background, .after = {}};
    for (const NodeKind before : after) {
      const std::uint32_t index = index_[static_cast<std::size_t>(before)];
      if (index != 0) node.after.push_back(index - 1);
    }
    graph_.nodes.push_back(std::move(node));
    index_[static_cast<std::size_t>(kind)] = static_cast<std::uint32_t>(graph_.nodes.size());
  }
  [[nodiscard]] StepGraph take() { return std::move(graph_); }

 private:
  StepGraph graph_;
  std::array<std::uint32_t, static_cast<std::size_t>(NodeKind::promote) + 1> index_{};  // 1-based; 0: absent
};

}  // namespace

StepGraph build_step_graph(const StepShape& shape) {
  using enum NodeKind;
  Builder graph;
  graph.add(append, Lane::device, {});
  if (shape.select && shape.rank_pages) graph.add(rank_pages, Lane::device, {append});
  // Before attend_near, so that the CPU selects while the device attends.
  graph.add(hand_over, Lane::device, {append, rank_pages});
  graph.add(attend_near, Lane::device, {append});
  graph.add(write_through, Lane::cpu, {hand_over});
  if (shape.select) {
    graph.add(select, Lane::cpu, {write_through});
    graph.add(place, Lane::cpu, {select});
    if (shape.fetch) {
      graph.add(fetch, Lane::link, {place});
      graph.add(attend_fetched, Lane::device, {fetch});
    }
    graph.add(attend_far, Lane::cpu, {place});
    // Last, so that others need not wait for its turns.
    if (shape.progress) graph.add(progress, Lane::cpu, {place});
  }
  graph.add(merge, Lane::device, {attend_near, attend_far, attend_fetched, progress});
  if (shape.select && shape.observe) {
    graph.add(observe, Lane::cpu, {select}, When::background);
    graph.add(promote, Lane::link, {observe}, When::background);
  }
  return graph.take();
}

}  // namespace sluice::scheduler
