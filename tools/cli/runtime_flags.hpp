#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "sluice/options.hpp"
#include "sluice/policy.hpp"
#include "tools/cli/command.hpp"

namespace sluice::tools {

/// Options of every subcommand that builds a Runtime. Defaults are RuntimeOptions' own, except that 0 bytes
/// mean "sized to the prompt".
struct RuntimeFlags {
  RuntimeFlags() {
    options.host_bytes = 0;
    options.near_bytes = 0;
  }
  RuntimeOptions options;  ///< `shape` is filled in once the model is known
};

void add_runtime_flags(CLI::App& app, RuntimeFlags& flags);

/// Pages of the size that the policy was made for, unless the user asked for another by --page-tokens.
void take_page_size(const CLI::App& app, const PolicySpec& policy, RuntimeFlags& flags);

/// Options for sequences of `tokens` tokens under the given policies, one sequence at a time.
/// @throws Error{Errc::out_of_capacity} naming the size that would do, if the user's host size is too small.
[[nodiscard]] RuntimeOptions sized(const RuntimeFlags& flags, const AttentionShape& shape,
                                   std::span<const PolicySpec> policies, std::uint32_t tokens);

/// The `config` part of a report.
[[nodiscard]] Json to_json(const RuntimeOptions& options);

}  // namespace sluice::tools
