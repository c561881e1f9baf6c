#pragma once

#include <cstdint>
#include <string>

#include "sluice/units.hpp"

namespace sluice::tools {

/// When a log gets its next line of progress: none in the first ten seconds and within ten of another, then one as soon
/// as a tenth more is done, and one a minute whatever is done.
class LogPace {
 public:
  explicit LogPace(Clock::time_point begin) : last_(begin) {}
  /// Whether a line is due now; if so, it counts as written.
  [[nodiscard]] bool due(Clock::time_point now, std::uint64_t done, std::uint64_t total);

 private:
  Clock::time_point last_;
  std::uint64_t tenth_ = 0;
};

/// Progress on standard error while work goes on: a bar on a terminal, a line now and then elsewhere.
/// The bar is wiped when the object dies, so it never mixes with results.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Redraws at most ten times a second. `note` follows the bar.
  void update(std::uint64_t done, std::uint64_t total, const std::string& note = {});

 private:
  std::string label_;
  Clock::time_point last_{};
  bool terminal_;
  bool drawn_ = false;
  LogPace pace_;
};

}  // namespace sluice::tools
