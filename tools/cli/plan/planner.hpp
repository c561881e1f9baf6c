#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "sluice/engine.hpp"
#include "sluice/trace.hpp"
#include "tools/cli/plan/machine.hpp"

namespace sluice::tools {

/// Decoding: every sequence of a batch gets its next token.
struct Workload {
  AttentionShape shape;
  DType kv_dtype = DType::bf16;
  PolicySpec policy;
  PlacementMode placement = PlacementMode::hybrid;
  float fetch_share = 0.f;  ///< see EngineOptions::fetch_share
  std::uint32_t page_tokens = 16;
  std::uint32_t rows = 1;    ///< sequences
  std::uint32_t tokens = 1;  ///< of each
  double near_share = 0.0;   ///< of its tokens, that device memory has room for
  /// Of the tokens that a row attends, those that lie near when they are wanted. What does so depends on the model.
  double near_hits = 0.5;
  double linked = 0.0;  ///< likewise, few far ones of a list, which a GPU attends itself: CudaDeviceOptions::link_rows
  /// Of its tokens, those that a KV head attends, where the policy's budget is no number of tokens; see chosen_share.
  double attended = 0.05;
  bool attended_known = false;  ///< `attended` was measured: it holds whatever the policy's budget is
  double promoted = 0.0;        ///< tokens that a forward brings near, of each layer and KV head
  double scored = 0.0;          ///< of its tokens, those whose keys the CPU reads to choose, where it does
  std::uint64_t weights_bytes = 0;  ///< of the model, that a forward reads, once for all rows
};

/// As `--placements` of `bench gpu` has it: hybrid, stream or near, where all tokens lie in device memory.
/// @throws Error{Errc::invalid_argument}; Error{Errc::unsupported} for a policy of the CPU with all tokens near
void place(const std::string& text, Workload& work);
/// As `place` takes it.
[[nodiscard]] const char* placement_of(const Workload& work) noexcept;

/// What its forwards are for: rows that decode.
/// @throws Error{Errc::unsupported} if no engine serves the policy
[[nodiscard]] Bucket decoding_bucket(const Workload& work);

/// What a forward of it takes, attention alone: by the engine's own plan, on the machine's rates.
struct WorkloadPlan {
  double forward_us = 0.0;
  double model_us = 0.0;            ///< the same, and reading the weights
  std::array<double, 3> busy_us{};  ///< by lane, of a forward
  Lane bottleneck{};                ///< the lane that is busiest
  double dense_us = 0.0;            ///< dense attention with everything in device memory
  EngineMemoryUse memory;           ///< of an engine for it; scratch memory of a GPU's kernels is not known here
  bool fits = false;                ///< into the machine's memory beside `reserved` bytes of the device's
};

/// `reserved`: device memory that is not Sluice's, such as weights.
/// @throws Error{Errc::unsupported} if no engine serves the policy
[[nodiscard]] WorkloadPlan plan(const Workload& work, const Machine& machine, std::uint64_t reserved);

/// The most sequences of as many tokens, and the most tokens of as many sequences, that fit; 0: not one.
[[nodiscard]] std::uint32_t most_rows(Workload work, const Machine& machine, std::uint64_t reserved);
[[nodiscard]] std::uint32_t most_tokens(Workload work, const Machine& machine, std::uint64_t reserved);

}  // namespace sluice::tools
