#include "tools/cli/bench/batch_rows.hpp"

#include <cmath>

#include <CLI/CLI.hpp>

#include "tools/cli/text/values.hpp"

namespace sluice::tools {

void add_batch_rows(CLI::App& command, std::string& rows, std::uint32_t& ragged) {
  command.add_option("--rows,--batch", rows, "Comma list of numbers of sequences in a call")->capture_default_str();
  add_count(command, "--ragged", ragged,
            "Tokens of the shortest sequence of a call; the others lie between it and --length, each as many times as "
            "long as the next; 0: all alike",
            {.most = 1u << 30});
}

std::vector<std::uint32_t> row_lengths(std::uint32_t rows, std::uint32_t longest, std::uint32_t shortest) {
  std::vector<std::uint32_t> lengths(rows, longest);
  if (shortest == 0 || shortest >= longest) return lengths;
  for (std::uint32_t row = 1; row < rows; ++row) {
    const double part = static_cast<double>(row) / (rows - 1);
    lengths[row] = static_cast<std::uint32_t>(std::lround(longest * std::pow(1.0 * shortest / longest, part)));
  }
  return lengths;
}

}  // namespace sluice::tools
