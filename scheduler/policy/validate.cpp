// What a policy may say, and which stages go together.

#include <string>
#include <vector>

#include "scheduler/policy/text.hpp"
#include "sluice/error.hpp"
#include "sluice/policy.hpp"

namespace sluice {
namespace {

using namespace scheduler;

[[noreturn]] void reject(const char* field, const std::string& value, const std::string& range) {
  throw Error(Errc::invalid_argument, std::string("policy: ") + field + " is " + value + "; it must be in " + range);
}

// Comparisons are written so that NaN fails.

void check_open(const char* field, double value, double most, const char* range) {
  if (!(value > 0.0 && value <= most)) reject(field, number(value), range);
}

void check_share(const char* field, double value) {
  if (!(value >= 0.0 && value <= 1.0)) reject(field, number(value), "[0, 1]");
}

void check_count(const char* field, std::uint32_t value, std::uint32_t least, std::uint32_t most) {
  if (value >= least && value <= most) return;
  reject(field, std::to_string(value), "[" + std::to_string(least) + ", " + std::to_string(most) + "]");
}

constexpr std::uint32_t kMost = 0x7fff'ffffu;

void check_history(const HistoryOptions& history) {
  check_open("history.alpha", history.alpha, 10.0, "(0, 10]");
  if (!(history.decay > 0.f && history.decay <= kMostHistoryDecay))
    reject("history.decay", number(history.decay), "(0, 0.998]");
  check_count("history.init_queries", history.init_queries, 1, 256);
  check_count("history.local_tokens", history.local_tokens, 0, 4096);
  check_count("history.observe_every", history.observe_every, 1, 64);
  check_share("history.limit", history.limit);
}

void check_pages(const PageSourceOptions& pages) {
  check_count("pages.min_pages", pages.min_pages, 1, 65536);
  check_count("pages.min_tokens", pages.min_tokens, 0, kMost);
  check_share("pages.share", pages.share);
}

void check_clusters(const ClusterOptions& clusters) {
  check_count("clusters.tokens_per_cluster", clusters.tokens_per_cluster, 1, 1024);
  check_count("clusters.iterations", clusters.iterations, 1, 100);
  check_count("clusters.recluster_every", clusters.recluster_every, 64, 1u << 20);
  check_count("clusters.min_tokens", clusters.min_tokens, 0, 1u << 20);
  check_count("clusters.candidates", clusters.candidates, 1, kMost);
  check_open("clusters.head_share", clusters.head_share, 0.1, "(0, 0.1]");
  check_open("clusters.window_share", clusters.window_share, 0.1, "(0, 0.1]");
  if (!(clusters.near_window > 0.f && clusters.near_window < clusters.far_window && clusters.far_window < 1.f)) {
    reject("clusters.near_window", number(clusters.near_window),
           "(0, far_window), and far_window, which is " + number(clusters.far_window) + ", in (near_window, 1)");
  }
  if (!(clusters.far_window - clusters.near_window > clusters.window_share)) {
    reject("clusters.far_window", number(clusters.far_window),
           "(near_window + window_share, 1): windows that overlap fit no curve, and every context would be attended "
           "densely");
  }
  if (!(clusters.head_share < clusters.near_window - clusters.window_share / 2)) {
    reject("clusters.head_share", number(clusters.head_share),
           "(0, near_window - window_share / 2): the tokens that are scored one by one end before the first window");
  }
}

void check_lsh(const LshOptions& lsh) {
  check_count("lsh.bits", lsh.bits, 1, 16);
  check_count("lsh.tables", lsh.tables, 1, 512);
  check_count("lsh.min_collisions", lsh.min_collisions, 1, 2);
  check_count("lsh.recent_prompt", lsh.recent_prompt, 0, 4096);
  if (lsh.min_collisions > lsh.tables) {
    reject("lsh.min_collisions", std::to_string(lsh.min_collisions), "[1, tables]; there is only one table");
  }
}

void check_snapshot(const SnapshotOptions& snapshot) {
  check_count("snapshot.budget", snapshot.budget, 1, kMost);
  check_count("snapshot.window", snapshot.window, 1, 256);
  check_count("snapshot.kernel", snapshot.kernel, 1, 63);
  check_count("snapshot.pyramid", snapshot.pyramid, 1, 1000);
  check_share("snapshot.floor", snapshot.floor);
  if (snapshot.kernel % 2 == 0)
    reject("snapshot.kernel", std::to_string(snapshot.kernel), "[1, 63], and odd: as many positions before as behind");
}

void check_labels(const LabelOptions& labels) {
  check_count("labels.channels", labels.channels, 1, 256);
  check_count("labels.min_tokens", labels.min_tokens, 1, kMost);
  check_share("labels.share", labels.share);
}

void check_budget(const BudgetOptions& budget) {
  check_count("budget.min_tokens", budget.min_tokens, 1, kMost);
  check_share("budget.share", budget.share);
  check_open("budget.mass", budget.mass, 1.0, "(0, 1]");
  check_count("budget.microbatch", budget.microbatch, 1, 1024);
  if (!(budget.error > 0.f && budget.error < 1.f)) reject("budget.error", number(budget.error), "(0, 1)");
  check_open("budget.delta", budget.delta, 0.5, "(0, 0.5]");
  check_open("budget.sample", budget.sample, 1.0, "(0, 1]");
  check_open("budget.alpha", budget.alpha, 1000.0, "(0, 1000]");
  check_count("budget.redraw", budget.redraw, 0, kMost);
  if (!(budget.draw_error >= 0.f && budget.draw_error < 1.f))
    reject("budget.draw_error", number(budget.draw_error), "[0, 1)");
  check_count("budget.draw_most", budget.draw_most, 0, kMost);
  const bool bounded = budget.kind == BudgetKind::drawn && budget.draw_error > 0.f && budget.draw_most != 0;
  if (bounded && budget.draw_most < budget.min_tokens)
    reject("budget.draw_most", std::to_string(budget.draw_most),
           "[" + std::to_string(budget.min_tokens) + ", 2^31): as many are drawn at first; raise most, or draw fewer");
}

void check_far(const FarOptions& far) {
  check_count("far.min_tokens", far.min_tokens, 0, kMost);
  check_share("far.share", far.share);
  if (far.min_tokens == 0 && far.share == 0.f)
    reject("far", "0",
           "[1, 2^31) tokens, or a share; to attend sinks and recent tokens alone, write none as the source");
}

void check_guards(const BypassGuards& guards) {
  if (!(guards.variance > 0.f)) reject("bypass_guards.variance", number(guards.variance), "(0, infinity]; off is none");
  if (!(guards.growth >= 0.f)) reject("bypass_guards.growth", number(guards.growth), "[0, infinity]; off is none");
}

template <class Enum>
void check_enum(const char* field, Enum value, Enum last) {
  if (value <= last) return;
  reject(field, std::to_string(static_cast<unsigned>(value)),
         "[0, " + std::to_string(static_cast<unsigned>(last)) + "]");
}

void check_enums(const PolicySpec& spec) {
  check_enum("history.tables", spec.history.tables, HistoryTables::slash);
  check_enum("estimate", spec.estimate, Estimate::skewed);
  check_enum("budget.kind", spec.budget.kind, BudgetKind::drawn);
  check_enum("snapshot.pooling", spec.snapshot.pooling, Pooling::mean);
  check_enum("budget.rule", spec.budget.rule, ProgressRule::certified);
  check_enum("pages.rank", spec.pages.rank, PageRank::layer);
  check_enum("pages.digest", spec.pages.digest, DigestKind::cuboid_mean);
}

/// What goes with scores that the caller brings.
void refuse_beside_scores(const PolicySpec& spec, std::vector<std::string>& reasons) {
  if (!spec.uses(Source::scores)) return;
  const BudgetKind kind = spec.budget.kind;
  if (spec.sources != static_cast<std::uint16_t>(Source::scores))
    reasons.emplace_back(
        "scores has a score of every token and needs nothing beside it; drop the other sources, or "
        "scores");
  if (spec.estimate != Estimate::exact)
    reasons.emplace_back(
        "with scores the caller says how much a token weighs, and nothing is left to estimate; drop "
        "int4, int3, hadamard or skewed, or write exact instead of scores");
  if (kind == BudgetKind::drawn)
    reasons.emplace_back(
        "sample draws by estimates of logits, which scores need not be; write top_k or top_p, or exact | int4 "
        "instead of scores");
  if (spec.bypass_threshold > 0.f)
    reasons.emplace_back("a bypass goes by scores of keys, and with scores none is read; write bypass=off");
}

constexpr bool power_of_two(std::uint32_t value) { return (value & (value - 1)) == 0; }

}  // namespace

std::vector<std::string> unsupported_reasons(const PolicySpec& spec) {
  std::vector<std::string> reasons;
  const auto refuse_if = [&reasons](bool refused, const char* why) {
    if (refused) reasons.emplace_back(why);
  };
  const auto only = [&spec](Source source) { return spec.sources == static_cast<std::uint16_t>(source); };
  const bool all = spec.uses(Source::all);
  const bool scored = chooses(spec);
  const bool exact = spec.estimate == Estimate::exact;
  const BudgetKind kind = spec.budget.kind;

  refuse_beside_scores(spec, reasons);
  constexpr auto kSources = static_cast<std::uint16_t>(2 * static_cast<std::uint16_t>(Source::labels) - 1);
  refuse_if((spec.sources & ~kSources) != 0, "sources has bits that are no Source; use those of the enumeration");
  refuse_if(spec.uses(Source::exact) && spec.uses(Source::labels),
            "source exact has every token already, and labels add none; drop one of them");
  refuse_if(all && !only(Source::all), "source all already attends every token; drop it or the sources beside it");
  refuse_if(!scored && (!exact || kind != BudgetKind::top_k),
            all ? "source all attends every token without looking at it; to estimate or cut, write exact instead"
                : "without a source there is nothing to estimate or cut; name one, such as pages");
  refuse_if(!scored && spec.bypass_threshold > 0.f,
            "a bypass spares the search for tokens, and this policy does not search; drop it, or name a source");
  refuse_if(
      scored && kind == BudgetKind::fitted && !only(Source::clusters),
      "fitted needs the order that clusters give, and nothing beside them; write clusters | fitted=0.9, or use top_p");
  refuse_if(
      scored && kind == BudgetKind::progressive && !only(Source::pages),
      "progressive walks down the ranking of pages and needs nothing beside them; write pages | progressive=0.95, or "
      "use top_p");
  refuse_if(scored && kind == BudgetKind::progressive && spec.budget.rule == ProgressRule::certified &&
                spec.pages.digest != DigestKind::box,
            "the rule certified needs page scores that are bounds, which only the digest box gives; write pages:box");
  refuse_if(
      scored && kind == BudgetKind::sampled && !only(Source::lsh),
      "sampled corrects for the chance of a hash collision and needs lsh alone; write lsh | sampled, or use top_k");
  refuse_if(
      scored && kind == BudgetKind::verified && !only(Source::exact),
      "verified samples from all tokens that are not kept and needs exact alone; write exact | verified=0.1, or use "
      "top_k");
  const bool by_layer = spec.uses(Source::pages) && spec.pages.rank == PageRank::layer;
  const bool whole = only(Source::pages) && exact && kind == BudgetKind::top_k && spec.budget.share >= 1.f;
  refuse_if(by_layer && !(whole && spec.bypass_threshold == 0.f),
            "rank=layer gives all heads of a layer the same whole pages, and nothing is cut or bypassed; write "
            "pages:rank=layer | top_k=all, or rank=head");
  const bool skewed = spec.estimate == Estimate::skewed;
  refuse_if(scored && kind == BudgetKind::within && !(only(Source::exact) && skewed),
            "within counts scores of all tokens by skewed channels and needs exact alone; write exact | skewed=20% | "
            "within=4, or use top_k");
  refuse_if(scored && skewed && kind != BudgetKind::within,
            "skewed estimates how far scores are from the best, for within; write within=4, or labels as the source");
  const bool few_bits = spec.estimate == Estimate::int3;
  const bool by_copies = few_bits || spec.estimate == Estimate::int4;
  refuse_if(scored && kind == BudgetKind::drawn && !(only(Source::exact) && by_copies) && !spec.uses(Source::scores),
            "sample draws among all tokens by their 4-bit copies, which tell each token's chance; write exact | int4 | "
            "sample=128");
  const bool cut = kind == BudgetKind::top_k || kind == BudgetKind::top_p || kind == BudgetKind::drawn;
  refuse_if(scored && few_bits && !(only(Source::exact) && cut),
            "int3 estimates all tokens for top_k, top_p or sample, and needs exact alone; write exact | int3 | "
            "sample=256, or int4");
  refuse_if(spec.rehearsed && kind != BudgetKind::within,
            "rehearsed queries choose by skewed channels within a distance of the best; write exact | skewed=20% | "
            "rehearsed | within=4, or drop rehearsed");
  refuse_if(spec.rehearsed && spec.dense_layers == 0,
            "no layer comes before the first, whose queries nothing rehearses; write dense=1 or more");
  const bool own_scores =
      kind == BudgetKind::fitted || kind == BudgetKind::progressive || kind == BudgetKind::sampled;
  const bool fitted_by_copies = kind == BudgetKind::fitted && spec.estimate == Estimate::int4;
  const bool pages_by_copies = kind == BudgetKind::progressive && spec.estimate == Estimate::int4;
  refuse_if(scored && own_scores && !exact && !fitted_by_copies && !pages_by_copies,
            "int4 and hadamard estimate candidates before top_k or top_p cut them, and int4 before fitted and "
            "progressive do; sampled scores as it goes");
  refuse_if(scored && (fitted_by_copies || pages_by_copies) && !spec.far.all(),
            "fitted and progressive by int4 are the device's choice, which knows no budget of far tokens; drop far, or "
            "int4");
  refuse_if(scored && pages_by_copies && spec.budget.rule == ProgressRule::certified,
            "the rule certified bounds keys, and int4 has copies of them; write another rule, or drop int4");
  const bool ordered = scored && spec.estimate == Estimate::hadamard;
  refuse_if(ordered && (kind == BudgetKind::top_p || kind == BudgetKind::verified),
            "hadamard tells which keys come first, not what they weigh; write int4 instead, or use top_k");
  refuse_if(ordered && spec.bypass_threshold > 0.f && spec.bypass_checked,
            "hadamard does not tell what keys weigh, which a bypass that is checked asks; drop it, or write check=off");
  refuse_if(
      ordered && spec.uses(Source::history),
      "history learns from scores, and hadamard only tells which keys come first; write int4 instead, or drop history");
  refuse_if(
      !scored && !spec.far.all(),
      all ? "source all attends every token and leaves nothing to a budget of far tokens; write exact instead, or "
            "drop far"
          : "without a source no far token is attended; drop far, or name a source");
  const bool samples = kind == BudgetKind::sampled || kind == BudgetKind::verified;
  refuse_if(scored && samples && !spec.far.all(),
            "a sample that is cut by score no longer stands for what one query would attend; drop far, or use top_k");
  refuse_if(scored && (own_scores || samples || kind == BudgetKind::within || kind == BudgetKind::drawn) &&
                spec.bypass_threshold > 0.f,
            "the bypass works with top_k and top_p; fitted, progressive, sampled, verified, within and sample have no "
            "place for it");
  return reasons;
}

void validate(const PolicySpec& spec) {
  check_enums(spec);
  check_history(spec.history);
  check_pages(spec.pages);
  check_clusters(spec.clusters);
  check_lsh(spec.lsh);
  check_snapshot(spec.snapshot);
  check_labels(spec.labels);
  check_open("skewed_share", spec.skewed_share, 1.0, "(0, 1]");
  check_budget(spec.budget);
  check_far(spec.far);
  check_count("near.sink_tokens", spec.near.sink_tokens, 0, 4096);
  check_count("near.recent_tokens", spec.near.recent_tokens, 0, 1'048'576);
  check_share("near.share", spec.near.share);
  check_share("bypass_threshold", spec.bypass_threshold);
  check_guards(spec.bypass_guards);
  check_count("dense_every", spec.dense_every, 0, 1024);
  if (spec.page_tokens != 0 && (spec.page_tokens < 8 || spec.page_tokens > 256 || !power_of_two(spec.page_tokens))) {
    reject("page_tokens", std::to_string(spec.page_tokens), "0 or a power of two in [8, 256]");
  }
  const std::vector<std::string> reasons = unsupported_reasons(spec);
  if (!reasons.empty()) throw Error(Errc::invalid_argument, "policy: " + reasons.front());
}

}  // namespace sluice
