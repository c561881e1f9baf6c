#include "scheduler/step_graph.hpp"

#include <algorithm>
#include <optional>
#include <set>
#include <string>

#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;

namespace {

constexpr NodeKind kKinds[] = {
    NodeKind::append, NodeKind::attend_near, NodeKind::rank_pages, NodeKind::hand_over,      NodeKind::write_through,
    NodeKind::select, NodeKind::place,       NodeKind::fetch,      NodeKind::attend_fetched, NodeKind::attend_far,
    NodeKind::merge,  NodeKind::observe,     NodeKind::promote,    NodeKind::progress};

std::optional<std::uint32_t> find(const StepGraph& graph, NodeKind kind) {
  for (std::uint32_t i = 0; i < graph.nodes.size(); ++i) {
    if (graph.nodes[i].kind == kind) return i;
  }
  return std::nullopt;
}

/// Everything that must have happened before node `index`.
std::set<NodeKind> before(const StepGraph& graph, std::uint32_t index) {
  std::set<NodeKind> kinds;
  for (const std::uint32_t i : graph.nodes[index].after) {
    kinds.insert(graph.nodes[i].kind);
    kinds.merge(before(graph, i));
  }
  return kinds;
}

std::vector<std::string> issue_order(const StepGraph& graph) {
  std::vector<std::string> names;
  for (const Node& node : graph.nodes) names.emplace_back(to_string(node.kind));
  return names;
}

}  // namespace

TEST_CASE("every node kind has its own name", "[step_graph]") {
  std::set<std::string> names;
  for (const NodeKind kind : kKinds) names.insert(to_string(kind));
  REQUIRE(names.size() == std::size(kKinds));
  REQUIRE(names.count("unknown") == 0);
}

TEST_CASE("any graph is topological, has each node once, and merges everything that attends", "[step_graph]") {
  const std::uint32_t bits = GENERATE(range(0u, 32u));
  const StepShape shape{.rank_pages = (bits & 1) != 0,
                        .select = (bits & 2) != 0,
                        .fetch = (bits & 4) != 0,
                        .observe = (bits & 8) != 0,
                        .progress = (bits & 16) != 0};
  CAPTURE(bits);
  const StepGraph graph = build_step_graph(shape);
  std::set<NodeKind> seen;
  for (std::uint32_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    REQUIRE(seen.insert(node.kind).second);
    REQUIRE(node.after.empty() == (node.kind == NodeKind::append));
    for (const std::uint32_t after : node.after) REQUIRE(after < i);
    // Nothing that the step waits for may wait for the background.
    if (!node.background) {
      for (const std::uint32_t after : node.after) REQUIRE_FALSE(graph.nodes[after].background);
    }
  }
  REQUIRE(find(graph, NodeKind::select).has_value() == shape.select);
  REQUIRE(find(graph, NodeKind::rank_pages).has_value() == (shape.select && shape.rank_pages));
  REQUIRE(find(graph, NodeKind::fetch).has_value() == (shape.select && shape.fetch));
  REQUIRE(find(graph, NodeKind::observe).has_value() == (shape.select && shape.observe));
  REQUIRE(find(graph, NodeKind::progress).has_value() == (shape.select && shape.progress));

  const auto merged = before(graph, *find(graph, NodeKind::merge));
  for (const NodeKind kind : {NodeKind::attend_near, NodeKind::attend_far, NodeKind::attend_fetched, NodeKind::progress}) {
    REQUIRE(merged.count(kind) == (find(graph, kind).has_value() ? 1u : 0u));
  }
  // Selecting reads the new token's key from its host copy.
  if (shape.select) REQUIRE(before(graph, *find(graph, NodeKind::select)).count(NodeKind::write_through) == 1);
}

TEST_CASE("the graph of the default policy, in issue order", "[step_graph]") {
  const StepGraph graph = build_step_graph(step_shape(parse_policy("history:share_group=on+pages:pages=max(16, 3%) | int4 | top_k=max(64, 1%) | near=3%"), PlacementMode::automatic));
  REQUIRE(issue_order(graph) == std::vector<std::string>{"append", "rank_pages", "hand_over", "attend_near",
                                                         "write_through", "select", "place", "fetch", "attend_fetched",
                                                         "attend_far", "merge", "observe", "promote"});
  for (const Node& node : graph.nodes) {
    const bool cpu = node.kind == NodeKind::write_through || node.kind == NodeKind::select ||
                     node.kind == NodeKind::place || node.kind == NodeKind::attend_far ||
                     node.kind == NodeKind::observe;
    const bool link = node.kind == NodeKind::fetch || node.kind == NodeKind::promote;
    REQUIRE(node.lane == (cpu ? Lane::cpu : link ? Lane::link : Lane::device));
    REQUIRE(node.background == (node.kind == NodeKind::observe || node.kind == NodeKind::promote));
  }
  // The CPU's chain does not wait for near attention.
  REQUIRE(before(graph, *find(graph, NodeKind::attend_far)).count(NodeKind::attend_near) == 0);
  REQUIRE(before(graph, *find(graph, NodeKind::hand_over)).count(NodeKind::rank_pages) == 1);
}

TEST_CASE("a policy brings only the branches that it needs", "[step_graph]") {
  const auto shape = [](const char* text, PlacementMode mode) { return step_shape(parse_policy(text), mode); };
  using enum PlacementMode;
  REQUIRE(shape("streaming", stream) ==
          StepShape{.rank_pages = false, .select = false, .fetch = false, .observe = false});
  REQUIRE(shape("streaming:dense=1", hybrid).select);
  REQUIRE(shape("full", stream) == StepShape{.rank_pages = false, .select = true, .fetch = true, .observe = false});
  REQUIRE(shape("lfps", hybrid) == StepShape{.rank_pages = false, .select = true, .fetch = false, .observe = true});
  REQUIRE(shape("history+pages | int4 | top_k=9 | near=3%", automatic) == StepShape{.rank_pages = true, .select = true, .fetch = true, .observe = true});
  REQUIRE(shape("exact | int4 | top_p=0.9", hybrid).rank_pages);  // The device estimates all tokens.
  REQUIRE_FALSE(shape("exact | int4 | top_k=9", hybrid).rank_pages);
  REQUIRE_FALSE(shape("exact+history | int4 | top_p=0.9", hybrid).rank_pages);
  REQUIRE(shape("sluice", near) == StepShape{.rank_pages = false, .select = false, .fetch = false, .observe = false});
  REQUIRE(shape("pages | progressive=0.9", stream).progress);
  REQUIRE_FALSE(shape("pages | progressive=0.9", hybrid).progress);
  REQUIRE(unite(shape("streaming", hybrid), shape("lfps", hybrid)) == shape("lfps", hybrid));
  REQUIRE(unite(shape("full", stream), shape("sluice", hybrid)) == shape("sluice", stream));
}
