#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sluice::test {

/// What this process holds.
struct Resources {
  std::uint64_t allocated_bytes = 0;  ///< asked for and not given back; 0 where the allocator does not say
  std::uint64_t resident_bytes = 0;   ///< after what the allocator kept for later went back to the system
  std::uint64_t threads = 0;
  std::uint64_t descriptors = 0;
};
/// Gives unused memory back first: glibc keeps what was freed, and ever larger blocks of it, which is no growth of
/// ours.
/// @throws std::runtime_error where the system has no /proc
[[nodiscard]] Resources current_resources();

/// The middle one of the values in [begin, end) thirds: median_of_third(values, 0) is that of the first third.
/// @param values  at least three
[[nodiscard]] double median_of_third(const std::vector<double>& values, int third);

/// How a quantity may grow from the first to the last third of a run.
struct Bound {
  double factor = 1.0;
  double slack = 0.0;  ///< in the quantity's unit
};
/// Says what grew, from what to what; empty if nothing did, or if there are too few values to tell.
[[nodiscard]] std::string growth(const std::string& what, const std::vector<double>& values, const Bound& bound);

}  // namespace sluice::test
