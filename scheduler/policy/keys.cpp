// The keys of policy options: one table, each key with the room that it belongs to.

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

#include "scheduler/policy/text.hpp"
#include "sluice/page_rules.hpp"

namespace sluice::scheduler {
namespace {

ProgressRule read_rule(const Word& word) {
  if (word.value == "least") return ProgressRule::least;
  if (word.value == "mean") return ProgressRule::mean;
  if (word.value == "median") return ProgressRule::median;
  if (word.value == "certified") return ProgressRule::certified;
  word.fail("is no rule; there are least, mean, median, certified");
}

Pooling read_pooling(const Word& word) {
  if (word.value == "max") return Pooling::max;
  if (word.value == "mean") return Pooling::mean;
  word.fail("is no pooling; there are max, mean");
}

HistoryTables read_tables(const Word& word) {
  if (word.value == "both") return HistoryTables::both;
  if (word.value == "vertical") return HistoryTables::vertical;
  if (word.value == "slash") return HistoryTables::slash;
  word.fail("are no tables of the history; there are both, vertical, slash");
}

bool read_draws(const Word& word) {
  if (word.value == "head") return false;
  if (word.value == "group") return true;
  word.fail("names no draws; there are head and group");
}

float read_draw_error(const Word& word) {
  if (word.value == "off") return 0.f;
  const float error = read_share(word);
  if (!(error > 0.f && error < 1.f)) word.fail("is no error that a head may have; write off, or a share such as 2%");
  return error;
}

/// `off`: any.
float read_guard(const Word& word) {
  return word.value == "off" ? std::numeric_limits<float>::infinity() : read_number(word);
}

PageRank read_rank(const Word& word) {
  if (word.value == "head") return PageRank::head;
  if (word.value == "layer") return PageRank::layer;
  word.fail("ranks no pages; there are head and layer");
}

/// Pages by a budget of tokens, as Quest and ArkVale count.
void read_page_tokens(const Word& word, PageSourceOptions& pages) {
  pages.min_tokens = read_count(word);
  if (pages.min_tokens == 0) word.fail("leaves nothing; the budget of ranked pages must be at least one token");
  pages.min_pages = 1;
  pages.share = 0.f;
}

void read_pages(const Word& word, PageSourceOptions& pages) {
  pages.min_tokens = 0;
  read_larger_of(word, pages.min_pages, pages.share);
}

[[nodiscard]] bool ranks_only(const PolicySpec& spec) noexcept {
  return spec.sources == static_cast<std::uint16_t>(Source::pages) && spec.budget.kind == BudgetKind::top_k &&
         spec.budget.share >= 1.f;
}

[[nodiscard]] bool evicts_only(const PolicySpec& spec) noexcept {
  return spec.sources == static_cast<std::uint16_t>(Source::snapshot) && spec.budget.kind == BudgetKind::top_k &&
         spec.budget.share >= 1.f;
}

[[nodiscard]] bool labels_only(const PolicySpec& spec) noexcept {
  return spec.sources == static_cast<std::uint16_t>(Source::labels) && spec.budget.kind == BudgetKind::top_k &&
         spec.budget.share >= 1.f;
}

/// Behind a preset's name, `budget` is what that method calls its budget.
void read_flat_budget(PolicySpec& spec, const Word& word) {
  if (ranks_only(spec)) return read_page_tokens(word, spec.pages);
  if (labels_only(spec)) return read_larger_of(word, spec.labels.min_tokens, spec.labels.share);
  if (evicts_only(spec)) {
    spec.snapshot.budget = read_count(word);
    return;
  }
  if (spec.budget.kind == BudgetKind::within)
    word.fail("means nothing here: how much is attended depends on how near scores are to the best; write most=COUNT");
  if (spec.budget.kind == BudgetKind::verified)
    word.fail("means nothing here: how much is attended depends on the error that is allowed; write heavy=COUNT");
  if (spec.budget.kind != BudgetKind::top_k && spec.budget.kind != BudgetKind::drawn) {
    word.fail("means nothing here: this policy keeps a share of the softmax mass; write mass=SHARE");
  }
  read_larger_of(word, spec.budget.min_tokens, spec.budget.share);
}

void read_mass(PolicySpec& spec, const Word& word) {
  const BudgetKind kind = spec.budget.kind;
  if (kind == BudgetKind::top_k || kind == BudgetKind::sampled || kind == BudgetKind::verified ||
      kind == BudgetKind::within || kind == BudgetKind::drawn) {
    word.fail("means nothing here: the policy's budget is no share of the softmax mass");
  }
  spec.budget.mass = read_share(word);
}

using S = PolicySpec;
using W = Word;

constexpr Key kKeys[] = {
    {"alpha", Room::history, [](S& s, const W& w) { s.history.alpha = read_number(w); }},
    {"decay", Room::history, [](S& s, const W& w) { s.history.decay = read_number(w); }},
    {"init", Room::history, [](S& s, const W& w) { s.history.init_queries = read_count(w); }},
    {"local", Room::history, [](S& s, const W& w) { s.history.local_tokens = read_count(w); }},
    {"share_group", Room::history, [](S& s, const W& w) { s.history.share_in_group = read_switch(w); }},
    {"observe_near", Room::history, [](S& s, const W& w) { s.history.observe_near = read_switch(w); }},
    {"observe_every", Room::history, [](S& s, const W& w) { s.history.observe_every = read_count(w); }},
    {"limit", Room::history, [](S& s, const W& w) { s.history.limit = read_share(w); }},
    {"tables", Room::history, [](S& s, const W& w) { s.history.tables = read_tables(w); }},
    {"expand", Room::history, [](S& s, const W& w) { s.history.expand = read_switch(w); }},

    {"digest", Room::pages, [](S& s, const W& w) { read_digest(w, s.pages); }},
    {"rank", Room::pages, [](S& s, const W& w) { s.pages.rank = read_rank(w); }},
    {"pages", Room::pages, [](S& s, const W& w) { read_pages(w, s.pages); }},
    {"min_pages", Room::pages, [](S& s, const W& w) { s.pages.min_pages = read_count(w); }},
    {"budget", Room::pages, [](S& s, const W& w) { read_page_tokens(w, s.pages); }},
    {"share", Room::pages, [](S& s, const W& w) { s.pages.share = read_share(w); }},

    {"size", Room::clusters, [](S& s, const W& w) { s.clusters.tokens_per_cluster = read_count(w); }},
    {"iterations", Room::clusters, [](S& s, const W& w) { s.clusters.iterations = read_count(w); }},
    {"recluster", Room::clusters, [](S& s, const W& w) { s.clusters.recluster_every = read_count(w); }},
    {"least", Room::clusters, [](S& s, const W& w) { s.clusters.min_tokens = read_count(w); }},
    {"candidates", Room::clusters, [](S& s, const W& w) { s.clusters.candidates = read_count(w); }},
    {"head", Room::clusters, [](S& s, const W& w) { s.clusters.head_share = read_share(w); }},
    {"near_window", Room::clusters, [](S& s, const W& w) { s.clusters.near_window = read_share(w); }},
    {"far_window", Room::clusters, [](S& s, const W& w) { s.clusters.far_window = read_share(w); }},
    {"window", Room::clusters, [](S& s, const W& w) { s.clusters.window_share = read_share(w); }},

    {"bits", Room::lsh, [](S& s, const W& w) { s.lsh.bits = read_count(w); }},
    {"tables", Room::lsh, [](S& s, const W& w) { s.lsh.tables = read_count(w); }},
    {"collisions", Room::lsh, [](S& s, const W& w) { s.lsh.min_collisions = read_count(w); }},
    {"recent_prompt", Room::lsh, [](S& s, const W& w) { s.lsh.recent_prompt = read_count(w); }},
    {"seed", Room::lsh, [](S& s, const W& w) { s.lsh.seed = read_seed(w); }},

    {"budget", Room::snapshot, [](S& s, const W& w) { s.snapshot.budget = read_count(w); }},
    {"window", Room::snapshot, [](S& s, const W& w) { s.snapshot.window = read_count(w); }},
    {"kernel", Room::snapshot, [](S& s, const W& w) { s.snapshot.kernel = read_count(w); }},
    {"pooling", Room::snapshot, [](S& s, const W& w) { s.snapshot.pooling = read_pooling(w); }},
    {"pyramid", Room::snapshot, [](S& s, const W& w) { s.snapshot.pyramid = read_count(w); }},
    {"floor", Room::snapshot, [](S& s, const W& w) { s.snapshot.floor = read_share(w); }},

    {"channels", Room::labels, [](S& s, const W& w) { s.labels.channels = read_count(w); }},
    {"budget", Room::labels, [](S& s, const W& w) { read_larger_of(w, s.labels.min_tokens, s.labels.share); }},

    {"ratio", Room::skewed, [](S& s, const W& w) { s.skewed_share = read_share(w); }},
    {"alpha", Room::within, [](S& s, const W& w) { s.budget.alpha = read_number(w); }},

    {"budget", Room::flat, read_flat_budget},
    {"mass", Room::flat, read_mass},
    {"bypass", Room::flat, [](S& s, const W& w) { s.bypass_threshold = read_number(w); }},
    {"far", Room::flat, [](S& s, const W& w) { read_larger_of(w, s.far.min_tokens, s.far.share); }},
    {"near", Room::flat, [](S& s, const W& w) { s.near.share = read_share(w); }},
    {"dense", Room::flat, [](S& s, const W& w) { s.dense_layers = read_count(w); }},

    {"min_tokens", Room::top_k, [](S& s, const W& w) { s.budget.min_tokens = read_count(w); }},
    {"microbatch", Room::progressive, [](S& s, const W& w) { s.budget.microbatch = read_count(w); }},
    {"rule", Room::progressive, [](S& s, const W& w) { s.budget.rule = read_rule(w); }},
    {"delta", Room::verified, [](S& s, const W& w) { s.budget.delta = read_share(w); }},
    {"heavy", Room::verified, [](S& s, const W& w) { read_larger_of(w, s.budget.min_tokens, s.budget.share); }},
    {"sample", Room::verified, [](S& s, const W& w) { s.budget.sample = read_share(w); }},
    {"seed", Room::drawn, [](S& s, const W& w) { s.budget.seed = read_count(w); }},
    {"redraw", Room::drawn, [](S& s, const W& w) { s.budget.redraw = read_count(w); }},
    {"draws", Room::drawn, [](S& s, const W& w) { s.budget.group_draws = read_draws(w); }},
    {"error", Room::drawn, [](S& s, const W& w) { s.budget.draw_error = read_draw_error(w); }},
    {"most", Room::drawn, [](S& s, const W& w) { s.budget.draw_most = read_count(w); }},
    {"most", Room::within, [](S& s, const W& w) { read_larger_of(w, s.budget.min_tokens, s.budget.share); }},
    {"check", Room::bypass, [](S& s, const W& w) { s.bypass_checked = read_switch(w); }},
    {"local", Room::bypass, [](S& s, const W& w) { s.history.local_tokens = read_count(w); }},
    {"variance", Room::bypass, [](S& s, const W& w) { s.bypass_guards.variance = read_guard(w); }},
    {"growth", Room::bypass, [](S& s, const W& w) { s.bypass_guards.growth = read_guard(w); }},
    {"sinks", Room::near, [](S& s, const W& w) { s.near.sink_tokens = read_count(w); }},
    {"recent", Room::near, [](S& s, const W& w) { s.near.recent_tokens = read_count(w); }},
    {"every", Room::dense, [](S& s, const W& w) { s.dense_every = read_count(w); }},
};

const char* to_words(Room room) noexcept {
  switch (room) {
    case Room::history: return "history";
    case Room::pages: return "pages";
    case Room::clusters: return "clusters";
    case Room::lsh: return "lsh";
    case Room::snapshot: return "snapshot";
    case Room::labels: return "labels";
    case Room::top_k: return "top_k";
    case Room::progressive: return "progressive";
    case Room::verified: return "verified";
    case Room::within: return "within";
    case Room::drawn: return "sample";
    case Room::skewed: return "skewed";
    case Room::bypass: return "bypass";
    case Room::near: return "near";
    case Room::dense: return "dense";
    case Room::flat: return "policy";
  }
  return "unknown";
}

/// Whether the policy reads options of this room.
bool reads(const PolicySpec& spec, const Key& key) noexcept {
  const bool scored = chooses(spec);
  switch (key.room) {
    case Room::history: return spec.uses(Source::history);
    case Room::pages: return spec.uses(Source::pages);
    case Room::clusters: return spec.uses(Source::clusters);
    case Room::lsh: return spec.uses(Source::lsh);
    case Room::snapshot: return spec.uses(Source::snapshot);
    case Room::labels: return spec.uses(Source::labels);
    case Room::top_k: return scored && spec.budget.kind == BudgetKind::top_k;
    case Room::progressive: return scored && spec.budget.kind == BudgetKind::progressive;
    case Room::verified: return scored && spec.budget.kind == BudgetKind::verified;
    case Room::within: return scored && spec.budget.kind == BudgetKind::within;
    case Room::drawn: return scored && spec.budget.kind == BudgetKind::drawn;
    case Room::skewed: return spec.estimate == Estimate::skewed;
    case Room::bypass: return spec.bypass_threshold > 0.f;
    case Room::near:
    case Room::dense: return true;
    case Room::flat: return scored || key.name == "near" || key.name == "dense";
  }
  return false;
}

/// The key of one room, or of any if `room` is flat; those that stand only in the flat list come first there.
const Key* find(std::string_view name, Room room) noexcept {
  const Key* found = nullptr;
  for (const Key& key : kKeys) {
    if (key.name != name) continue;
    if (key.room == room) return &key;
    if (room == Room::flat && found == nullptr) found = &key;
  }
  return found;
}

/// Of the keys of that name, the one that the policy reads.
const Key& that_is_read(const PolicySpec& spec, const Key& key) noexcept {
  const auto* const found = std::find_if(std::begin(kKeys), std::end(kKeys), [&](const Key& other) {
    return other.name == key.name && reads(spec, other);
  });
  return reads(spec, key) || found == std::end(kKeys) ? key : *found;
}

std::string names(Room room) {
  std::string known;
  for (const Key& key : kKeys) {
    const bool twice = room == Room::flat && find(key.name, room) != &key;
    if ((room != Room::flat && key.room != room) || twice) continue;
    known += (known.empty() ? "" : ", ") + std::string(key.name);
  }
  return known;
}

/// Calls `use` with every key=value of the options, in order.
template <class Use>
void for_each_option(const Word& options, Room room, Use&& use) {
  std::vector<std::string_view> set;
  for (const Word& option : split(options, ',')) {
    const Halves halves = halve(option, '=');
    if (!halves.both)
      option.fail("is not key=value; the keys of " + std::string(to_words(room)) + " are " + names(room));
    const Key* key = find(halves.first.value, room);
    if (key == nullptr) halves.first.fail("is no key of " + std::string(to_words(room)) + "; there are " + names(room));
    if (std::ranges::find(set, key->name) != set.end()) halves.first.fail("is set twice; leave one of both out");
    set.push_back(key->name);
    use(*key, halves.first, halves.second);
  }
}

}  // namespace

void read_digest(const Word& word, PageSourceOptions& pages) {
  if (word.value == "box" || word.value == "quest") {
    pages.digest = DigestKind::box;
  } else if (word.value == "cuboid_mean" || word.value == "arkvale") {
    pages.digest = DigestKind::cuboid_mean;
  } else {
    word.fail("is no digest; there are box (also called quest) and cuboid_mean (arkvale)");
  }
}

void apply_options(const Word& options, Room room, PolicySpec& spec) {
  for_each_option(options, room, [&](const Key& key, const Word&, const Word& value) { key.apply(spec, value); });
}

void apply_flat_options(const Word& options, PolicySpec& spec) {
  for_each_option(options, Room::flat, [&](const Key& first, const Word& name, const Word& value) {
    const Key& key = that_is_read(spec, first);
    if (!reads(spec, key)) {
      const bool any = key.room == Room::flat;
      name.fail(std::string("means nothing here: it is an option of ") +
                (any ? "policies that select" : to_words(key.room)) + ", and this policy is " + to_string(spec));
    }
    key.apply(spec, value);
  });
}

}  // namespace sluice::scheduler
