#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>
#include <string>

#include "sluice/options.hpp"
#include "sluice/policy.hpp"
#include "tools/cli/command.hpp"
#include "tools/llama/model.hpp"

namespace sluice::tools {

/// Options of every subcommand that builds a Runtime. Defaults are RuntimeOptions' own, except that 0 bytes
/// mean "sized to the prompt".
struct RuntimeFlags {
  RuntimeFlags() {
    options.host_bytes = 0;
    options.near_bytes = 0;
  }
  RuntimeOptions options;  ///< `shape` is filled in once the model is known
  bool own_chunk = true;   ///< no --prefill-chunk was given: see choose_chunk
  bool own_pages = true;   ///< no page size was asked for: a policy gets pages of the size that it was made for
  /// No element type was asked for: see choose_kv_dtype.
  bool own_kv_dtype = true;
};

void add_runtime_flags(CLI::App& app, RuntimeFlags& flags);

/// `--kv-dtype auto`: keys and values as the model has them.
void choose_kv_dtype(RuntimeFlags& flags, const Model& model) noexcept;

/// Page size of a runtime for one policy: what the user asked for, else the policy's own, else the default.
[[nodiscard]] std::uint32_t page_tokens_for(const PolicySpec& policy, const RuntimeFlags& flags) noexcept;
/// Indices of policies by the page size of the runtime that they need.
[[nodiscard]] std::map<std::uint32_t, std::vector<std::size_t>> by_page_size(std::span<const PolicySpec> policies,
                                                                             const RuntimeFlags& flags);

/// Options for sequences of `tokens` tokens under the given policies, one sequence at a time.
/// @throws Error{Errc::out_of_capacity} naming the size that would do, if the user's host size is too small.
[[nodiscard]] RuntimeOptions sized(const RuntimeFlags& flags, const AttentionShape& shape,
                                   std::span<const PolicySpec> policies, std::uint32_t tokens);

/// The `config` part of a report.
[[nodiscard]] Json to_json(const RuntimeOptions& options);

}  // namespace sluice::tools
