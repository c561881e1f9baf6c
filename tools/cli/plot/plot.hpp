#pragma once

#include <string>
#include <vector>

namespace sluice::tools {

struct PlotPoint {
  double x = 0.0;
  double y = 0.0;
};

/// One mark per point, the same colour and shape for a series, joined in the order of the points.
struct PlotSeries {
  std::string name;
  std::vector<PlotPoint> points;
};

/// A scatter plot, x from 0 to its largest value, y from 0 to 1.
struct Plot {
  std::string title;
  std::string x_title;  ///< shown in percent
  std::string y_title;
  std::vector<PlotSeries> series;
};

/// The plot as a self-contained SVG.
[[nodiscard]] std::string to_svg(const Plot& plot);

}  // namespace sluice::tools
