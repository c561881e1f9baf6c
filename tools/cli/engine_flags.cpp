#include "tools/cli/engine_flags.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "tools/cli/values.hpp"

namespace sluice::tools {

std::vector<EngineGroup> by_engine(std::span<const PolicySpec> policies, const RuntimeFlags& flags) {
  std::map<std::pair<std::uint32_t, std::optional<DigestKind>>, std::vector<std::size_t>> groups;
  for (std::size_t p = 0; p < policies.size(); ++p) {
    std::optional<DigestKind> digests;
    if (policies[p].uses(Source::pages)) digests = policies[p].pages.digest;
    groups[{page_tokens_for(policies[p], flags), digests}].push_back(p);
  }
  std::vector<EngineGroup> found;
  for (auto& [kind, members] : groups) {
    // Who needs no digests goes with those that do.
    if (!found.empty() && found.back().page_tokens == kind.first &&
        !std::ranges::any_of(found.back().policies, [&](std::size_t p) { return policies[p].uses(Source::pages); })) {
      found.back().policies.insert(found.back().policies.end(), members.begin(), members.end());
    } else {
      found.push_back({.page_tokens = kind.first, .policies = std::move(members)});
    }
  }
  return found;
}

EngineOptions sized(const RuntimeFlags& flags, const AttentionShape& shape, std::span<const PolicySpec> policies,
                    const EngineRoom& room) {
  EngineOptions options;
  options.shape = shape;
  options.page_tokens = room.page_tokens;
  options.kv_dtype = flags.options.kv_dtype;
  const PageLayout layout{.page_tokens = room.page_tokens, .head_dim = shape.head_dim, .dtype = options.kv_dtype};
  const std::uint64_t block = layout.page_bytes() * shape.layers * shape.kv_heads;
  const std::uint64_t longest = div_up(room.tokens, room.page_tokens);
  constexpr std::uint64_t kOpenPages = 2;  // The one that a fork copies, and where its own begin.
  const std::uint64_t blocks = longest + (room.apart == 0 ? 0 : div_up(room.apart, room.page_tokens) + kOpenPages);
  options.host_bytes = flags.options.host_bytes != 0 ? flags.options.host_bytes : blocks * block;
  if (options.host_bytes < blocks * block)
    throw Error(Errc::out_of_capacity, "--host-size " + format_size(options.host_bytes) + " cannot hold " +
                                           std::to_string(room.tokens) + " tokens (prompt and answer); they take " +
                                           std::to_string(blocks * block) +
                                           " bytes. Raise --host-size or shorten the prompt");
  options.near_bytes = flags.options.near_bytes != 0
                           ? flags.options.near_bytes
                           : static_cast<std::uint64_t>(room.near * static_cast<double>(longest)) * block;
  options.placement = flags.options.placement;
  options.largest = {.decode_rows = 1,
                     .prefill_rows = std::min(flags.options.prefill_chunk, room.tokens),
                     .prefills = 1,
                     .max_tokens = static_cast<std::uint32_t>(longest) * room.page_tokens,
                     .top_k = false,
                     .audit = flags.options.audit_every != 0};
  options.sequences = room.apart == 0 ? 1 : 2;
  options.prompt_queries = options.max_picks = options.max_ranked = options.max_window = 1;
  for (const PolicySpec& policy : policies) make_room_for(policy, room.tokens, options);
  if (options.cpu_sequences != 0) options.cpu_sequences = options.sequences;
  options.prefill = room.prefill;
  options.import_rows = std::min(options.import_rows, room.tokens);
  options.threads = flags.options.threads;
  options.cores = flags.options.cores;
  options.pin_threads = flags.options.pin_threads;
  options.timeout = flags.options.timeout;
  return options;
}

Json to_json(const EngineOptions& options) {
  return {{"layers", options.shape.layers},     {"q_heads", options.shape.q_heads},
          {"kv_heads", options.shape.kv_heads}, {"head_dim", options.shape.head_dim},
          {"page_tokens", options.page_tokens}, {"kv_dtype", to_string(options.kv_dtype)},
          {"host_bytes", options.host_bytes},   {"near_bytes", options.near_bytes},
          {"placement", to_string(options.placement)},
          {"threads", options.threads},         {"timeout_ms", options.timeout.count()}};
}

void require_for_engine(const RuntimeFlags& flags) {
  const RuntimeOptions own;
  const auto refuse = [](const std::string& flag, const std::string& why) {
    throw Error(Errc::invalid_argument, flag + ": " + why + "; leave it out, or say `run --stepwise`");
  };
  if (flags.options.placement != PlacementMode::hybrid && flags.options.placement != PlacementMode::stream)
    refuse("--placement", "an engine knows hybrid and stream; with --near 100% everything is near");
  if (flags.options.promote_pages != own.promote_pages)
    refuse("--promote-pages", "tokens come near one by one, not by pages");
}

}  // namespace sluice::tools
