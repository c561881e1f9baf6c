#include "tools/cli/plot/plot.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

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

/// Distinguishable without colour vision too (Okabe and Ito), with a shape each.
constexpr std::array<const char*, 8> kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                 "#e69f00", "#56b4e9", "#000000", "#8c564b"};
constexpr int kShapes = 3;

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string text_at(double x, double y, const std::string& text, const char* anchor, const char* more = "") {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor + "\" " + more + ">" +
         escaped(text) + "</text>\n";
}

std::string line(double x1, double y1, double x2, double y2, const char* style) {
  return "<line x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) + "\" y2=\"" + number(y2) +
         "\" " + style + "/>\n";
}

std::string mark(double x, double y, std::size_t series) {
  const std::string fill = std::string("fill=\"") + kColours[series % kColours.size()] + "\"";
  switch (series / kColours.size() % kShapes) {
    case 0: return "<circle cx=\"" + number(x) + "\" cy=\"" + number(y) + "\" r=\"4\" " + fill + "/>\n";
    case 1:
      return "<rect x=\"" + number(x - 3.5) + "\" y=\"" + number(y - 3.5) + "\" width=\"7\" height=\"7\" " + fill +
             "/>\n";
    default:
      return "<path d=\"M" + number(x) + ' ' + number(y - 5) + 'L' + number(x + 4.5) + ' ' + number(y + 3.5) + 'L' +
             number(x - 4.5) + ' ' + number(y + 3.5) + "Z\" " + fill + "/>\n";
  }
}

/// 1, 2 or 5 times a power of ten, so that about five steps make up `range`.
double tick_step(double range) {
  const double raw = range / 5.0;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double lead = raw / power;
  return power * (lead <= 1.0 ? 1.0 : lead <= 2.0 ? 2.0 : lead <= 5.0 ? 5.0 : 10.0);
}

}  // namespace

std::string to_svg(const Plot& plot) {
  double x_most = 0.0;
  for (const PlotSeries& series : plot.series) {
    for (const PlotPoint& point : series.points) x_most = std::max(x_most, point.x);
  }
  if (!(x_most > 0.0)) x_most = 1.0;
  const auto x_of = [&](double x) { return kLeft + x / x_most * kPlotWidth; };
  const auto y_of = [&](double y) { return kTop + (1.0 - y) * kPlotHeight; };

  std::string svg =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + number(kWidth) + ' ' + number(kHeight) +
      "\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  svg += text_at(kLeft, 22, plot.title, "start", "font-size=\"13\"");
  const double step = tick_step(x_most);
  for (int i = 0; i * step <= x_most * (1.0 + 1e-9); ++i) {
    svg += line(x_of(i * step), y_of(0), x_of(i * step), y_of(1), "stroke=\"#eee\"");
    char label[32];
    std::snprintf(label, sizeof label, "%g%%", i * step * 100.0);
    svg += text_at(x_of(i * step), y_of(0) + 16, label, "middle");
  }
  for (int i = 0; i <= 5; ++i) {
    svg += line(x_of(0), y_of(i / 5.0), x_of(x_most), y_of(i / 5.0), "stroke=\"#eee\"");
    svg += text_at(kLeft - 8, y_of(i / 5.0) + 4, number(i / 5.0), "end");
  }
  svg += line(x_of(0), y_of(0), x_of(x_most), y_of(0), "stroke=\"#333\"");
  svg += line(x_of(0), y_of(0), x_of(0), y_of(1), "stroke=\"#333\"");
  svg += text_at(kLeft + kPlotWidth / 2, kHeight - 14, plot.x_title, "middle");
  svg += "<g transform=\"rotate(-90 16 " + number(kTop + kPlotHeight / 2) + ")\">" +
         text_at(16, kTop + kPlotHeight / 2, plot.y_title, "middle") + "</g>\n";
  for (std::size_t s = 0; s < plot.series.size(); ++s) {
    const PlotSeries& series = plot.series[s];
    const std::string style = std::string("stroke=\"") + kColours[s % kColours.size()] + "\" stroke-opacity=\"0.35\"";
    for (std::size_t i = 0; i < series.points.size(); ++i) {
      const PlotPoint& point = series.points[i];
      if (i > 0) {
        const PlotPoint& before = series.points[i - 1];
        svg += line(x_of(before.x), y_of(before.y), x_of(point.x), y_of(point.y), style.c_str());
      }
      svg += mark(x_of(point.x), y_of(point.y), s);
    }
    const double y = kTop + 8 + 16.0 * static_cast<double>(s);
    svg += mark(kWidth - kLegend + 22, y, s);
    svg += text_at(kWidth - kLegend + 32, y + 4, series.name.substr(0, 26), "start");
  }
  return svg + "</svg>\n";
}

}  // namespace sluice::tools
