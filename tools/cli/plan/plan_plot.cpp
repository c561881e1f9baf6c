#include "tools/cli/plan/plan_plot.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <set>

#include "tools/cli/plot/svg.hpp"

namespace sluice::tools {
namespace {

constexpr double kLeft = 56.0, kTop = 40.0, kPanel = 230.0, kGap = 60.0, kHeight = 260.0, kLegend = 230.0;

std::string length_text(double tokens) {
  constexpr double kKilo = 1024.0;
  char text[32];
  if (tokens >= kKilo) {
    std::snprintf(text, sizeof text, "%.0fK", tokens / kKilo);
  } else {
    std::snprintf(text, sizeof text, "%.0f", tokens);
  }
  return text;
}

std::string short_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return text;
}

/// One of the plots that stand side by side; lengths go by powers of two.
class Panel {
 public:
  using Value = double PlannedSeries::Point::*;

  Panel(const std::vector<PlannedSeries>& series, std::uint32_t place, Value value)
      : series_(series), left_(kLeft + place * (kPanel + kGap)), value_(value) {
    for (const PlannedSeries& each : series) {
      for (const auto& point : each.points) {
        lengths_.insert(point.tokens);
        most_ = std::max(most_, point.*value);
      }
    }
    if (!(most_ > 0.0)) most_ = 1.0;
  }

  [[nodiscard]] std::string draw(const std::string& title) const {
    std::string text = svg::text_at(left_, kTop - 12, title, "start");
    const double step = svg::tick_step(most_);
    for (int i = 0; i * step <= most_ * (1.0 + 1e-9); ++i) {
      text += svg::line(left_, y_of(i * step), left_ + kPanel, y_of(i * step), "stroke=\"#eee\"");
      text += svg::text_at(left_ - 6, y_of(i * step) + 4, short_number(i * step), "end");
    }
    for (const double tokens : lengths_)
      text += svg::text_at(x_of(tokens), kTop + kHeight + 16, length_text(tokens), "middle");
    text += svg::line(left_, kTop + kHeight, left_ + kPanel, kTop + kHeight, "stroke=\"#333\"");
    text += svg::line(left_, kTop, left_, kTop + kHeight, "stroke=\"#333\"");
    for (std::size_t s = 0; s < series_.size(); ++s) text += draw(s);
    return text;
  }

 private:
  [[nodiscard]] std::string draw(std::size_t s) const {
    const std::string style = std::string("stroke=\"") + svg::colour(s) + "\"";
    std::string text;
    const PlannedSeries::Point* before = nullptr;
    for (const auto& point : series_[s].points) {
      const double x = x_of(point.tokens), y = y_of(point.*value_);
      if (before != nullptr) text += svg::line(x_of(before->tokens), y_of(before->*value_), x, y, style.c_str());
      text += svg::mark(x, y, s);
      before = &point;
    }
    return text;
  }
  [[nodiscard]] double x_of(double tokens) const {
    const double least = std::log2(*lengths_.begin()), most = std::log2(*lengths_.rbegin());
    return left_ + (most > least ? (std::log2(tokens) - least) / (most - least) : 0.5) * kPanel;
  }
  [[nodiscard]] double y_of(double value) const { return kTop + (1.0 - value / most_) * kHeight; }

  const std::vector<PlannedSeries>& series_;
  double left_;
  Value value_;
  double most_ = 0.0;
  std::set<double> lengths_;
};

}  // namespace

std::string plan_svg(const std::vector<PlannedSeries>& series) {
  constexpr std::uint32_t kPanels = 3;
  const double width = kLeft + kPanels * (kPanel + kGap) + kLegend;
  std::string text = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + svg::number(width) + ' ' +
                     svg::number(kTop + kHeight + 50) +
                     "\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" "
                     "fill=\"white\"/>\n";
  text += Panel(series, 0, &PlannedSeries::Point::token_ms).draw("attention of a token, ms");
  text += Panel(series, 1, &PlannedSeries::Point::device_gib).draw("device memory, GiB");
  text += Panel(series, 2, &PlannedSeries::Point::host_gib).draw("host memory, GiB");
  text += svg::text_at(kLeft, kTop + kHeight + 36, "tokens of context", "start");
  for (std::size_t s = 0; s < series.size(); ++s) {
    constexpr std::size_t kMostLetters = 32;
    const double y = kTop + 8 + 16.0 * static_cast<double>(s), x = kLeft + kPanels * (kPanel + kGap) - 20;
    text += svg::mark(x, y, s);
    text += svg::text_at(x + 10, y + 4, series[s].name.substr(0, kMostLetters), "start");
  }
  return text + "</svg>\n";
}

}  // namespace sluice::tools
