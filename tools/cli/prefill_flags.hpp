#pragma once

#include <string>
#include <string_view>

#include "sluice/device.hpp"
#include "sluice/prefill.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// How prompts are prefilled.
struct PrefillFlags {
  std::string mode = "full";  ///< as parse_prefill reads it
  FlexPrefillSpec flex;
};

/// The parameters of FlexPrefill alone; `--gamma` too.
void add_flexprefill_flags(CLI::App& app, FlexPrefillSpec& flex);
/// `--prefill`, and the parameters.
void add_prefill_flags(CLI::App& app, PrefillFlags& flags);

/// @throws Error{Errc::invalid_argument} that begins with `what`; the range is validate(PrefillSpec)'s.
[[nodiscard]] float parse_gamma(std::string_view text, const std::string& what);
/// Reads `full`, `flexprefill@0.9` or `auto`; what the text leaves open is as in `flex`. And `streaming@SINKS+WINDOW`,
/// `minference@PATTERN:SIZES`, sizes in tokens: `vertical_slash:COLUMNS+DIAGONALS`, `a_shape:SINKS+WINDOW`,
/// `block_sparse:BLOCKS`, or all of these in this order for `best`; without them, or all after @, the defaults.
/// @throws Error{Errc::invalid_argument}, also as validate(PrefillSpec).
[[nodiscard]] PrefillSpec parse_prefill(std::string_view text, const FlexPrefillSpec& flex);
/// As parse_prefill reads it: `full`, `flexprefill@0.95`, `minference@vertical_slash:1000+6096`.
[[nodiscard]] std::string to_text(const PrefillSpec& spec);
/// The `config` part of a report.
[[nodiscard]] Json to_json(const PrefillSpec& spec);

/// Sets the prompt tokens per call unless the user did: many on a GPU, whose kernels want work, and many where blocks
/// are chosen, which every chunk does anew from its last 128 queries.
void choose_chunk(EngineFlags& flags, const Device* device, const PrefillSpec& prefill = {});

}  // namespace sluice::tools
