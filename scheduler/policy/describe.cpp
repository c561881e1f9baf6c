// A policy in words that parse_policy reads back.

#include <cmath>
#include <string>

#include "scheduler/policy/text.hpp"
#include "sluice/policy.hpp"

namespace sluice {
namespace {

using namespace scheduler;

/// A COUNT, as read_larger_of reads it; `all` leaves the usual floor as it is.
std::string larger_of(std::uint32_t count, float share, std::uint32_t usual) {
  if (share <= 0.f) return std::to_string(count);
  if (share >= 1.f && count == usual) return "all";
  return "max(" + std::to_string(count) + ", " + percent(share) + ")";
}

/// `name:key=value,...`, only with what differs from the defaults.
class Options {
 public:
  explicit Options(std::string name) : text_(std::move(name)) {}

  void word(const std::string& text) {
    text_ += (first_ ? ':' : ',') + text;
    first_ = false;
  }
  template <class Value, class Show>
  void add(const char* key, const Value& value, const Value& usual, const Show& show) {
    if (value != usual) word(std::string(key) + '=' + show(value));
  }
  void add(const char* key, std::uint32_t value, std::uint32_t usual) {
    add(key, value, usual, [](std::uint32_t v) { return std::to_string(v); });
  }
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
  bool first_ = true;
};

std::string on_off(bool on) { return on ? "on" : "off"; }

std::string tables_word(HistoryTables tables) {
  switch (tables) {
    case HistoryTables::both: return "both";
    case HistoryTables::vertical: return "vertical";
    case HistoryTables::slash: return "slash";
  }
  return "unknown";
}

std::string history_words(const HistoryOptions& history) {
  const HistoryOptions usual;
  Options options("history");
  options.add("alpha", history.alpha, usual.alpha, number);
  options.add("decay", history.decay, usual.decay, number);
  options.add("init", history.init_queries, usual.init_queries);
  options.add("local", history.local_tokens, usual.local_tokens);
  options.add("share_group", history.share_in_group, usual.share_in_group, on_off);
  options.add("observe_near", history.observe_near, usual.observe_near, on_off);
  options.add("observe_every", history.observe_every, usual.observe_every);
  options.add("limit", history.limit, usual.limit, percent);
  options.add("tables", history.tables, usual.tables, tables_word);
  options.add("expand", history.expand, usual.expand, on_off);
  return options.text();
}

std::string pages_words(const PageSourceOptions& pages) {
  const PageSourceOptions usual;
  Options options("pages");
  if (pages.digest != usual.digest) options.word(pages.digest == DigestKind::box ? "box" : "cuboid_mean");
  options.add("rank", pages.rank, usual.rank, [](PageRank rank) { return rank == PageRank::layer ? "layer" : "head"; });
  const bool by_tokens = pages.min_tokens != 0;
  if (by_tokens) {
    options.word("budget=" + std::to_string(pages.min_tokens));
    if (pages.min_pages != 1) options.word("min_pages=" + std::to_string(pages.min_pages));
    if (pages.share > 0.f) options.word("share=" + percent(pages.share));
  } else if (pages.min_pages != usual.min_pages || pages.share != usual.share) {
    options.word("pages=" + larger_of(pages.min_pages, pages.share, usual.min_pages));
  }
  return options.text();
}

std::string clusters_words(const ClusterOptions& clusters) {
  const ClusterOptions usual;
  Options options("clusters");
  options.add("size", clusters.tokens_per_cluster, usual.tokens_per_cluster);
  options.add("iterations", clusters.iterations, usual.iterations);
  options.add("recluster", clusters.recluster_every, usual.recluster_every);
  options.add("least", clusters.min_tokens, usual.min_tokens);
  options.add("candidates", clusters.candidates, usual.candidates);
  options.add("head", clusters.head_share, usual.head_share, percent);
  options.add("near_window", clusters.near_window, usual.near_window, percent);
  options.add("far_window", clusters.far_window, usual.far_window, percent);
  options.add("window", clusters.window_share, usual.window_share, percent);
  return options.text();
}

std::string lsh_words(const LshOptions& lsh) {
  const LshOptions usual;
  Options options("lsh");
  options.add("bits", lsh.bits, usual.bits);
  options.add("tables", lsh.tables, usual.tables);
  options.add("collisions", lsh.min_collisions, usual.min_collisions);
  options.add("recent_prompt", lsh.recent_prompt, usual.recent_prompt);
  options.add("seed", lsh.seed, usual.seed, [](std::uint64_t seed) { return std::to_string(seed); });
  return options.text();
}

std::string snapshot_words(const SnapshotOptions& snapshot) {
  const SnapshotOptions usual;
  Options options("snapshot");
  options.add("budget", snapshot.budget, usual.budget);
  options.add("window", snapshot.window, usual.window);
  options.add("kernel", snapshot.kernel, usual.kernel);
  options.add("pooling", snapshot.pooling, usual.pooling, [](Pooling p) { return p == Pooling::max ? "max" : "mean"; });
  options.add("pyramid", snapshot.pyramid, usual.pyramid);
  options.add("floor", snapshot.floor, usual.floor, percent);
  return options.text();
}

std::string labels_words(const LabelOptions& labels) {
  const LabelOptions usual;
  Options options("labels");
  options.add("channels", labels.channels, usual.channels);
  if (labels.min_tokens != usual.min_tokens || labels.share != usual.share)
    options.word("budget=" + larger_of(labels.min_tokens, labels.share, usual.min_tokens));
  return options.text();
}

std::string source_words(const PolicySpec& spec) {
  std::string text;
  const auto add = [&text](const std::string& words) { text += (text.empty() ? "" : "+") + words; };
  if (spec.uses(Source::all)) add("all");
  if (spec.uses(Source::exact)) add("exact");
  if (spec.uses(Source::history)) add(history_words(spec.history));
  if (spec.uses(Source::pages)) add(pages_words(spec.pages));
  if (spec.uses(Source::clusters)) add(clusters_words(spec.clusters));
  if (spec.uses(Source::lsh)) add(lsh_words(spec.lsh));
  if (spec.uses(Source::snapshot)) add(snapshot_words(spec.snapshot));
  if (spec.uses(Source::labels)) add(labels_words(spec.labels));
  if (spec.uses(Source::scores)) add("scores");
  return text.empty() ? "none" : text;
}

const char* to_word(ProgressRule rule) noexcept {
  switch (rule) {
    case ProgressRule::least: return "least";
    case ProgressRule::mean: return "mean";
    case ProgressRule::median: return "median";
    case ProgressRule::certified: return "certified";
  }
  return "unknown";
}

std::string verified_words(const BudgetOptions& budget) {
  const BudgetOptions usual;
  std::string text = "verified=" + number(budget.error);
  if (budget.delta != usual.delta) text += ",delta=" + number(budget.delta);
  if (budget.min_tokens != usual.min_tokens || budget.share != usual.share)
    text += ",heavy=" + larger_of(budget.min_tokens, budget.share, usual.min_tokens);
  if (budget.sample != usual.sample) text += ",sample=" + percent(budget.sample);
  return text;
}

std::string within_words(const BudgetOptions& budget) {
  const BudgetOptions usual;
  std::string text = "within=" + number(budget.alpha);
  if (budget.min_tokens != usual.min_tokens || budget.share != usual.share)
    text += ",most=" + larger_of(budget.min_tokens, budget.share, usual.min_tokens);
  return text;
}

std::string drawn_words(const BudgetOptions& budget) {
  const BudgetOptions usual;
  std::string text = "sample=" + larger_of(budget.min_tokens, budget.share, usual.min_tokens);
  if (budget.seed != usual.seed) text += ",seed=" + std::to_string(budget.seed);
  if (budget.redraw != usual.redraw) text += ",redraw=" + std::to_string(budget.redraw);
  if (budget.group_draws) text += ",draws=group";
  if (budget.draw_error > 0.f) text += ",error=" + percent(budget.draw_error);
  if (budget.draw_error > 0.f && budget.draw_most != 0) text += ",most=" + std::to_string(budget.draw_most);
  return text;
}

std::string budget_words(const BudgetOptions& budget) {
  const BudgetOptions usual;
  switch (budget.kind) {
    case BudgetKind::top_k: return "top_k=" + larger_of(budget.min_tokens, budget.share, usual.min_tokens);
    case BudgetKind::top_p: return "top_p=" + number(budget.mass);
    case BudgetKind::fitted: return "fitted=" + number(budget.mass);
    case BudgetKind::sampled: return "sampled";
    case BudgetKind::verified: return verified_words(budget);
    case BudgetKind::within: return within_words(budget);
    case BudgetKind::drawn: return drawn_words(budget);
    case BudgetKind::progressive: break;
  }
  std::string text = "progressive=" + number(budget.mass);
  if (budget.microbatch != usual.microbatch) text += ",microbatch=" + std::to_string(budget.microbatch);
  if (budget.rule != usual.rule) text += std::string(",rule=") + to_word(budget.rule);
  return text;
}

/// Of a budget that is one.
std::string far_words(const FarOptions& far) {
  return far.min_tokens == 0 ? percent(far.share) : larger_of(far.min_tokens, far.share, 0);
}

/// What the bypass leaves to the newest tokens is the history's to say, if there is one.
std::string bypass_words(const PolicySpec& spec) {
  const std::uint32_t local = spec.history.local_tokens;
  std::string text = "bypass=sink:" + number(spec.bypass_threshold) + (spec.bypass_checked ? ",check=on" : "");
  const auto guard = [&text](const char* key, float value, float usual) {
    if (value != usual) text += std::string(",") + key + "=" + (std::isinf(value) ? "off" : number(value));
  };
  guard("variance", spec.bypass_guards.variance, BypassGuards{}.variance);
  guard("growth", spec.bypass_guards.growth, BypassGuards{}.growth);
  if (spec.uses(Source::history) || local == HistoryOptions{}.local_tokens) return text;
  return text + ",local=" + std::to_string(local);
}

/// The share, and sinks and window where they differ from the defaults or are all there is.
std::string near_words(const NearOptions& near) {
  const NearOptions usual;
  const bool name_tokens =
      near.share == 0.f || near.sink_tokens != usual.sink_tokens || near.recent_tokens != usual.recent_tokens;
  std::string text = "near=" + percent(near.share);
  if (name_tokens) {
    text += ",sinks=" + std::to_string(near.sink_tokens) + ",recent=" + std::to_string(near.recent_tokens);
  }
  return text;
}

}  // namespace

std::string to_string(const PolicySpec& spec) {
  std::string text = source_words(spec);
  if (spec.estimate == Estimate::int4) text += " | int4";
  if (spec.estimate == Estimate::int3) text += " | int3";
  if (spec.estimate == Estimate::hadamard) text += " | hadamard";
  if (spec.estimate == Estimate::skewed) text += " | skewed=" + percent(spec.skewed_share);
  if (spec.rehearsed) text += " | rehearsed";
  if (chooses(spec)) text += " | " + budget_words(spec.budget);
  if (!spec.far.all()) text += " | far=" + far_words(spec.far);
  text += " | " + near_words(spec.near);
  if (spec.bypass_threshold > 0.f) text += " | " + bypass_words(spec);
  if (spec.dense_layers > 0 || spec.dense_every > 0) text += " | dense=" + std::to_string(spec.dense_layers);
  if (spec.dense_every > 0) text += ",every=" + std::to_string(spec.dense_every);
  if (spec.page_tokens > 0) text += " | page=" + std::to_string(spec.page_tokens);
  return text;
}

}  // namespace sluice
