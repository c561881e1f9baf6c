// What an engine has room for: what the policies want that it was built for.
#include "runtime/engine/engine_sizes.hpp"

#include <algorithm>
#include <string>

#include "runtime/engine/engine_options.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "scheduler/plan/layer_stacks.hpp"
#include "scheduler/plan/sequence_counts.hpp"
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::runtime {
namespace {

/// Of a KV head, where sequences have clusters and no policy says how many: with size=32, 131,072 tokens.
constexpr std::uint32_t kUsualClusters = 4096;
constexpr const char* kNameIt = "; name the policy in EngineOptions::policies";

/// max_tokens of the largest bucket, as far as there is room for them: whole pages.
std::uint32_t longest_sequence(const EngineOptions& options) {
  const scheduler::LayerStacks stacks(options);
  const PageLayout layout = far_layout(options);
  const std::uint64_t block = layout.page_bytes() * stacks.layers() * options.shape.kv_heads;
  const std::uint64_t blocks = options.host_bytes / block;
  const std::uint64_t pages = stacks.pages_in(blocks);
  std::uint64_t tokens = options.largest.max_tokens;
  // Where all layers have windows memory is no bound; unless one is named, it is as if everything were kept.
  if (tokens == 0 || pages != ~std::uint64_t{0}) {
    const std::uint64_t longest = std::min(pages, blocks) * layout.page_tokens;
    tokens = tokens == 0 ? longest : std::min(tokens, longest);
  }
  return static_cast<std::uint32_t>(div_up(tokens, layout.page_tokens)) * layout.page_tokens;
}

/// Whether an engine of this shape serves the policy if it is built for it.
bool servable(const PolicySpec& policy, const EngineOptions& options) {
  scheduler::ForwardLimits limits = limits_of(options, {});
  limits.max_window = kNone;
  limits.digests = policy.pages.digest;
  limits.cluster_sequences = 1;
  limits.code_bits = scheduler::code_bits_for(policy);
  const Bucket any{.unbounded = true, .pages = true, .rehearsed = true, .scores = true};
  return scheduler::forward_unserved(policy, any, limits).empty();
}

/// A bound of none is a mistake where a policy wants some.
void require_counted(const PolicySpec& policy, const EngineOptions& options) {
  const auto require = [](bool wants, std::uint32_t count, const char* field, const char* where) {
    if (wants && count == 0)
      throw Error(Errc::invalid_argument, std::string(field) + " is 0, and the policy chooses " + where +
                                              "; raise it, or leave it out");
  };
  require(scheduler::chooser(policy) == scheduler::Chooser::cpu, options.cpu_sequences, "cpu_sequences", "on the CPU");
  require(scheduler::clusters_on_device(policy), options.cluster_sequences, "cluster_sequences",
          "among clusters on the device");
}

/// A policy can want more of sequences as long as these than an engine may have.
void require_possible(const EngineOptions& options) {
  try {
    validate(options);
  } catch (const Error& error) {
    throw Error(error.code(), std::string(error.what()) + " (of sequences of " +
                                  std::to_string(options.largest.max_tokens) +
                                  " tokens); lower largest.max_tokens or what the policy keeps");
  }
}

}  // namespace

EngineOptions with_policies(const EngineOptions& options) {
  validate(options);
  EngineOptions raised = options;
  raised.largest.max_tokens = longest_sequence(options);
  for (const PolicySpec& policy : options.policies) {
    try {
      require_counted(policy, options);
      make_room(policy, raised.largest.max_tokens, raised);
      require_possible(raised);
    } catch (const Error& error) {
      const std::string name = policy.name.empty() ? to_string(policy) : policy.name;
      throw Error(error.code(), "EngineOptions::policies: `" + name + "`: " + error.what());
    }
  }
  raised.cpu_sequences = scheduler::cpu_sequences(raised);
  raised.cluster_sequences = scheduler::cluster_sequences(raised);
  validate(raised);
  return raised;
}

EngineSizes sizes_of(const EngineOptions& options) noexcept {
  // Beside scores of the caller there are no copies of keys, unless a width is named.
  const std::uint32_t unnamed = options.largest.scores ? 0 : kCodeBits;
  return {.prompt_queries = options.prompt_queries,
          .max_picks = options.max_picks,
          .max_ranked = options.max_ranked,
          .max_window = options.max_window,
          .max_clusters = options.max_clusters != 0 ? options.max_clusters : kUsualClusters,
          .code_bits = options.code_bits != 0 ? options.code_bits : unnamed,
          .digests = options.digests,
          .forecasts = options.forecasts};
}

void make_room(const PolicySpec& policy, std::uint32_t tokens, EngineOptions& options) {
  sluice::validate(policy);
  const scheduler::ForwardNeeds needs = scheduler::forward_needs(policy, tokens, limits_of(options, {}).shape);
  if (needs.bucket.pages && options.digests.value_or(policy.pages.digest) != policy.pages.digest)
    throw Error(Errc::unsupported,
                "the policy ranks pages by another kind of digest than EngineOptions::digests has for the "
                "policies before it; give it an engine of its own");
  const std::uint32_t bits = scheduler::code_bits(policy);
  if (bits != 0 && options.code_bits != 0 && options.code_bits != bits)
    throw Error(Errc::unsupported, "the policy chooses by copies of keys of " + std::to_string(bits) +
                                       " bits, and EngineOptions::code_bits is " + std::to_string(options.code_bits) +
                                       ", for the policies before it or as it was set; write " +
                                       (bits == kCodeBits ? "int3" : "int4") +
                                       ", leave it out of EngineOptions::policies, or give it an engine of its own");
  if (needs.bucket.pages) options.digests = policy.pages.digest;
  if (bits != 0) options.code_bits = bits;
  Bucket& bucket = options.largest;
  bucket.top_k |= needs.bucket.top_k;
  bucket.unbounded |= needs.bucket.unbounded;
  bucket.pages |= needs.bucket.pages;
  bucket.rehearsed |= needs.bucket.rehearsed;
  bucket.scores |= needs.bucket.scores;
  options.max_window = std::max(options.max_window, needs.window);
  options.max_picks = std::max(options.max_picks, needs.picks);
  options.max_ranked = std::max(options.max_ranked, needs.ranked);
  options.prompt_queries = std::max(options.prompt_queries, scheduler::prompt_queries(policy));
  options.max_clusters = std::max(options.max_clusters, needs.clusters);
  // The CPU makes observed choices once more. On an H200 a layer of 32K tokens took 1,146 us without forecasts and
  // 1,197 with them where each step was observed, 1,180 and 332 where each eighth was; 2,405 and 3,130, 2,850 and 2,391
  // of 128K.
  constexpr std::uint32_t kWorthForecasts = 4;
  options.forecasts |= scheduler::forecasts(policy) && policy.history.observe_every >= kWorthForecasts;
  bucket.unbounded |= options.forecasts && scheduler::forecasts(policy) && policy.budget.kind == BudgetKind::top_p;
  require_served(policy, options, sizes_of(options));
}

void require_served(const PolicySpec& policy, const EngineOptions& options, const EngineSizes& sizes) {
  const std::string reason = scheduler::forward_unserved(policy, options.largest, limits_of(options, sizes));
  if (!reason.empty() && !servable(policy, options))
    throw Error(Errc::unsupported, "the engine cannot serve this policy: " + reason +
                                       "; engines serve policies such as `exact | int4 | top_p=0.95 | near=0`");
  // What helps in a bucket does not help here.
  if (!reason.empty())
    throw Error(Errc::unsupported,
                "the engine has no room for this policy: " + reason.substr(0, reason.find(';')) + kNameIt);
  if (scheduler::prompt_queries(policy) > sizes.prompt_queries)
    throw Error(Errc::unsupported, "the policy begins with " + std::to_string(scheduler::prompt_queries(policy)) +
                                       " queries of a prompt, and the engine has room for " +
                                       std::to_string(sizes.prompt_queries) + kNameIt);
}

}  // namespace sluice::runtime
