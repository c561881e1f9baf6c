#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sluice/engine.hpp"
#include "tools/cli/fetch_share.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/report.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/runner.hpp"

namespace sluice::tools {

/// Options of every subcommand that builds an Engine. 0 bytes mean "sized to the prompt".
struct EngineFlags {
  std::uint64_t host_bytes = 0;
  std::uint64_t near_bytes = 0;
  PlacementMode placement = EngineOptions{}.placement;
  float fetch_share = kFetchAuto;
  Handover handover = EngineOptions{}.handover;
  Graphs graphs = Graphs::automatic;  ///< of commands that have --graphs
  std::uint32_t page_tokens = EngineOptions{}.page_tokens;
  DType kv_dtype = EngineOptions{}.kv_dtype;
  std::uint32_t prefill_chunk = 512;  ///< tokens of a prompt that are attended at a time
  std::uint32_t threads = EngineOptions{}.threads;
  std::vector<std::uint32_t> cores;
  std::chrono::milliseconds timeout = EngineOptions{}.timeout;
  std::uint32_t audit_every = 0;
  bool own_chunk = true;  ///< no --prefill-chunk was given: see choose_chunk
  bool own_pages = true;  ///< no page size was asked for: a policy gets pages of the size that it was made for
  std::optional<std::uint32_t> dense_tokens;  ///< see EngineOptions; none was given: what the command has for it
  bool own_kv_dtype = true;  ///< no element type was asked for: see choose_kv_dtype
};

/// `dense`: what the command does where no --dense-tokens is given, for its help.
void add_engine_flags(CLI::App& app, EngineFlags& flags, const std::string& dense = "0");
/// `--handover`, of these and of benchmarks.
void add_handover(CLI::App& app, Handover& handover);
/// `--graphs`, of commands that decode with a model.
void add_graphs(CLI::App& app, Graphs& graphs);

/// `--kv-dtype auto`: keys and values as the model has them.
void choose_kv_dtype(EngineFlags& flags, const Model& model) noexcept;

/// Page size of an engine for one policy: what the user asked for, else the policy's own, else the default.
[[nodiscard]] std::uint32_t page_tokens_for(const PolicySpec& policy, const EngineFlags& flags) noexcept;

/// Policies that one engine can serve: it has one page size, one kind of digests and one of copies of keys.
struct EngineGroup {
  std::uint32_t page_tokens = 0;
  std::vector<std::size_t> policies;  ///< indices
};
[[nodiscard]] std::vector<EngineGroup> by_engine(std::span<const PolicySpec> policies, const EngineFlags& flags);

/// What an engine of one conversation at a time is sized to.
struct EngineRoom {
  std::uint32_t page_tokens = 16;
  std::uint32_t tokens = 0;  ///< of the longest sequence
  std::uint32_t apart = 0;   ///< tokens that a fork has beside those that it shares; 0: there are no forks
  double near = 0.0;         ///< share of the longest sequence that device memory has room for, unless flags say bytes
  PrefillSpec prefill{};
};

/// @throws Error{Errc::unsupported} for a policy that chooses by scores of a model's own indexer
void refuse_scores(const PolicySpec& policy);

/// Options for sequences under any of the given policies, which decode one token at a time.
/// @throws Error{Errc::out_of_capacity} naming the size that would do, if the user's host size is too small;
/// Error{Errc::unsupported} if no engine serves a policy
[[nodiscard]] EngineOptions sized(const EngineFlags& flags, const AttentionShape& shape,
                                  std::span<const PolicySpec> policies, const EngineRoom& room);

/// The `config` part of a report.
[[nodiscard]] Json to_json(const EngineOptions& options);

}  // namespace sluice::tools
