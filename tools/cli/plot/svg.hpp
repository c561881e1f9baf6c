#pragma once

#include <cstddef>
#include <string>

/// Pieces of a plot as SVG. Coordinates are the picture's own.
namespace sluice::tools::svg {

/// With one decimal.
[[nodiscard]] std::string number(double value);
/// `anchor`: start, middle or end; `more`: further attributes.
[[nodiscard]] std::string text_at(double x, double y, const std::string& text, const char* anchor,
                                  const char* more = "");
/// `style`: attributes, its colour among them.
[[nodiscard]] std::string line(double x1, double y1, double x2, double y2, const char* style);
/// The n-th series' colour, and its mark: shapes change where colours come again.
[[nodiscard]] const char* colour(std::size_t series);
[[nodiscard]] std::string mark(double x, double y, std::size_t series);
/// 1, 2 or 5 times a power of ten, so that about five steps make up `range`.
[[nodiscard]] double tick_step(double range);

}  // namespace sluice::tools::svg
