#include "scheduler/plan/forward_rows.hpp"

#include <algorithm>

#include "scheduler/clusters/cluster_schedule.hpp"
#include "scheduler/clusters/curve_fit.hpp"
#include "scheduler/labels/label_cache.hpp"
#include "scheduler/labels/skewed_cache.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/policy/budget.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/int4.hpp"

namespace sluice::scheduler {
namespace {

bool only(const PolicySpec& spec, Source source) noexcept { return spec.sources == static_cast<std::uint16_t>(source); }

/// Whether what is attended is chosen by score.
bool ranks(const PolicySpec& spec) noexcept { return spec.sources != 0 && !spec.uses(Source::all); }

/// Whether tokens are chosen by their copies in codes: of all, or of those in chosen pages.
bool by_copies(const PolicySpec& spec) noexcept {
  const bool cut = spec.budget.kind == BudgetKind::top_k || spec.budget.kind == BudgetKind::top_p;
  return (only(spec, Source::exact) || only(spec, Source::pages)) && code_bits(spec) != 0 &&
         (cut || spec.budget.kind == BudgetKind::drawn);
}

/// Whether tokens are drawn, and divided by their chance.
bool draws(const PolicySpec& spec) noexcept {
  return (by_copies(spec) || brings_scores(spec)) && spec.budget.kind == BudgetKind::drawn;
}

/// Scores that each query head looks for, of `tokens` tokens: one more than it draws at most, which says what chance
/// those had.
std::uint32_t picks_per_head(const PolicySpec& spec, std::uint32_t tokens, const RowShape& shape) noexcept {
  return most_tokens_per_head(spec, tokens, shape) + (draws(spec) ? 1 : 0);
}

/// The draws of a sequence of so many tokens.
SampleDraws draws_of(const PolicySpec& spec, std::uint32_t tokens, const RowShape& shape) noexcept {
  const std::uint32_t turn = spec.budget.redraw == 0 ? 0 : tokens / spec.budget.redraw;
  return {.key = mix_bits(spec.budget.seed ^ mix_bits(turn)),
          .kind = spec.budget.group_draws ? SampleDraws::Kind::group : SampleDraws::Kind::head,
          .least = tokens_per_head(spec, tokens, shape),
          .error = spec.budget.draw_error};
}

/// Whether a row that draws attends all of so many candidates: if one is left, it is attended, too.
bool draws_all(const ForwardRow& row, std::uint32_t candidates) noexcept {
  return row.draws.any() && row.draws.least + 1 >= candidates;
}

/// Whether clusters are chosen by 4-bit copies of some of their keys.
bool by_clusters(const PolicySpec& spec) noexcept {
  return only(spec, Source::clusters) && spec.estimate == Estimate::int4 && spec.budget.kind == BudgetKind::fitted;
}

/// Whether pages are taken by 4-bit copies of their keys until there is a share.
bool by_pages(const PolicySpec& spec) noexcept {
  return only(spec, Source::pages) && spec.estimate == Estimate::int4 && spec.budget.kind == BudgetKind::progressive;
}

/// Whether a budget is a share of the mass that the device finds.
bool by_share(const PolicySpec& spec) noexcept {
  return spec.budget.kind == BudgetKind::top_p || spec.budget.kind == BudgetKind::fitted || by_pages(spec);
}

/// Whether each query head chooses pages, which are attended as they are.
bool whole_pages(const PolicySpec& spec) noexcept {
  return only(spec, Source::pages) && spec.budget.kind == BudgetKind::top_k && spec.budget.share >= 1.f &&
         spec.pages.rank == PageRank::head;
}

/// As many as EngineSizes::max_ranked may be: however long a sequence of an engine is.
constexpr std::uint32_t kAllPages = 1u << 20;

/// The new token itself is always attended, but by policies of the CPU, which see to it.
std::uint32_t recent_of(const PolicySpec& spec) noexcept {
  return std::max(spec.near.recent_tokens, chooser(spec) == Chooser::cpu ? 0u : 1u);
}

/// First of the recent tokens of a row. Of pages that the device chooses from the newest is among them: no digest
/// speaks for it.
std::uint32_t recent_begin(const PolicySpec& spec, std::uint32_t tokens, std::uint32_t page_tokens) noexcept {
  const std::uint32_t begin = tokens - std::min(recent_of(spec), tokens);
  const bool opens = spec.uses(Source::pages) && chooser(spec) == Chooser::device;
  return opens ? std::min(begin, newest_page(tokens, page_tokens)) : begin;
}

/// A row with nothing to draw: all its tokens are attended, with certainty.
void attend_all(ForwardRow& row) noexcept {
  row.sink_end = row.recent_begin = row.tokens;
  row.picks = 0;
  row.draws = {};
}

std::string why_neither(const PolicySpec& spec) {
  if (spec.near.share != 0.f) return "it attends a share of pages near; say near=0";
  return "it bypasses heads, and chooses by copies of keys; say bypass=off";
}

/// Whether a policy reads nothing of values, nor of keys as they lie, to choose by: both are one in latent attention.
bool serves_latent(const PolicySpec& spec) noexcept {
  return chooser(spec) == Chooser::device && (!ranks(spec) || only(spec, Source::exact) || only(spec, Source::scores));
}

/// Pages that each query head chooses of the `pages` full ones of `tokens` tokens. Where they are attended as they are,
/// no more than far tokens have a budget for.
std::uint32_t pages_per_head(const PolicySpec& spec, std::uint32_t pages, std::uint32_t tokens,
                             const RowShape& shape) noexcept {
  const std::uint32_t picks = budget_pages(spec.pages, pages, shape.page_tokens);
  if (!whole_pages(spec)) return picks;
  return std::min(picks, far_tokens_per_head(spec.far, tokens, shape) / shape.page_tokens);
}

/// A row of pages that the device chooses from.
void choose_pages(const PolicySpec& spec, const RowShape& shape, ForwardRow& row) noexcept {
  row.pages = newest_page(row.tokens, shape.page_tokens) / shape.page_tokens;
  if (by_pages(spec)) {
    row.microbatch = spec.budget.microbatch;
    row.rule = spec.budget.rule;
    return;
  }
  row.page_picks = pages_per_head(spec, row.pages, row.tokens, shape);
  const bool few = spec.budget.kind == BudgetKind::top_k && row.tokens - row.sink_end <= spec.budget.min_tokens &&
                   row.recent_begin - row.sink_end <= far_tokens_per_head(spec.far, row.tokens, shape);
  if (row.page_picks < row.pages && !few) return;
  // Every page is a candidate.
  row.pages = row.page_picks = 0;
  if (!whole_pages(spec)) return;
  row.sink_end = row.recent_begin = row.tokens;
}

/// Whether everything is attended in some layer.
bool somewhere_whole(const PolicySpec& spec) noexcept {
  return spec.uses(Source::all) || spec.dense_layers != 0 || spec.dense_every != 0;
}

/// The features of a bucket that its rows need.
Bucket features(const PolicySpec& spec) noexcept {
  const bool by_device = chooser(spec) == Chooser::device && ranks(spec) && !whole_pages(spec);
  return {.top_k = by_device && (spec.budget.kind == BudgetKind::top_k || draws(spec)),
          .unbounded = somewhere_whole(spec) || (by_device && by_share(spec)),
          .pages = spec.uses(Source::pages),
          .rehearsed = spec.rehearsed,
          .scores = brings_scores(spec)};
}

std::string lacks(const PolicySpec& spec, const Bucket& bucket) {
  const Bucket needs = features(spec);
  if (needs.unbounded && !bucket.unbounded)
    return somewhere_whole(spec) ? "it attends everything in some layer; say so by Bucket::unbounded"
                                 : "it chooses a share of the mass; say so by Bucket::unbounded";
  if (needs.top_k && !bucket.top_k) return "it chooses by top_k; say so by Bucket::top_k";
  if (needs.rehearsed && !bucket.rehearsed)
    return "it chooses by rehearsed queries, which attend is to be given in each layer but the first; say so by "
           "Bucket::rehearsed (SLUICE_BUCKET_REHEARSED), or leave the stage rehearsed out";
  if (needs.scores && !bucket.scores)
    return "it chooses by scores that attend is to be given in each layer; say so by Bucket::scores "
           "(SLUICE_BUCKET_SCORES), or choose by copies of keys: exact | int4";
  if (needs.pages && !bucket.pages) return "it ranks pages; say so by Bucket::pages";
  return {};
}

std::uint64_t window_of(const PolicySpec& spec, std::uint32_t page_tokens) noexcept {
  return std::uint64_t{spec.near.sink_tokens} + std::max(recent_of(spec), spec.uses(Source::pages) ? page_tokens : 0);
}

/// Whether there must be room for a window: pages of it are estimated apart from those that are chosen, and the chances
/// of what was drawn are listed beside it.
bool bounds_window(const PolicySpec& spec, const Bucket& bucket) noexcept {
  return !bucket.unbounded || spec.uses(Source::pages) || draws(spec);
}

/// Whether pages are attended as they are, whoever chooses them. Of policies that rank pages by themselves the open one
/// is far, too, and counts first.
bool attends_pages(const PolicySpec& spec) noexcept {
  return (whole_pages(spec) && chooser(spec) == Chooser::device) || ranks_itself(spec);
}

std::string too_few_far_tokens(const PolicySpec& spec, std::uint64_t least) {
  const std::string enough = std::to_string(least);
  const char* const each = !attends_pages(spec) ? "a token"
                           : ranks_itself(spec) ? "two pages, the open one among them"
                                                : "a page";
  return std::string("its budget of far tokens may leave a query head less than ") + each + "; write far=" + enough +
         " or more" + (attends_pages(spec) ? ", or far=max(" + enough + ", SHARE)" : "");
}

/// Of a budget that is no number of tokens.
std::uint32_t most_per_head(const PolicySpec& spec, std::uint32_t tokens, const RowShape& shape) noexcept {
  return spec.far.all() ? kNone : far_tokens_per_head(spec.far, tokens, shape);
}

const char* name_of(DigestKind kind) noexcept { return kind == DigestKind::box ? "box" : "cuboid_mean"; }

}  // namespace

Chooser chooser(const PolicySpec& spec) noexcept {
  if (!ranks(spec)) return spec.near.share != 0.f && !spec.uses(Source::all) ? Chooser::neither : Chooser::device;
  if (spec.near.share != 0.f) return Chooser::neither;
  if (spec.bypass_threshold == 0.f)
    return by_copies(spec) || brings_scores(spec) || by_clusters(spec) || by_pages(spec) || whole_pages(spec)
               ? Chooser::device
               : Chooser::cpu;
  return by_copies(spec) ? Chooser::neither : Chooser::cpu;
}

bool clusters_on_device(const PolicySpec& spec) noexcept { return by_clusters(spec); }

bool brings_scores(const PolicySpec& spec) noexcept { return only(spec, Source::scores); }

std::uint32_t code_bits(const PolicySpec& spec) noexcept {
  if (spec.estimate == Estimate::int3) return kFewCodeBits;
  return spec.estimate == Estimate::int4 ? kCodeBits : 0;
}

std::uint32_t code_bits_for(const PolicySpec& spec) noexcept {
  if (brings_scores(spec)) return 0;
  const std::uint32_t named = code_bits(spec);
  return named == 0 ? kCodeBits : named;
}

bool forecasts(const PolicySpec& spec) noexcept {
  const bool cut = spec.budget.kind == BudgetKind::top_k || spec.budget.kind == BudgetKind::top_p;
  return only(spec, Source::history) && spec.estimate == Estimate::int4 && cut && spec.bypass_threshold == 0.f &&
         spec.near.share == 0.f;
}

bool copies_open_page(const PolicySpec& spec, std::uint32_t page_tokens) noexcept {
  return forecasts(spec) && by_share(spec) && spec.near.recent_tokens >= page_tokens;
}

std::uint32_t prompt_queries(const PolicySpec& spec) noexcept {
  std::uint32_t queries = spec.bypass_threshold > 0.f ? 1 : 0;
  if (spec.uses(Source::history)) queries = spec.history.init_queries;
  if (spec.uses(Source::labels)) queries = std::max(queries, kLabelQueries);
  if (spec.estimate == Estimate::skewed) queries = std::max(queries, kSkewQueries);
  if (spec.uses(Source::snapshot)) queries = std::max(queries, spec.snapshot.window);
  return queries;
}

bool remembers(const PolicySpec& spec) noexcept {
  return spec.uses(Source::history) || spec.uses(Source::clusters) || spec.uses(Source::lsh) ||
         spec.uses(Source::snapshot) || spec.uses(Source::labels) || spec.bypass_threshold > 0.f ||
         spec.estimate == Estimate::hadamard || spec.estimate == Estimate::skewed;
}

bool samples_for_one(const PolicySpec& spec) noexcept {
  return spec.budget.kind == BudgetKind::sampled || spec.budget.kind == BudgetKind::verified;
}

bool corrects_scores(const PolicySpec& spec) noexcept {
  return samples_for_one(spec) || spec.budget.kind == BudgetKind::drawn;
}

bool may_be_dense(const PolicySpec& spec) noexcept { return chooser(spec) == Chooser::device && !by_clusters(spec); }

ForwardNeeds forward_needs(const PolicySpec& spec, std::uint32_t tokens, const RowShape& shape) noexcept {
  ForwardNeeds needs{.bucket = features(spec)};
  if (bounds_window(spec, needs.bucket)) needs.window = static_cast<std::uint32_t>(window_of(spec, shape.page_tokens));
  needs.bucket.top_k |= forecasts(spec);
  if (needs.bucket.top_k && !by_share(spec)) needs.picks = picks_per_head(spec, tokens, shape);
  if (by_clusters(spec)) needs.clusters = ClusterSchedule::most_clusters(spec.clusters, tokens);
  if (!needs.bucket.pages) return needs;
  needs.ranked = by_pages(spec) ? kAllPages : pages_per_head(spec, tokens / shape.page_tokens, tokens, shape);
  // All tokens are attended while they are so few.
  const std::uint64_t few = std::uint64_t{spec.near.sink_tokens} + spec.budget.min_tokens;
  if (whole_pages(spec))
    needs.ranked = std::max(
        needs.ranked, static_cast<std::uint32_t>(div_up(std::min<std::uint64_t>(tokens, few), shape.page_tokens)));
  return needs;
}

std::string forward_unserved(const PolicySpec& spec, const Bucket& bucket, const ForwardLimits& limits) {
  if (chooser(spec) == Chooser::neither) return why_neither(spec);
  if (limits.latent && !serves_latent(spec))
    return "latent attention (shape.value_dim) has policies that attend everything, or choose among all tokens by "
           "copies of keys or by scores of the caller; write full, exact | int4, exact | int3 or scores";
  const bool dense = bucket.max_tokens != 0 && bucket.max_tokens <= limits.shape.dense_tokens && may_be_dense(spec);
  if (std::string reason = dense ? "" : lacks(spec, bucket); !reason.empty()) return reason;
  if (spec.uses(Source::pages) && limits.digests != spec.pages.digest)
    return std::string("it ranks pages by their ") + name_of(spec.pages.digest) +
           (limits.digests ? " digests, and the engine's are others; give it an engine of its own"
                           : " digests; name it in EngineOptions::policies");
  const std::uint32_t bits = code_bits(spec);
  if (bits != 0 && limits.code_bits == 0)
    return "it chooses by copies of keys, and the engine keeps none beside scores of the caller; name it in "
           "EngineOptions::policies";
  if (bits != 0 && bits != limits.code_bits)
    return "it chooses by copies of keys of " + std::to_string(bits) + " bits, and the engine's have " +
           std::to_string(limits.code_bits) + "; write " + (bits == kCodeBits ? "int3" : "int4") +
           ", or give it an engine of its own";
  if (by_clusters(spec) && limits.cluster_sequences == 0)
    return "it chooses among clusters on the device; name it in EngineOptions::policies";
  if (const std::uint64_t least = least_far_tokens(spec, limits.shape); spec.far.min_tokens < least)
    return too_few_far_tokens(spec, least);
  const std::uint64_t window = window_of(spec, limits.shape.page_tokens);
  if (window > limits.max_window && bounds_window(spec, bucket) && !dense)
    return "sinks and recent tokens are " + std::to_string(window) + ", and there is room for " +
           std::to_string(limits.max_window) + "; name it in EngineOptions::policies";
  return {};
}

std::uint64_t least_far_tokens(const PolicySpec& spec, const RowShape& shape) noexcept {
  if (spec.far.all()) return 0;
  const std::uint64_t each_a_page = std::uint64_t{shape.q_heads} * shape.page_tokens;
  if (attends_pages(spec)) return ranks_itself(spec) ? 2 * each_a_page : each_a_page;
  return spec.far.share > 0.f ? 0 : shape.q_heads;
}

ForwardRow forward_row(const PolicySpec& spec, std::uint32_t tokens, const RowShape& shape) noexcept {
  ForwardRow row{.tokens = tokens, .dense_layers = spec.dense_layers, .dense_every = spec.dense_every};
  if (tokens <= shape.dense_tokens && may_be_dense(spec)) {
    row.sink_end = row.recent_begin = tokens;
    return row;
  }
  row.sink_end = spec.uses(Source::all) ? tokens : std::min(spec.near.sink_tokens, tokens);
  row.recent_begin = std::max(row.sink_end, recent_begin(spec, tokens, shape.page_tokens));
  if (chooser(spec) == Chooser::cpu) {
    row.asks = 1;
    row.most = most_per_head(spec, tokens, shape);
    if (!spec.uses(Source::pages)) return row;
    row.pages = newest_page(tokens, shape.page_tokens) / shape.page_tokens;
    if (!ranks_itself(spec)) row.page_picks = budget_pages(spec.pages, row.pages, shape.page_tokens);
    return row;
  }
  if (row.recent_begin == row.sink_end || spec.sources == 0) return row;
  if (spec.uses(Source::pages)) choose_pages(spec, shape, row);
  if (whole_pages(spec)) return row;
  const std::uint32_t candidates =
      row.page_picks != 0 ? row.page_picks * shape.page_tokens : row.recent_begin - row.sink_end;
  if (by_share(spec)) {
    row.most = most_per_head(spec, tokens, shape);
    row.mass = row.most == 0 ? 0.f : spec.budget.mass;
  } else if (draws(spec)) {
    row.picks = std::min(picks_per_head(spec, tokens, shape), candidates);
    row.draws = draws_of(spec, tokens, shape);
    if (draws_all(row, candidates)) attend_all(row);
  } else {
    row.picks = std::min(tokens_per_head(spec, tokens, shape), candidates);
  }
  return row;
}

void choose_clusters(const PolicySpec& spec, std::uint32_t slot, std::uint32_t count, std::uint32_t tokens,
                     ForwardRow& row) noexcept {
  const FitSamples samples = fit_samples(spec.clusters, std::min(tokens, row.tokens));
  row.recent_begin = std::min(row.recent_begin, samples.tokens);
  row.sink_end = std::min(row.sink_end, row.recent_begin);
  row.clusters = {.slot = slot, .count = count, .samples = samples};
  if (samples.tokens != 0 && row.sink_end != row.recent_begin) return;
  row.sink_end = row.recent_begin = row.tokens;
  row.mass = 0.f;
  row.clusters = {};
}

void choose_proposed(const PolicySpec& spec, std::uint32_t slot, const RowShape& shape, ForwardRow& row) noexcept {
  if (!forecasts(spec) || row.asks == 0 || row.drafts != 0 || spec.near.recent_tokens < shape.page_tokens) return;
  if (row.recent_begin <= row.sink_end || row.most == 0) return;
  if (by_share(spec)) {
    row.mass = spec.budget.mass;
  } else {
    row.picks = std::min(tokens_per_head(spec, row.tokens, shape), row.recent_begin - row.sink_end);
  }
  row.proposed = slot + 1;
  row.asks = 0;
}

ForwardRow forward_team(const PolicySpec& spec, std::uint32_t tokens, std::uint32_t drafts,
                        const RowShape& shape) noexcept {
  // Windows as the first row has them, which the others' are part of but for their own tokens. What the device chooses
  // is as much as the last has; a policy of the CPU chooses for the first row alone.
  ForwardRow row = forward_row(spec, tokens + 1, shape);
  const ForwardRow last = forward_row(spec, tokens + drafts, shape);
  row.drafts = drafts;
  row.tokens = tokens;
  row.sink_end = std::min(row.sink_end, tokens);
  row.recent_begin = std::min(row.recent_begin, tokens);
  if (row.asks != 0) return row;
  if (row.page_picks != 0) row.page_picks = std::min(std::max(row.page_picks, last.page_picks), row.pages);
  const std::uint32_t candidates =
      row.page_picks != 0 ? row.page_picks * shape.page_tokens : row.recent_begin - row.sink_end;
  if (candidates != 0 && last.mass > 0.f) {
    row.mass = last.mass;
    row.most = last.most;
  }
  row.picks = std::min(std::max(row.picks, last.picks), candidates);
  if (row.draws.any()) row.draws.least = std::max(row.draws.least, last.draws.least);
  if (draws_all(row, candidates)) attend_all(row);
  return row;
}

}  // namespace sluice::scheduler
