#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sluice/engine.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/fetch_share.hpp"
#include "tools/cli/near_share.hpp"
#include "tools/cli/text/output.hpp"

namespace sluice::tools {

inline constexpr std::uint32_t kGpuPageTokens = 16;

struct BenchGpuOptions {
  std::string shape_name = "llama-3.1-8b";
  AttentionShape shape{.layers = 1, .q_heads = 0, .kv_heads = 0, .head_dim = 0};  ///< zeros: from shape_name
  std::string lengths = "8K,32K,128K";
  std::string policies = "sluice";
  std::string placements = "hybrid";
  float fetch_share = 0.f;
  Handover handover = EngineOptions{}.handover;
  std::string rows = "1";
  std::uint32_t ragged = 0;  ///< tokens of a forward's shortest sequence; 0: all are of one length
  std::string far;
  std::string pattern = "structured";
  std::vector<double> sinks;
  std::string sections = "attention,kernels";
  DType kv_dtype = DType::bf16;
  std::uint32_t layers = 4;
  std::uint32_t threads = 0;
  std::uint32_t steps = 32;
  std::uint32_t warm_up = 64;
  std::uint32_t repeats = 1;
  std::uint32_t promotions = EngineOptions{}.promotions;
  std::string prefetch = "on,off";  ///< of the section `pipeline`
  std::uint32_t page_tokens = kGpuPageTokens;  ///< of policies that name none
  std::optional<double> near_share;            ///< none: usual_near_share of the length
  std::optional<std::uint32_t> dense_tokens;  ///< none: 0
  std::uint32_t audited_steps = 4;
  std::uint64_t seed = 0;
  bool dense_only = false;
  bool costs = false;  ///< what a layer takes beyond what it reads, too
  DeviceFlags device;
  std::string trace;  ///< a file; empty: none
  OutputOptions output;
};

/// What a row of the table is of.
struct GpuCase {
  std::string policy;
  PolicySpec spec;
  PlacementMode placement{};
  bool all_near = false;  ///< device memory has room for all tokens
  std::uint32_t rows = 1;
};
/// How `--placements` calls it that all tokens lie in device memory: nothing is ever far.
inline constexpr const char* kNear = "near";
/// What is timed is a layer that the policy works in.
/// @throws Error{Errc::invalid_argument} as parse_policy
[[nodiscard]] PolicySpec timed_policy(const std::string& text);
/// Of all policies, placements and numbers of rows.
/// @throws Error{Errc::invalid_argument} for what none of these can be
[[nodiscard]] std::vector<GpuCase> gpu_cases(const BenchGpuOptions& options);

}  // namespace sluice::tools
