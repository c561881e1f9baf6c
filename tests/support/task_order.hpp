#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/plan/task_graph.hpp"

namespace sluice::test {

/// The order in which tasks of a forward were enqueued, as indices of its nodes, and what comes before what by it: each
/// queue does its tasks in their order, a task awaits what it says, and the calling thread enqueues nothing before it
/// has done what is its own.
class TaskOrder {
 public:
  explicit TaskOrder(const scheduler::ForwardTasks& tasks) : tasks_(tasks) {
    for (std::uint32_t node = 0; node < tasks.nodes.size(); ++node) order_.push_back(node);
  }
  TaskOrder(const scheduler::ForwardTasks& tasks, std::vector<std::uint32_t> order)
      : tasks_(tasks), order_(std::move(order)) {}

  void swap(std::uint32_t a, std::uint32_t b) {
    std::iter_swap(std::ranges::find(order_, a), std::ranges::find(order_, b));
  }
  /// [nodes, nodes] whether node `b` has ended before node `a` begins.
  [[nodiscard]] std::vector<std::vector<bool>> before() const {
    const std::size_t count = tasks_.nodes.size();
    std::vector<std::vector<bool>> all(count, std::vector<bool>(count, false));
    std::array<std::optional<std::uint32_t>, scheduler::kQueues> last;
    for (const std::uint32_t node : order_) {
      const scheduler::Task& task = tasks_.nodes[node].task;
      const auto behind = [&](std::uint32_t other) {
        all[node][other] = true;
        for (std::size_t i = 0; i < count; ++i) all[node][i] = all[node][i] || all[other][i];
      };
      const auto queue = static_cast<std::size_t>(task.queue);
      if (last[queue]) behind(*last[queue]);
      if (const auto& own = last[static_cast<std::size_t>(scheduler::Queue::caller)];
          own && task.queue == scheduler::Queue::stream)
        behind(*own);
      for (const scheduler::TaskEdge& edge : tasks_.edges)
        if (edge.to == node && task.awaits.has(edge.by)) behind(edge.from);
      last[queue] = node;
    }
    return all;
  }

 private:
  const scheduler::ForwardTasks& tasks_;
  std::vector<std::uint32_t> order_;
};

/// An edge of `tasks` that an order does not keep to, in words.
inline std::optional<std::string> broken_edge(const scheduler::ForwardTasks& tasks, const TaskOrder& order) {
  const std::vector<std::vector<bool>> before = order.before();
  for (const auto& [from, to, by] : tasks.edges) {
    if (before[to][from]) continue;
    return std::string(to_string(tasks.nodes[to].task.verb)) + " need not come behind " +
           to_string(tasks.nodes[from].task.verb) + ", of which it wants resource " +
           std::to_string(static_cast<std::uint32_t>(by));
  }
  return std::nullopt;
}

}  // namespace sluice::test
