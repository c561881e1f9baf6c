// NAME:key=value,key=value -> PolicySpec. One table of keys; each knows where it writes and what it needs.

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string>

#include "sluice/error.hpp"
#include "sluice/policy.hpp"

namespace sluice {
namespace {

/// One `value` and where it came from, so that every complaint can point at it.
struct Word {
  std::string_view text;  ///< the whole policy
  std::string_view key;
  std::string_view value;  ///< inside `text`

  [[noreturn]] void fail(const std::string& why) const {
    const auto at = static_cast<std::size_t>(value.data() - text.data()) + 1;
    throw Error(Errc::invalid_argument, "policy \"" + std::string(text) + "\": \"" + std::string(value) +
                                            "\" at character " + std::to_string(at) + " " + why);
  }
  [[nodiscard]] Word part(std::string_view piece) const { return {.text = text, .key = key, .value = piece}; }
};

template <class Number>
bool read_whole(std::string_view text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc{} && end == text.data() + text.size();
}

std::uint32_t read_count(const Word& word) {
  std::uint32_t count = 0;
  if (!read_whole(word.value, count)) word.fail("is not a whole number");
  return count;
}

float read_number(const Word& word) {
  float number = 0.f;
  if (!read_whole(word.value, number)) word.fail("is not a number");
  return number;
}

float read_share(const Word& word) {
  std::string_view text = word.value;
  const bool percent = !text.empty() && text.back() == '%';
  if (percent) text.remove_suffix(1);
  double share = 0.0;
  if (!read_whole(text, share)) word.fail("is not a share; write 2% or 0.02");
  return static_cast<float>(percent ? share / 100.0 : share);
}

bool read_switch(const Word& word) {
  if (word.value == "on" || word.value == "true" || word.value == "1") return true;
  if (word.value == "off" || word.value == "false" || word.value == "0") return false;
  word.fail("is neither on nor off");
}

/// `COUNT`, `SHARE` or `COUNT|SHARE`, meaning the larger of the two. A count alone is fixed; a share alone
/// keeps the preset's floor. A share is told by its % or its point.
void read_larger_of(const Word& word, std::uint32_t& count, float& share) {
  const std::size_t bar = word.value.find('|');
  const std::string_view first = word.value.substr(0, bar);
  if (bar != std::string_view::npos) {
    count = read_count(word.part(first));
    share = read_share(word.part(word.value.substr(bar + 1)));
  } else if (first.find_first_of("%.") != std::string_view::npos) {
    share = read_share(word);
  } else {
    count = read_count(word);
    share = 0.f;
  }
}

DigestKind read_digest(const Word& word) {
  if (word.value == "box") return DigestKind::box;
  if (word.value == "cuboid_mean") return DigestKind::cuboid_mean;
  word.fail("is no digest; there are box, cuboid_mean");
}

std::uint8_t read_sources(const Word& word) {
  struct Named {
    std::string_view name;
    Source source;
  };
  constexpr Named kNamed[] = {
      {"all", Source::all}, {"exact", Source::exact}, {"history", Source::history}, {"pages", Source::pages}};
  std::uint8_t sources = 0;
  for (std::size_t at = 0; at <= word.value.size() && word.value != "none";) {
    const std::size_t end = std::min(word.value.find('+', at), word.value.size());
    const std::string_view name = word.value.substr(at, end - at);
    const auto* known =
        std::find_if(std::begin(kNamed), std::end(kNamed), [&](const Named& n) { return n.name == name; });
    if (known == std::end(kNamed))
      word.part(name).fail("is no source; there are all, exact, history, pages, none, joined by +");
    sources = static_cast<std::uint8_t>(sources | static_cast<std::uint8_t>(known->source));
    at = end + 1;
  }
  return sources;
}

// Groups of options, by what must be in the sources for them to be read.
enum class Needs : std::uint8_t { nothing, history, pages, scores };

bool met(Needs needs, const PolicySpec& spec) {
  switch (needs) {
    case Needs::nothing: return true;
    case Needs::history: return spec.uses(Source::history);
    case Needs::pages: return spec.uses(Source::pages);
    case Needs::scores: return spec.sources != 0 && !spec.uses(Source::all);
  }
  return false;
}

const char* to_words(Needs needs) {
  return needs == Needs::history ? "history" : needs == Needs::pages ? "pages" : "exact, history or pages";
}

struct Key {
  std::string_view name;
  Needs needs;
  void (*apply)(PolicySpec&, const Word&);
};

constexpr Key kKeys[] = {
    {"sources", Needs::nothing, [](PolicySpec& s, const Word& w) { s.sources = read_sources(w); }},
    {"alpha", Needs::history, [](PolicySpec& s, const Word& w) { s.history.alpha = read_number(w); }},
    {"decay", Needs::history, [](PolicySpec& s, const Word& w) { s.history.decay = read_number(w); }},
    {"init", Needs::history, [](PolicySpec& s, const Word& w) { s.history.init_queries = read_count(w); }},
    {"local", Needs::history, [](PolicySpec& s, const Word& w) { s.history.local_tokens = read_count(w); }},
    {"share_group", Needs::history, [](PolicySpec& s, const Word& w) { s.history.share_in_group = read_switch(w); }},
    {"observe_near", Needs::history, [](PolicySpec& s, const Word& w) { s.history.observe_near = read_switch(w); }},
    {"observe_every", Needs::history,
     [](PolicySpec& s, const Word& w) { s.history.observe_every = read_count(w); }},
    {"limit", Needs::history, [](PolicySpec& s, const Word& w) { s.history.limit = read_share(w); }},
    {"digest", Needs::pages, [](PolicySpec& s, const Word& w) { s.pages.digest = read_digest(w); }},
    {"pages", Needs::pages, [](PolicySpec& s, const Word& w) { read_larger_of(w, s.pages.min_pages, s.pages.share); }},
    {"min_pages", Needs::pages, [](PolicySpec& s, const Word& w) { s.pages.min_pages = read_count(w); }},
    {"budget", Needs::scores,
     [](PolicySpec& s, const Word& w) { read_larger_of(w, s.budget.min_tokens, s.budget.share); }},
    {"min_tokens", Needs::scores, [](PolicySpec& s, const Word& w) { s.budget.min_tokens = read_count(w); }},
    {"bypass", Needs::scores, [](PolicySpec& s, const Word& w) { s.bypass_threshold = read_number(w); }},
    {"near", Needs::nothing, [](PolicySpec& s, const Word& w) { s.near.share = read_share(w); }},
    {"sinks", Needs::nothing, [](PolicySpec& s, const Word& w) { s.near.sink_tokens = read_count(w); }},
    {"recent", Needs::nothing, [](PolicySpec& s, const Word& w) { s.near.recent_tokens = read_count(w); }},
    {"dense", Needs::nothing, [](PolicySpec& s, const Word& w) { s.dense_layers = read_count(w); }},
};

PolicySpec preset_named(std::string_view text, std::string_view name) {
  std::string known;
  for (const PolicyPreset& preset : policy_presets()) {
    if (preset.spec.name == name) return preset.spec;
    known += (known.empty() ? "" : ", ") + preset.spec.name;
  }
  throw Error(Errc::invalid_argument,
              "policy \"" + std::string(text) + "\": there is no \"" + std::string(name) + "\"; there are " + known);
}

const Key& key_named(const Word& word) {
  const auto* key = std::find_if(std::begin(kKeys), std::end(kKeys), [&](const Key& k) { return k.name == word.key; });
  if (key != std::end(kKeys)) return *key;
  std::string known;
  for (const Key& k : kKeys) known += (known.empty() ? "" : ", ") + std::string(k.name);
  word.part(word.key).fail("is no key; there are " + known);
}

/// Calls `use` with every key=value of the options, in order.
template <class Use>
void for_each_option(std::string_view text, std::string_view options, Use&& use) {
  for (std::size_t at = 0; at <= options.size();) {
    const std::size_t end = std::min(options.find(',', at), options.size());
    const std::string_view option = options.substr(at, end - at);
    const std::size_t equals = option.find('=');
    Word word{.text = text, .key = option.substr(0, equals), .value = option};
    if (equals == std::string_view::npos) word.fail("is not key=value");
    word.value = option.substr(equals + 1);
    use(key_named(word), word);
    at = end + 1;
  }
}

}  // namespace

PolicySpec parse_policy(std::string_view text) {
  const std::size_t colon = text.find(':');
  PolicySpec spec = preset_named(text, text.substr(0, colon));
  if (colon == std::string_view::npos) return spec;

  const std::string_view options = text.substr(colon + 1);
  for_each_option(text, options, [&](const Key& key, const Word& word) {
    if (key.name == "sources") key.apply(spec, word);  // First: they decide which other keys mean anything.
  });
  for_each_option(text, options, [&](const Key& key, const Word& word) {
    if (!met(key.needs, spec)) {
      word.part(word.key).fail(std::string("means nothing here: it needs one of the sources ") + to_words(key.needs) +
                               ", and this policy is " + to_string(spec));
    }
    key.apply(spec, word);
  });
  try {
    validate(spec);
  } catch (const Error& error) {
    throw Error(error.code(), "policy \"" + std::string(text) + "\": " + error.what());
  }
  return spec;
}

}  // namespace sluice
