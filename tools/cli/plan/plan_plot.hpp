#pragma once

#include <string>
#include <vector>

namespace sluice::tools {

/// A configuration at several lengths of the context.
struct PlannedSeries {
  struct Point {
    double tokens = 0.0;
    double token_ms = 0.0;
    double device_gib = 0.0;
    double host_gib = 0.0;
  };
  std::string name;
  std::vector<Point> points;
};

/// Time of a token and memory, of device and host, against the context, as a self-contained SVG.
[[nodiscard]] std::string plan_svg(const std::vector<PlannedSeries>& series);

}  // namespace sluice::tools
