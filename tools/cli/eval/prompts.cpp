#include "tools/cli/eval/prompts.hpp"

#include "tools/cli/text/report.hpp"

namespace sluice::tools {
namespace {

/// UTF-8 of the code points that are the bytes.
std::string code_points(std::string_view bytes) {
  std::string text;
  for (const char each : bytes) {
    const auto byte = static_cast<unsigned char>(each);
    if (byte < 0x80) {
      text.push_back(each);
    } else {
      text.push_back(static_cast<char>(0xc0 | (byte >> 6)));
      text.push_back(static_cast<char>(0x80 | (byte & 0x3f)));
    }
  }
  return text;
}

}  // namespace

std::string prompts_of(std::span<const Cell> cells, const TaskEvalOptions& options, std::string_view haystack) {
  std::string lines;
  for (const Cell& cell : cells) {
    for (std::uint32_t i = 0; i < options.count; ++i) {
      const std::uint64_t seed = options.seed + i;
      const Task task = make_task(cell.kind, cell.length, seed, haystack);
      const Json line = {{"task", to_string(cell.kind)},
                         {"length_tokens", cell.length},
                         {"seed", seed},
                         {"prompt", code_points(task.prompt)},
                         {"answer", code_points(task.answer)}};
      lines += line.dump() + "\n";
    }
  }
  return lines;
}

}  // namespace sluice::tools
