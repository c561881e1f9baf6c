// The order of a forward's tasks is one that their inputs and outputs allow, whatever the forward is made for.
#include "scheduler/plan/task_graph.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/task_order.hpp"

using namespace sluice;
using namespace sluice::scheduler;
using namespace sluice::test;

namespace {

constexpr std::uint32_t kLayers = 3;

/// Of all buckets, placements and ways to wait, each kind of forward once.
std::vector<ForwardKind> all_kinds() {
  std::vector<ForwardKind> kinds;
  for (std::uint32_t bits = 0; bits < 1u << 14; ++bits) {
    std::uint32_t left = bits;
    const auto next = [&] { return (std::exchange(left, left >> 1) & 1) != 0; };
    ForwardKind kind{.prefills = next(), .decodes = next(), .whole = next()};
    const bool splits = kind.decodes && !kind.whole;
    kind.ranks = next() && splits;
    kind.chooses = next() && splits;
    kind.clusters = next();
    kind.proposes = next() && kind.chooses;
    kind.promotes = next();
    kind.audits = next() && splits;
    kind.asks = next() && splits;
    kind.fetches = next() && splits;
    kind.fetches_all = next() && kind.fetches;
    kind.fetches_chosen = next() && kind.fetches_all && kind.asks;
    for (const Handover handover : {Handover::device, Handover::stream, Handover::host}) {
      kind.handover = handover;
      if (std::ranges::find(kinds, kind) == kinds.end()) kinds.push_back(kind);
    }
  }
  return kinds;
}

/// Of a node, that it reads what no task before it has written, and neither the host nor the forward before.
std::optional<std::string> unwritten(const ForwardTasks& tasks) {
  // A model begins its first layer without the outputs of one before.
  Resources written{Resource::plan, Resource::near_cache, Resource::clusters, Resource::keys,
                    Resource::arrivals, Resource::filled, Resource::out, Resource::outcome};
  for (const TaskNode& node : tasks.nodes) {
    for (std::uint32_t i = 0; i < kResources; ++i) {
      const auto resource = static_cast<Resource>(i);
      if (node.task.reads.has(resource) && !written.has(resource))
        return std::string(to_string(node.task.verb)) + " reads resource " + std::to_string(i);
    }
    for (std::uint32_t i = 0; i < kResources; ++i)
      if (node.task.writes.has(static_cast<Resource>(i))) written.add(static_cast<Resource>(i));
  }
  return std::nullopt;
}

}  // namespace

TEST_CASE("whatever a task reads is written, and edges go forwards", "[plan]") {
  const std::vector<ForwardKind> kinds = all_kinds();
  REQUIRE(kinds.size() > 100);
  for (const ForwardKind& kind : kinds) {
    const ForwardTasks tasks = unrolled(TaskGraph(kind), kLayers);
    const auto missing = unwritten(tasks);
    REQUIRE(missing.value_or("") == "");
    for (const TaskEdge& edge : tasks.edges) REQUIRE(edge.from < edge.to);  // So there is no cycle.
  }
}

TEST_CASE("what queues do in their order, and what tasks await, keeps to every edge", "[plan]") {
  for (const ForwardKind& kind : all_kinds()) {
    const ForwardTasks tasks = unrolled(TaskGraph(kind), kLayers);
    REQUIRE(broken_edge(tasks, TaskOrder(tasks)).value_or("") == "");
  }
}

TEST_CASE("a wait that is left out, or two tasks the other way round, break an edge", "[plan]") {
  ForwardKind kind{.decodes = true, .ranks = true, .chooses = true, .clusters = true, .proposes = true};
  kind.promotes = kind.asks = true;
  kind.fetches = kind.fetches_all = kind.fetches_chosen = GENERATE(false, true);
  kind.audits = GENERATE(false, true);
  kind.handover = GENERATE(Handover::device, Handover::stream, Handover::host);
  const ForwardTasks tasks = unrolled(TaskGraph(kind), kLayers);
  std::uint32_t waits = 0, swaps = 0;
  for (std::uint32_t verb = 0; verb <= static_cast<std::uint32_t>(Verb::end); ++verb) {
    for (std::uint32_t i = 0; i < kResources; ++i) {
      const auto resource = static_cast<Resource>(i);
      ForwardTasks without = tasks;
      bool within = false;  // The forward: not for what one before it has left.
      for (std::uint32_t node = 0; node < tasks.nodes.size(); ++node) {
        Task& task = without.nodes[node].task;
        if (task.verb != static_cast<Verb>(verb) || !task.awaits.has(resource)) continue;
        task.awaits.remove(resource);
        within = within || std::ranges::any_of(tasks.edges, [&](const TaskEdge& edge) {
                   return edge.to == node && edge.by == resource;
                 });
      }
      // A caller who has the answer knows that the stream has asked.
      if (!within || resource == Resource::passed) continue;
      CAPTURE(to_string(static_cast<Verb>(verb)), i);
      REQUIRE(broken_edge(tasks, TaskOrder(without)).has_value());
      ++waits;
    }
  }
  for (const TaskEdge& edge : tasks.edges) {
    if (tasks.nodes[edge.from].task.queue != tasks.nodes[edge.to].task.queue) continue;
    CAPTURE(to_string(tasks.nodes[edge.from].task.verb), to_string(tasks.nodes[edge.to].task.verb));
    TaskOrder order(tasks);
    order.swap(edge.from, edge.to);
    REQUIRE(broken_edge(tasks, order).has_value());
    ++swaps;
  }
  REQUIRE(waits >= 4);  // For near rows to fill, for candidates, for the question and for its answer.
  REQUIRE(swaps > 10 * kLayers);
}
