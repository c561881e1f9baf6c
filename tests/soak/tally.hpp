#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/soak/faults.hpp"
#include "tests/soak/model.hpp"
#include "tests/soak/options.hpp"
#include "tests/soak/resources.hpp"

namespace sluice::test {

/// What a run did, and whether that is what was asked for.
class Tally {
 public:
  explicit Tally(const SoakOptions& options) : options_(options) {}

  /// A round of all machines, and what the process holds then.
  void add(const RoundStats& round, const Resources& now);
  [[nodiscard]] bool has_steps() const noexcept { return options_.steps != 0 && total_.decoded >= options_.steps; }

  struct End {
    std::uint64_t rounds = 0;
    std::uint64_t failures = 0;  ///< of rounds of a machine
    std::uint64_t stops = 0;
    FaultCounts faults;
    std::chrono::steady_clock::duration time{};
  };
  /// Prints what grew, what did not happen and, on the last line, what did.
  /// @return whether all is well
  bool report(const End& end) const;

 private:
  /// What is compared between the first and the last third, one value per round.
  struct Series {
    std::vector<double> allocated, resident, threads, descriptors, forward_us;
  };
  [[nodiscard]] std::vector<std::string> grown() const;
  [[nodiscard]] std::vector<std::string> missing(const End& end) const;
  void print_line(const End& end, bool passed) const;

  SoakOptions options_;
  RoundStats total_;
  Series series_;
};

}  // namespace sluice::test
