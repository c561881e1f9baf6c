#include "tools/cli/plot/plot.hpp"

#include <algorithm>
#include <cstdio>

#include "tools/cli/plot/svg.hpp"

namespace sluice::tools {
namespace {

constexpr double kWidth = 640.0;
constexpr double kHeight = 420.0;
constexpr double kLeft = 64.0;
constexpr double kTop = 40.0;
constexpr double kBottom = 52.0;
constexpr double kLegend = 190.0;
constexpr double kPlotWidth = kWidth - kLeft - kLegend;
constexpr double kPlotHeight = kHeight - kTop - kBottom;

}  // namespace

std::string to_svg(const Plot& plot) {
  double x_most = 0.0;
  for (const PlotSeries& series : plot.series) {
    for (const PlotPoint& point : series.points) x_most = std::max(x_most, point.x);
  }
  if (!(x_most > 0.0)) x_most = 1.0;
  const auto x_of = [&](double x) { return kLeft + x / x_most * kPlotWidth; };
  const auto y_of = [&](double y) { return kTop + (1.0 - y) * kPlotHeight; };

  std::string text =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + svg::number(kWidth) + ' ' + svg::number(kHeight) +
      "\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  text += svg::text_at(kLeft, 22, plot.title, "start", "font-size=\"13\"");
  const double step = svg::tick_step(x_most);
  for (int i = 0; i * step <= x_most * (1.0 + 1e-9); ++i) {
    text += svg::line(x_of(i * step), y_of(0), x_of(i * step), y_of(1), "stroke=\"#eee\"");
    char label[32];
    std::snprintf(label, sizeof label, "%g%%", i * step * 100.0);
    text += svg::text_at(x_of(i * step), y_of(0) + 16, label, "middle");
  }
  for (int i = 0; i <= 5; ++i) {
    text += svg::line(x_of(0), y_of(i / 5.0), x_of(x_most), y_of(i / 5.0), "stroke=\"#eee\"");
    text += svg::text_at(kLeft - 8, y_of(i / 5.0) + 4, svg::number(i / 5.0), "end");
  }
  text += svg::line(x_of(0), y_of(0), x_of(x_most), y_of(0), "stroke=\"#333\"");
  text += svg::line(x_of(0), y_of(0), x_of(0), y_of(1), "stroke=\"#333\"");
  text += svg::text_at(kLeft + kPlotWidth / 2, kHeight - 14, plot.x_title, "middle");
  text += "<g transform=\"rotate(-90 16 " + svg::number(kTop + kPlotHeight / 2) + ")\">" +
          svg::text_at(16, kTop + kPlotHeight / 2, plot.y_title, "middle") + "</g>\n";
  for (std::size_t s = 0; s < plot.series.size(); ++s) {
    const PlotSeries& series = plot.series[s];
    const std::string style = std::string("stroke=\"") + svg::colour(s) + "\" stroke-opacity=\"0.35\"";
    for (std::size_t i = 0; i < series.points.size(); ++i) {
      const PlotPoint& point = series.points[i];
      if (i > 0) {
        const PlotPoint& before = series.points[i - 1];
        text += svg::line(x_of(before.x), y_of(before.y), x_of(point.x), y_of(point.y), style.c_str());
      }
      text += svg::mark(x_of(point.x), y_of(point.y), s);
    }
    const double y = kTop + 8 + 16.0 * static_cast<double>(s);
    text += svg::mark(kWidth - kLegend + 22, y, s);
    text += svg::text_at(kWidth - kLegend + 32, y + 4, series.name.substr(0, 26), "start");
  }
  return text + "</svg>\n";
}

}  // namespace sluice::tools
