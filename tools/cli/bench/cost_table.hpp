#pragma once

#include <utility>
#include <vector>

#include "tools/cli/bench/gpu_table.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// The table of `sluice bench gpu --costs`: what a layer takes beyond what it reads. Scores are read first, then near
/// and far rows beside each other; what is left is a layer's fixed cost.
class CostTable {
 public:
  /// A layer of dense attention that was timed: the fastest of a run says at which rate device memory can be read.
  void add_dense(double bytes, double us);
  void add(GpuRow row) {
    row.audited = nullptr;  // It may be gone when the table is taken.
    rows_.push_back(std::move(row));
  }
  [[nodiscard]] Table take() const;

 private:
  [[nodiscard]] std::vector<Json> cells(const GpuRow& row) const;

  double bytes_per_us_ = 0.0;
  std::vector<GpuRow> rows_;
};

}  // namespace sluice::tools
