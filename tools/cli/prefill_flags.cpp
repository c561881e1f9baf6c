#include "tools/cli/prefill_flags.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <vector>

#include <CLI/CLI.hpp>

#include "scheduler/numbers.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint32_t kDeviceChunk = 8192;
constexpr std::uint32_t kChoosingChunk = 4096;  ///< on the CPU

/// So many that a float is told from all others.
std::string digits_of(float value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

/// The sizes that a text may have, in their order there.
std::vector<std::uint32_t*> sizes_of(PrefillSpec& spec) {
  if (spec.mode == PrefillMode::streaming) return {&spec.streaming.sinks, &spec.streaming.window};
  MInferenceSpec& by = spec.minference;
  switch (by.pattern) {
    case HeadPattern::vertical_slash: return {&by.columns, &by.diagonals};
    case HeadPattern::a_shape: return {&by.a_shape.sinks, &by.a_shape.window};
    case HeadPattern::block_sparse: return {&by.blocks};
    case HeadPattern::best: break;
  }
  return {&by.columns, &by.diagonals, &by.a_shape.sinks, &by.a_shape.window, &by.blocks};
}

/// What is behind the @ of streaming and of minference.
void parse_sizes(std::string_view text, const std::string& what, PrefillSpec& spec) {
  if (spec.mode == PrefillMode::minference) {
    const std::size_t end = std::min(text.find(':'), text.size());
    spec.minference.pattern = parse_head_pattern(text.substr(0, end));
    if (end == text.size()) return;
    text.remove_prefix(end + 1);
  }
  const std::vector<std::uint32_t*> sizes = sizes_of(spec);
  std::string list(text);
  std::ranges::replace(list, '+', ',');
  const std::vector<std::string> words = split_list(list, what);
  if (words.size() != sizes.size()) {
    throw Error(Errc::invalid_argument, what + ": '" + std::string(text) + "' has " + std::to_string(words.size()) +
                                            " sizes, and there are " + std::to_string(sizes.size()) +
                                            " here; join them by +");
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) *sizes[i] = static_cast<std::uint32_t>(parse_count(words[i], what));
}

}  // namespace

void add_flexprefill_flags(CLI::App& app, FlexPrefillSpec& flex) {
  add_number(app, "--tau", flex.tau, "FlexPrefill: a head chooses per query block below this divergence; [0, 1]");
  add_count(app, "--min-budget", flex.min_budget, "FlexPrefill: tokens of columns, and of diagonals, at least");
  add_count(app, "--max-budget", flex.max_budget,
            "FlexPrefill: tokens of each at most, and of a query block that chooses for itself; 0: any");
  app.add_flag("--lines", flex.lines, "FlexPrefill: all blocks that the lines touch, instead of as many as they fill");
  app.add_flag(
      "--flattened", flex.flattened,
      "FlexPrefill: query blocks choose together (the paper's Algorithm 4), instead of each for itself; not on "
      "a GPU");
}

void add_prefill_flags(CLI::App& app, PrefillFlags& flags) {
  app.add_option("--prefill", flags.mode,
                 "How prompts are attended: full, flexprefill[@GAMMA], auto[@GAMMA], streaming[@SINKS+WINDOW] or "
                 "minference[@PATTERN[:SIZES]]")
      ->type_name("MODE[@...]")
      ->capture_default_str();
  add_number(app, "--gamma", flags.flex.gamma, "FlexPrefill: share of the representative attention to keep, (0, 1]");
  add_flexprefill_flags(app, flags.flex);
}

float parse_gamma(std::string_view text, const std::string& what) {
  const std::optional<double> gamma = scheduler::read_decimal(text);
  if (!gamma) {
    throw Error(Errc::invalid_argument,
                what + ": '" + std::string(text) + "' is no number; gamma is a share in (0, 1], e.g. 0.95");
  }
  return static_cast<float>(*gamma);
}

PrefillSpec parse_prefill(std::string_view text, const FlexPrefillSpec& flex) {
  const std::size_t at = std::min(text.find('@'), text.size());
  PrefillSpec spec{.mode = parse_prefill_mode(text.substr(0, at)), .flex = flex};
  if (at < text.size()) {
    const std::string what = "--prefill: '" + std::string(text) + "'";
    const std::string_view rest = text.substr(at + 1);
    switch (spec.mode) {
      case PrefillMode::full: throw Error(Errc::invalid_argument, what + ": full attends everything; drop the @");
      case PrefillMode::flexprefill:
      case PrefillMode::automatic: spec.flex.gamma = parse_gamma(rest, what); break;
      case PrefillMode::streaming:
      case PrefillMode::minference: parse_sizes(rest, what, spec); break;
    }
  }
  validate(spec);
  return spec;
}

std::string to_text(const PrefillSpec& spec) {
  const std::string mode = to_string(spec.mode);
  if (spec.mode == PrefillMode::full) return mode;
  if (spec.mode == PrefillMode::flexprefill || spec.mode == PrefillMode::automatic)
    return mode + '@' + digits_of(spec.flex.gamma);
  PrefillSpec sized = spec;
  std::string sizes;
  for (const std::uint32_t* size : sizes_of(sized)) sizes += (sizes.empty() ? "" : "+") + std::to_string(*size);
  return mode + '@' +
         (spec.mode == PrefillMode::minference ? to_string(spec.minference.pattern) + std::string(":") : "") + sizes;
}

Json to_json(const PrefillSpec& spec) {
  if (spec.mode == PrefillMode::full) return {{"mode", to_string(spec.mode)}};
  if (spec.mode == PrefillMode::streaming || spec.mode == PrefillMode::minference)
    return {{"mode", to_string(spec.mode)}, {"sizes", to_text(spec)}};
  return {{"mode", to_string(spec.mode)},       {"gamma", spec.flex.gamma},           {"tau", spec.flex.tau},
          {"min_budget", spec.flex.min_budget}, {"max_budget", spec.flex.max_budget}, {"lines", spec.flex.lines},
          {"flattened", spec.flex.flattened}};
}

void choose_chunk(EngineFlags& flags, const Device* device, const PrefillSpec& prefill) {
  if (!flags.own_chunk) return;
  if (device != nullptr && device->info().own_processor) {
    flags.prefill_chunk = kDeviceChunk;
  } else if (prefill.mode != PrefillMode::full) {
    flags.prefill_chunk = kChoosingChunk;
  }
}

}  // namespace sluice::tools
