// The grammar of policies, as policy.hpp gives it: a head of sources, then stages.

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "scheduler/policy/text.hpp"
#include "sluice/error.hpp"
#include "sluice/policy.hpp"

namespace sluice {
namespace {

using namespace scheduler;

struct NamedSource {
  std::string_view name;
  std::uint16_t bit;
  Room room;  ///< of its options; `flat`: it has none
};

constexpr std::uint16_t bit(Source source) { return static_cast<std::uint16_t>(source); }

constexpr NamedSource kSources[] = {{"all", bit(Source::all), Room::flat},
                                    {"exact", bit(Source::exact), Room::flat},
                                    {"history", bit(Source::history), Room::history},
                                    {"pages", bit(Source::pages), Room::pages},
                                    {"clusters", bit(Source::clusters), Room::clusters},
                                    {"lsh", bit(Source::lsh), Room::lsh},
                                    {"snapshot", bit(Source::snapshot), Room::snapshot},
                                    {"labels", bit(Source::labels), Room::labels},
                                    {"scores", bit(Source::scores), Room::flat},
                                    {"none", 0, Room::flat}};

std::string known_presets() {
  std::string known;
  for (const PolicyPreset& preset : policy_presets()) known += (known.empty() ? "" : ", ") + preset.spec.name;
  return known;
}

std::string known_sources() {
  std::string known;
  for (const NamedSource& source : kSources) known += (known.empty() ? "" : ", ") + std::string(source.name);
  return known;
}

const NamedSource* find_source(std::string_view name) noexcept {
  const auto* at =
      std::find_if(std::begin(kSources), std::end(kSources), [&](const NamedSource& s) { return s.name == name; });
  return at == std::end(kSources) ? nullptr : at;
}

const PolicyPreset* find_preset(std::string_view name) {
  const auto& presets = policy_presets();
  const auto at =
      std::find_if(presets.begin(), presets.end(), [&](const PolicyPreset& p) { return p.spec.name == name; });
  return at == presets.end() ? nullptr : &*at;
}

void add_source(const Word& word, PolicySpec& spec) {
  const Halves halves = halve(word, ':');
  const NamedSource* source = find_source(halves.first.value);
  if (source == nullptr) halves.first.fail("is no source; there are " + known_sources() + ", joined by +");
  if (source->bit != 0 && (spec.sources & source->bit) != 0) halves.first.fail("is named twice");
  spec.sources = static_cast<std::uint16_t>(spec.sources | source->bit);
  if (!halves.both) return;
  if (source->room == Room::flat) halves.second.fail("is not wanted here: this source has no options");
  Word options = halves.second;
  if (source->room == Room::pages) {
    // The digest may stand alone in front, as in pages:quest,budget=8192.
    const Halves first = halve(options, ',');
    if (first.first.value.find('=') == std::string_view::npos) {
      read_digest(first.first, spec.pages);
      if (!first.both) return;
      options = first.second;
    }
  }
  apply_options(options, source->room, spec);
}

/// What comes before the first bar: a preset, or sources.
PolicySpec read_head(const Word& head) {
  const Halves halves = halve(head, ':');
  if (const PolicyPreset* preset = find_preset(halves.first.value)) {
    PolicySpec spec = preset->spec;
    if (halves.both) apply_flat_options(halves.second, spec);
    return spec;
  }
  const std::vector<Word> words = split(head, '+');
  if (find_source(halve(words.front(), ':').first.value) == nullptr) {
    halve(words.front(), ':').first.fail("is neither a policy (" + known_presets() + ") nor a source (" +
                                         known_sources() + ")");
  }
  PolicySpec spec;
  for (const Word& word : words) add_source(word, spec);
  return spec;
}

void require_choosing(const Word& word, const PolicySpec& spec) {
  if (!chooses(spec))
    word.fail("means nothing here: this policy does not choose among tokens; name a source, such as pages");
}

void set_mass(const Word& value, BudgetKind kind, PolicySpec& spec) {
  spec.budget.kind = kind;
  spec.budget.mass = read_share(value);
}

void read_bypass(const Word& value, PolicySpec& spec) {
  const Halves halves = halve(value, ':');
  if (value.value == "off") {
    spec.bypass_threshold = 0.f;
  } else if (!halves.both) {
    spec.bypass_threshold = read_share(value);
  } else if (halves.first.value == "sink") {
    spec.bypass_threshold = read_share(halves.second);
  } else {
    halves.first.fail("is no bypass; there are off and sink, as in bypass=sink:0.85");
  }
}

struct Stage {
  std::string_view name;
  bool has_value;
  Room options;  ///< that may follow the value; `flat`: none
  void (*apply)(const Word& value, PolicySpec& spec);
};

constexpr Stage kStages[] = {
    {"int4", false, Room::flat, [](const Word&, PolicySpec& s) { s.estimate = Estimate::int4; }},
    {"int3", false, Room::flat, [](const Word&, PolicySpec& s) { s.estimate = Estimate::int3; }},
    {"hadamard", false, Room::flat, [](const Word&, PolicySpec& s) { s.estimate = Estimate::hadamard; }},
    {"skewed", true, Room::flat,
     [](const Word& w, PolicySpec& s) {
       s.estimate = Estimate::skewed;
       s.skewed_share = read_share(w);
     }},
    {"rehearsed", false, Room::flat, [](const Word&, PolicySpec& s) { s.rehearsed = true; }},
    {"top_k", true, Room::flat,
     [](const Word& w, PolicySpec& s) {
       require_choosing(w, s);
       s.budget.kind = BudgetKind::top_k;
       read_larger_of(w, s.budget.min_tokens, s.budget.share);
     }},
    {"top_p", true, Room::flat, [](const Word& w, PolicySpec& s) { set_mass(w, BudgetKind::top_p, s); }},
    {"fitted", true, Room::flat, [](const Word& w, PolicySpec& s) { set_mass(w, BudgetKind::fitted, s); }},
    {"progressive", true, Room::progressive,
     [](const Word& w, PolicySpec& s) { set_mass(w, BudgetKind::progressive, s); }},
    {"sampled", false, Room::flat, [](const Word&, PolicySpec& s) { s.budget.kind = BudgetKind::sampled; }},
    {"verified", true, Room::verified,
     [](const Word& w, PolicySpec& s) {
       s.budget.kind = BudgetKind::verified;
       s.budget.error = read_share(w);
     }},
    {"within", true, Room::within,
     [](const Word& w, PolicySpec& s) {
       s.budget.kind = BudgetKind::within;
       s.budget.alpha = read_number(w);
     }},
    {"sample", true, Room::drawn,
     [](const Word& w, PolicySpec& s) {
       require_choosing(w, s);
       s.budget.kind = BudgetKind::drawn;
       read_larger_of(w, s.budget.min_tokens, s.budget.share);
     }},
    {"far", true, Room::flat,
     [](const Word& w, PolicySpec& s) {
       require_choosing(w, s);
       read_larger_of(w, s.far.min_tokens, s.far.share);
     }},
    {"bypass", true, Room::bypass, read_bypass},
    {"near", true, Room::near, [](const Word& w, PolicySpec& s) { s.near.share = read_share(w); }},
    {"dense", true, Room::dense, [](const Word& w, PolicySpec& s) { s.dense_layers = read_count(w); }},
    {"page", true, Room::flat, [](const Word& w, PolicySpec& s) { s.page_tokens = read_count(w); }},
};

void apply_stage(const Word& word, PolicySpec& spec) {
  const Halves first = halve(word, ',');
  const Halves halves = halve(first.first, '=');
  const auto* stage = std::find_if(std::begin(kStages), std::end(kStages),
                                   [&](const Stage& s) { return s.name == halves.first.value; });
  if (stage == std::end(kStages)) {
    std::string known;
    for (const Stage& s : kStages) known += (known.empty() ? "" : ", ") + std::string(s.name);
    halves.first.fail("is no stage; there are " + known);
  }
  if (stage->has_value && !halves.both) halves.first.fail("needs a value: " + std::string(stage->name) + "=...");
  if (!stage->has_value && halves.both) halves.second.fail("is not wanted here: the stage has no value");
  if (first.both && stage->options == Room::flat) first.second.fail("is not wanted here: the stage has no options");
  stage->apply(halves.second, spec);
  if (first.both) apply_options(first.second, stage->options, spec);
}

/// What a stage sets: stages that take each other's place set the same.
std::string_view setting_of(std::string_view stage) noexcept {
  constexpr std::string_view kEstimates[] = {"int4", "int3", "hadamard", "skewed"};
  constexpr std::string_view kBudgets[] = {"top_k",   "top_p",    "sample", "fitted", "progressive",
                                           "sampled", "verified", "within"};
  if (std::ranges::find(kEstimates, stage) != std::end(kEstimates)) return "an estimate";
  if (std::ranges::find(kBudgets, stage) != std::end(kBudgets)) return "a budget";
  return stage;
}

/// Applies stages; a text that sets something twice does not say which of both it means.
void apply_stages(const Word& head, std::span<const Word> stages, PolicySpec& spec) {
  std::vector<std::string_view> set;
  if (find_preset(halve(head, ':').first.value) != nullptr) {  // Whose options have names of stages.
    for (const Word& option : split(halve(head, ':').second, ',')) set.push_back(halve(option, '=').first.value);
  }
  for (const Word& stage : stages) {
    apply_stage(stage, spec);
    const Word name = halve(halve(stage, ',').first, '=').first;
    const std::string_view setting = setting_of(name.value);
    if (std::ranges::find(set, setting) != set.end())
      name.fail("sets what this policy has set before it; leave one of both out");
    set.push_back(setting);
  }
}

/// Of the budget, only what its kind reads. A stage may have taken the place of another, or of a preset's, and what
/// that one read would make policies differ that do the same.
BudgetOptions what_is_read(const BudgetOptions& budget) {
  BudgetOptions read;
  read.kind = budget.kind;
  switch (budget.kind) {
    case BudgetKind::top_k:
      read.min_tokens = budget.min_tokens;
      read.share = budget.share;
      break;
    case BudgetKind::progressive:
      read.microbatch = budget.microbatch;
      read.rule = budget.rule;
      [[fallthrough]];
    case BudgetKind::top_p:
    case BudgetKind::fitted: read.mass = budget.mass; break;
    case BudgetKind::sampled: break;
    case BudgetKind::verified:
      read.min_tokens = budget.min_tokens;
      read.share = budget.share;
      read.error = budget.error;
      read.delta = budget.delta;
      read.sample = budget.sample;
      break;
    case BudgetKind::within:
      read.min_tokens = budget.min_tokens;
      read.share = budget.share;
      read.alpha = budget.alpha;
      break;
    case BudgetKind::drawn:
      read.min_tokens = budget.min_tokens;
      read.share = budget.share;
      read.seed = budget.seed;
      read.redraw = budget.redraw;
      read.group_draws = budget.group_draws;
      read.draw_error = budget.draw_error;
      if (budget.draw_error > 0.f) read.draw_most = budget.draw_most;
      break;
  }
  return read;
}

}  // namespace

PolicySpec parse_policy(std::string_view text) {
  const Word whole{.text = text, .value = text};
  const std::vector<Word> parts = split(whole, '|');
  PolicySpec spec = read_head(parts.front());
  apply_stages(parts.front(), std::span(parts).subspan(1), spec);
  if (spec.name.empty() || parts.size() > 1) spec.name = whole.part(text).value;
  try {
    validate(spec);
  } catch (const Error& error) {
    throw Error(error.code(), "policy \"" + std::string(text) + "\": " + error.what());
  }
  return what_is_read(spec);
}

PolicySpec scheduler::what_is_read(const PolicySpec& spec) {
  PolicySpec read = spec;
  if (!spec.uses(Source::history)) {
    read.history = {};
    if (spec.bypass_threshold > 0.f) read.history.local_tokens = spec.history.local_tokens;
  }
  if (!spec.uses(Source::pages)) read.pages = {};
  if (!spec.uses(Source::clusters)) read.clusters = {};
  if (!spec.uses(Source::lsh)) read.lsh = {};
  if (!spec.uses(Source::snapshot)) read.snapshot = {};
  if (!spec.uses(Source::labels)) read.labels = {};
  if (spec.bypass_threshold == 0.f) {
    read.bypass_checked = false;
    read.bypass_guards = {};
  }
  if (spec.estimate != Estimate::skewed) read.skewed_share = PolicySpec{}.skewed_share;
  read.budget = chooses(spec) ? sluice::what_is_read(spec.budget) : BudgetOptions{};
  if (!chooses(spec) || spec.far.all()) read.far = {};
  return read;
}

}  // namespace sluice
