#include "tools/cli/plot/svg.hpp"

#include <array>
#include <cmath>
#include <cstdio>

namespace sluice::tools::svg {
namespace {

/// Distinguishable without colour vision too (Okabe and Ito), with a shape each.
constexpr std::array<const char*, 8> kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                 "#e69f00", "#56b4e9", "#000000", "#8c564b"};
constexpr int kShapes = 3;

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

}  // namespace

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

const char* colour(std::size_t series) { return kColours[series % kColours.size()]; }

std::string text_at(double x, double y, const std::string& text, const char* anchor, const char* more) {
  return "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" text-anchor=\"" + anchor + "\" " + more + ">" +
         escaped(text) + "</text>\n";
}

std::string line(double x1, double y1, double x2, double y2, const char* style) {
  return "<line x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) + "\" y2=\"" + number(y2) +
         "\" " + style + "/>\n";
}

std::string mark(double x, double y, std::size_t series) {
  const std::string fill = std::string("fill=\"") + colour(series) + "\"";
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

double tick_step(double range) {
  const double raw = range / 5.0;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double lead = raw / power;
  return power * (lead <= 1.0 ? 1.0 : lead <= 2.0 ? 2.0 : lead <= 5.0 ? 5.0 : 10.0);
}

}  // namespace sluice::tools::svg
