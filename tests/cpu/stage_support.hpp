#pragma once

#include <limits>
#include <span>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "tests/support/reference.hpp"
#include "tools/stages/host_stages.hpp"

/// What the tests of stages on the host share.
namespace sluice::test {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline const cpu::Workers& workers(std::uint32_t threads) {
  static const cpu::Topology topology;
  static const cpu::Workers one(topology, {.threads = 1});
  static const cpu::Workers three(topology, {.threads = 3, .pin = false});
  return threads == 1 ? one : three;
}

/// A partial of one task with memory of its own, NaN before it is written.
struct OwnPartial {
  explicit OwnPartial(const Problem& problem)
      : out(std::size_t{problem.options().group} * problem.options().head_dim, kNan),
        lse(problem.options().group, kNan) {}
  [[nodiscard]] Partial view() { return {.out = out.data(), .lse = lse.data()}; }
  std::vector<float> out;
  std::vector<float> lse;
};

inline AttendTask attend_task(const Problem& problem, OwnPartial& out) {
  AttendTask task;
  task.q = problem.q();
  task.kv = problem.kv();
  task.out = out.view();
  return task;
}

}  // namespace sluice::test
