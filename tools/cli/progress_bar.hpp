#pragma once

#include <cstdint>
#include <string>

#include "sluice/units.hpp"

namespace sluice::tools {

/// A bar on standard error while work goes on; silent unless standard error is a terminal.
/// The line is wiped when the object dies, so it never mixes with results.
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
};

}  // namespace sluice::tools
