#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sluice/engine_options.hpp"
#include "sluice/policy.hpp"

namespace sluice::tools {

/// A placement and the policy that runs under it, e.g. `hybrid/sluice`; `near/sluice`: all tokens lie near; or `dense`:
/// attention to everything, in device memory.
struct DecodeMethod {
  std::string name;
  bool dense = false;
  bool all_near = false;  ///< device memory has room for all tokens
  PlacementMode placement{};
  PolicySpec policy;
};

/// @throws Error{Errc::invalid_argument} that says how it is written
[[nodiscard]] DecodeMethod parse_method(const std::string& name);
/// A semicolon list of `--methods`.
[[nodiscard]] std::vector<DecodeMethod> parse_methods(const std::string& text);
/// A comma list of `--kv-size`; one 0, which stands for no bound, if it is empty.
[[nodiscard]] std::vector<std::uint64_t> parse_kv_sizes(const std::string& text);

}  // namespace sluice::tools
