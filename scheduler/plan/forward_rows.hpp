#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "scheduler/layer_policy.hpp"
#include "sluice/policy.hpp"
#include "sluice/step/forward.hpp"

namespace sluice::scheduler {

/// Who finds what the rows of a sequence attend beyond sinks and recent tokens.
enum class Chooser : std::uint8_t {
  device,   ///< by digests of pages, clusters or copies of keys; or there is nothing to choose
  cpu,      ///< its LayerPolicy, between a layer's question and its answer
  neither,  ///< such policies are not served
};
[[nodiscard]] Chooser chooser(const PolicySpec& spec) noexcept;

/// Whether the device clusters keys for a policy, and chooses among the clusters.
[[nodiscard]] bool clusters_on_device(const PolicySpec& spec) noexcept;

/// Whether the device can choose of what a policy's history proposes ahead of time, see choose_proposed.
[[nodiscard]] bool forecasts(const PolicySpec& spec) noexcept;

/// Whether a policy of the CPU weighs the open page by copies of its keys, as the device does, and not by the keys:
/// what is weighed decides what top-p keeps, and that is not to depend on who chooses.
[[nodiscard]] bool copies_open_page(const PolicySpec& spec, std::uint32_t page_tokens) noexcept;

/// Whether a sequence of this policy attends everything while it is no longer than EngineOptions::dense_tokens: others
/// learn from what they choose, or have to know all of it.
[[nodiscard]] bool may_be_dense(const PolicySpec& spec) noexcept;

/// Queries of a prompt's newest tokens that a policy begins with.
[[nodiscard]] std::uint32_t prompt_queries(const PolicySpec& spec) noexcept;

/// Whether tokens are chosen by scores that the caller of `attend` brings.
[[nodiscard]] bool brings_scores(const PolicySpec& spec) noexcept;

/// Bits of a channel of the copies of keys that a policy names; 0: it names none.
[[nodiscard]] std::uint32_t code_bits(const PolicySpec& spec) noexcept;
/// Of the copies of an engine that is for this policy; 0: it keeps none.
[[nodiscard]] std::uint32_t code_bits_for(const PolicySpec& spec) noexcept;

/// Whether what a policy chooses depends on more than the tokens there are: on what it has chosen before, or on where
/// its prompt ended.
[[nodiscard]] bool remembers(const PolicySpec& spec) noexcept;

/// Whether a choice is a sample of what one query attends, so that rows verified together cannot share it.
[[nodiscard]] bool samples_for_one(const PolicySpec& spec) noexcept;

/// Whether scores that come with a choice are not what its keys would give: those of a sample, which stands for more.
[[nodiscard]] bool corrects_scores(const PolicySpec& spec) noexcept;

/// Of what an engine has been built with, what a policy may need.
struct ForwardLimits {
  RowShape shape{};
  std::uint32_t max_window = 0;         ///< sinks and recent tokens together
  std::optional<DigestKind> digests{};  ///< of pages
  std::uint32_t cluster_sequences = 0;  ///< that may have clusters on the device
  std::uint32_t code_bits = 4;          ///< of keys' copies, see EngineSizes::code_bits; 0: there are none
  bool latent = false;                  ///< values are parts of keys, see AttentionShape::value_dim
};

/// What forwards with a policy's rows need to have, if their sequences have up to `tokens` tokens. Of the bucket, the
/// features alone.
struct ForwardNeeds {
  Bucket bucket{.top_k = false};
  std::uint32_t window =
      0;  ///< sinks and recent tokens together; 0 if the bucket is unbounded and that does not matter
  std::uint32_t picks = 0;
  std::uint32_t ranked = 0;  ///< pages that a query head chooses
  std::uint32_t clusters = 0;  ///< that a KV head chooses among
};
[[nodiscard]] ForwardNeeds forward_needs(const PolicySpec& spec, std::uint32_t tokens, const RowShape& shape) noexcept;

/// Why a forward of this bucket cannot serve a policy that parses; empty if it can.
[[nodiscard]] std::string forward_unserved(const PolicySpec& spec, const Bucket& bucket, const ForwardLimits& limits);

/// The smallest budget of far tokens that a policy which attends whole pages can keep to: FarOptions::min_tokens at
/// least. 0: any will do.
[[nodiscard]] std::uint64_t least_far_tokens(const PolicySpec& spec, const RowShape& shape) noexcept;

/// What the row of a sequence's token chooses from, if `tokens` are visible to it: a function of policy, length and
/// shape alone. List and packed row are the caller's.
[[nodiscard]] ForwardRow forward_row(const PolicySpec& spec, std::uint32_t tokens, const RowShape& shape) noexcept;

/// Makes a row, or a team, of such a policy choose among clusters: `count` of them hold its sequence's first `tokens`
/// tokens. All newer ones are attended. It attends everything where these are too few for the machinery.
void choose_clusters(const PolicySpec& spec, std::uint32_t slot, std::uint32_t count, std::uint32_t tokens,
                     ForwardRow& row) noexcept;

/// Makes a row whose policy forecasts() choose on the device of what its history proposes in slot `slot`: `picks`, or a
/// share of the mass, for which the bucket must be unbounded. Not where the open page is more than the recent tokens:
/// of what it is to choose from the CPU reads keys as they are, and the device copies of them.
void choose_proposed(const PolicySpec& spec, std::uint32_t slot, const RowShape& shape, ForwardRow& row) noexcept;

/// What a team of `drafts` tokens behind `tokens` others chooses from: at least what each of its rows would choose by
/// itself, if that is a number; if it is a share of the mass, as large a share. So each draft has a budget of far
/// tokens of its own, as large as the last one's.
[[nodiscard]] ForwardRow forward_team(const PolicySpec& spec, std::uint32_t tokens, std::uint32_t drafts,
                                      const RowShape& shape) noexcept;

/// visit(row, tokens before it) for every row, or team of `drafts` where these are not 1, of `count` new tokens behind
/// `tokens` others.
template <class Visit>
void for_each_choice(const PolicySpec& spec, std::uint32_t tokens, std::uint32_t count, std::uint32_t drafts,
                     const RowShape& shape, const Visit& visit) {
  for (std::uint32_t i = 0; i < count; i += drafts) {
    const std::uint32_t most = std::min(drafts, count - i);
    visit(drafts == 1 ? forward_row(spec, tokens + i + 1, shape) : forward_team(spec, tokens + i, most, shape), i);
  }
}

}  // namespace sluice::scheduler
