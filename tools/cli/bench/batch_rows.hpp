#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/cli/text/command.hpp"

/// The sequences of one call that a benchmark times: how many, and how long each of them is.
namespace sluice::tools {

/// Adds --rows, which is --batch as well, and --ragged.
void add_batch_rows(CLI::App& command, std::string& rows, std::uint32_t& ragged);

/// Tokens of the sequences, the longest first: between `longest` and `shortest` each is as many times as long as the
/// next one. All alike if `shortest` is 0.
[[nodiscard]] std::vector<std::uint32_t> row_lengths(std::uint32_t rows, std::uint32_t longest, std::uint32_t shortest);

}  // namespace sluice::tools
