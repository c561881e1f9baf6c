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
void require_possible(const EngineSizes& sizes, std::uint32_t tokens) {
  constexpr std::uint32_t kMostQueries = 256;
  constexpr std::uint32_t kMost = 1u << 20;
  const auto require = [&](std::uint32_t wanted, std::uint32_t most, const char* what) {
    if (wanted <= most) return;
    throw Error(Errc::invalid_argument, "it wants " + std::to_string(wanted) + " " + what + " of sequences of " +
                                            std::to_string(tokens) + " tokens, and an engine may have " +
                                            std::to_string(most) +
                                            "; lower largest.max_tokens or what the policy keeps");
  };
  require(sizes.prompt_queries, kMostQueries, "queries of a prompt");
  require(sizes.max_picks, kMost, "tokens for a query head to choose");
  require(sizes.max_ranked, kMost, "pages for a query head to choose");
  require(sizes.max_window, kMost, "sinks and recent tokens");
  require(sizes.max_clusters, kMost, "clusters of a KV head");
}

/// One engine has one kind of each.
void require_alike(const PolicySpec& policy, bool ranks, std::uint32_t bits, const EngineSizes& before) {
  constexpr const char* kApart = "leave it out of EngineOptions::policies, or give it an engine of its own";
  if (ranks && before.digests.value_or(policy.pages.digest) != policy.pages.digest)
    throw Error(Errc::unsupported,
                std::string("it ranks pages by another kind of digest than the policies before it; ") + kApart);
  if (bits != 0 && before.code_bits != 0 && before.code_bits != bits)
    throw Error(Errc::unsupported, "it chooses by copies of keys of " + std::to_string(bits) +
                                       " bits, and the policies before it by copies of " +
                                       std::to_string(before.code_bits) + "; write " +
                                       (bits == kCodeBits ? "int3" : "int4") + ", " + kApart);
}

/// Raises what a sequence of this policy needs that grows to as many tokens as the largest bucket has.
void make_room(const PolicySpec& policy, ResolvedOptions& engine) {
  Bucket& bucket = engine.options.largest;
  EngineSizes& sizes = engine.sizes;
  const scheduler::ForwardNeeds needs =
      scheduler::forward_needs(policy, bucket.max_tokens, limits_of(engine.options, {}).shape);
  const std::uint32_t bits = scheduler::code_bits(policy);
  require_alike(policy, needs.bucket.pages, bits, sizes);
  if (needs.bucket.pages) sizes.digests = policy.pages.digest;
  if (bits != 0) sizes.code_bits = bits;
  bucket.top_k |= needs.bucket.top_k;
  bucket.unbounded |= needs.bucket.unbounded;
  bucket.pages |= needs.bucket.pages;
  bucket.rehearsed |= needs.bucket.rehearsed;
  bucket.scores |= needs.bucket.scores;
  sizes.max_window = std::max(sizes.max_window, needs.window);
  sizes.max_picks = std::max(sizes.max_picks, needs.picks);
  sizes.max_ranked = std::max(sizes.max_ranked, needs.ranked);
  sizes.prompt_queries = std::max(sizes.prompt_queries, scheduler::prompt_queries(policy));
  sizes.max_clusters = std::max(sizes.max_clusters, needs.clusters);
  // The CPU makes observed choices once more. On an H200 a layer of 32K tokens took 1,146 us without forecasts and
  // 1,197 with them where each step was observed, 1,180 and 332 where each eighth was; 2,405 and 3,130, 2,850 and 2,391
  // of 128K.
  constexpr std::uint32_t kWorthForecasts = 4;
  sizes.forecasts |= scheduler::forecasts(policy) && policy.history.observe_every >= kWorthForecasts;
  bucket.unbounded |= sizes.forecasts && scheduler::forecasts(policy) && policy.budget.kind == BudgetKind::top_p;
  require_served(policy, engine.options, sizes);
  require_possible(sizes, bucket.max_tokens);
}

/// What the caller has set and no policy of the engine says how to do.
void require_named(const ResolvedOptions& engine) {
  if (engine.options.largest.pages && !engine.sizes.digests)
    throw Error(Errc::invalid_argument,
                "largest.pages is true, and none of EngineOptions::policies ranks pages; name one, or leave it out");
}

}  // namespace

ResolvedOptions with_policies(const EngineOptions& options) {
  validate(options);
  ResolvedOptions engine{.options = options,
                         .sizes = {.cpu_sequences = scheduler::cpu_sequences(options),
                                   .cluster_sequences = scheduler::cluster_sequences(options)}};
  engine.options.largest.max_tokens = longest_sequence(options);
  for (const PolicySpec& policy : options.policies) {
    try {
      sluice::validate(policy);
      require_counted(policy, options);
      make_room(policy, engine);
    } catch (const Error& error) {
      const std::string name = policy.name.empty() ? to_string(policy) : policy.name;
      throw Error(error.code(), "EngineOptions::policies: `" + name + "`: " + error.what());
    }
  }
  require_named(engine);
  // Beside scores of the caller there are no copies of keys, unless a policy chooses by them.
  if (engine.sizes.code_bits == 0 && !engine.options.largest.scores) engine.sizes.code_bits = kCodeBits;
  validate(engine.options);
  return engine;
}

void require_served(const PolicySpec& policy, const EngineOptions& options, const EngineSizes& sizes) {
  const std::string reason = scheduler::forward_unserved(policy, options.largest, limits_of(options, sizes));
  if (!reason.empty() && !servable(policy, options))
    throw Error(Errc::unsupported, "the engine cannot serve this policy: " + reason +
                                       "; engines serve policies such as `exact | int4 | top_p=0.95 | near=0`");
  // Of another width or kind than those that there are, naming the policy makes none.
  const std::uint32_t bits = scheduler::code_bits(policy);
  const bool other_bits = bits != 0 && sizes.code_bits != 0 && bits != sizes.code_bits;
  const bool other_digests = policy.uses(Source::pages) && sizes.digests && sizes.digests != policy.pages.digest;
  if (!reason.empty() && (other_bits || other_digests))
    throw Error(Errc::unsupported, "the engine has no room for this policy: " + reason);
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
