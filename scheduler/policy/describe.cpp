#include <cmath>
#include <cstdio>
#include <string>

#include "sluice/error.hpp"
#include "sluice/policy.hpp"

namespace sluice {
namespace {

constexpr std::uint8_t kAllSources = static_cast<std::uint8_t>(Source::all) | static_cast<std::uint8_t>(Source::exact) |
                                     static_cast<std::uint8_t>(Source::history) |
                                     static_cast<std::uint8_t>(Source::pages);

[[noreturn]] void reject(const char* field, const std::string& value, const char* range) {
  throw Error(Errc::invalid_argument, std::string("policy: ") + field + " is " + value + "; it must be in " + range);
}

/// Shortest form that a reader would write: 0.2, 10, 1e-06.
std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

std::string percent(double share) { return number(share * 100.0) + "%"; }

/// max(count, share of all); a share of 0 leaves the count, of 1 everything.
std::string larger_of(std::uint32_t count, float share) {
  if (share <= 0.f) return std::to_string(count);
  if (share >= 1.f) return "all";
  return "max(" + std::to_string(count) + ", " + percent(share) + ")";
}

void check_open(const char* field, double value, double most, const char* range) {
  // Written so that NaN fails.
  if (!(value > 0.0 && value <= most)) reject(field, number(value), range);
}

void check_share(const char* field, double value) {
  if (!(value >= 0.0 && value <= 1.0)) reject(field, number(value), "[0, 1]");
}

void check_count(const char* field, std::uint32_t value, std::uint32_t least, std::uint32_t most) {
  if (value >= least && value <= most) return;
  const std::string range = "[" + std::to_string(least) + ", " + std::to_string(most) + "]";
  reject(field, std::to_string(value), range.c_str());
}

void check_sources(const PolicySpec& spec) {
  if ((spec.sources & ~kAllSources) != 0) {
    throw Error(Errc::invalid_argument, "policy: sources has bits that name no source; see sluice::Source");
  }
  if (spec.uses(Source::all) && spec.sources != static_cast<std::uint8_t>(Source::all)) {
    throw Error(Errc::invalid_argument,
                "policy: source all already attends every token; drop it or the sources beside it");
  }
}

std::string history_words(const HistoryOptions& history) {
  const HistoryOptions defaults;
  std::string text = "history(alpha=" + number(history.alpha);
  if (history.decay != defaults.decay) text += ", decay=" + number(history.decay);
  if (history.init_queries != defaults.init_queries) text += ", init=" + std::to_string(history.init_queries);
  if (history.local_tokens != defaults.local_tokens) text += ", local=" + std::to_string(history.local_tokens);
  if (history.share_in_group) text += ", shared";
  if (!history.observe_near) text += ", far only";
  if (history.limit != 1.f) text += ", limit=" + percent(history.limit);
  if (history.observe_every != 1) text += ", every " + std::to_string(history.observe_every) + " steps";
  return text + ")";
}

std::string pages_words(const PageSourceOptions& pages) {
  const PageSourceOptions defaults;
  std::string text = pages.digest == DigestKind::box ? "pages(box" : "pages(cuboid_mean";
  if (pages.min_pages != defaults.min_pages || pages.share != defaults.share) {
    text += ", " + larger_of(pages.min_pages, pages.share);
  }
  return text + ")";
}

std::string source_words(const PolicySpec& spec) {
  std::string text;
  const auto add = [&text](const std::string& words) { text += (text.empty() ? "" : "+") + words; };
  if (spec.uses(Source::all)) add("all");
  if (spec.uses(Source::exact)) add("exact");
  if (spec.uses(Source::history)) add(history_words(spec.history));
  if (spec.uses(Source::pages)) add(pages_words(spec.pages));
  return text.empty() ? "none" : text;
}

/// What is always attended; sinks and window only where they differ from the defaults or are all there is.
std::string near_words(const NearOptions& near) {
  const NearOptions defaults;
  std::string text;
  const auto add = [&text](const std::string& words) { text += (text.empty() ? "" : "+") + words; };
  const bool name_tokens =
      near.share == 0.f || near.sink_tokens != defaults.sink_tokens || near.recent_tokens != defaults.recent_tokens;
  if (name_tokens && near.sink_tokens != 0) add(std::to_string(near.sink_tokens) + " sinks");
  if (name_tokens && near.recent_tokens != 0) add(std::to_string(near.recent_tokens) + " recent");
  if (near.share != 0.f) add(percent(near.share));
  return text.empty() ? "nothing" : text;
}

}  // namespace

void validate(const PolicySpec& spec) {
  check_sources(spec);
  check_open("history.alpha", spec.history.alpha, 10.0, "(0, 10]");
  if (!(spec.history.decay > 0.f && spec.history.decay < 1.f)) {
    reject("history.decay", number(spec.history.decay), "(0, 1)");
  }
  check_count("history.init_queries", spec.history.init_queries, 1, 256);
  check_count("history.local_tokens", spec.history.local_tokens, 0, 4096);
  check_count("history.observe_every", spec.history.observe_every, 1, 64);
  check_count("pages.min_pages", spec.pages.min_pages, 1, 65536);
  check_share("history.limit", spec.history.limit);
  check_share("pages.share", spec.pages.share);
  check_count("budget.min_tokens", spec.budget.min_tokens, 1, 0x7fff'ffffu);
  check_share("budget.share", spec.budget.share);
  check_count("near.sink_tokens", spec.near.sink_tokens, 0, 4096);
  check_count("near.recent_tokens", spec.near.recent_tokens, 0, 1'048'576);
  check_share("near.share", spec.near.share);
  check_share("bypass_threshold", spec.bypass_threshold);
}

std::string to_string(const PolicySpec& spec) {
  std::string text = source_words(spec);
  if (spec.sources != 0 && !spec.uses(Source::all)) {
    text += " | top_k=" + larger_of(spec.budget.min_tokens, spec.budget.share);
  }
  text += " | near=" + near_words(spec.near);
  if (spec.bypass_threshold > 0.f) text += " | bypass=" + number(spec.bypass_threshold);
  if (spec.dense_layers > 0) text += " | dense=" + std::to_string(spec.dense_layers);
  return text;
}

}  // namespace sluice
