#include "scheduler/policy/budget.hpp"

#include <algorithm>

namespace sluice::scheduler {
namespace {

/// Bits [first, first + count) of a string of words; count is at most 32.
std::uint32_t bits_at(std::span<const std::uint32_t> words, std::uint32_t first, std::uint32_t count) noexcept {
  const std::uint32_t shift = first % 32;
  std::uint32_t bits = words[first / 32] >> shift;
  if (shift + count > 32) bits |= words[first / 32 + 1] << (32 - shift);
  return count == 32 ? bits : bits & ((1u << count) - 1);
}

/// Adds `count` tokens from `token` on, as far as their bits from `first` on are set.
void add_marked(std::span<const std::uint32_t> words, std::uint32_t first, std::uint32_t count, std::uint32_t token,
                TokenSet& set) {
  for (std::uint32_t done = 0; done < count; done += 32) {
    const std::uint32_t bits = bits_at(words, first + done, std::min(count - done, 32u));
    if (bits != 0) set.add_bits(token + done, bits);
  }
}

}  // namespace

void Budget::cut(const HeadContext& context, std::uint32_t group, ScoredSet& scored, SelectCounters& counters) const {
  if (estimates()) {
    scored.estimate(*context.kv, context.q, group);
    counters.estimated += scored.size();
  } else {
    scored.score(*context.kv, context.q, group);
    counters.scored += scored.size();
  }
  if (weighs()) {
    scored.choose_mass(spec_.budget.mass, attended_anyway(context), group);
  } else {
    scored.choose(tokens(context.tokens), group);
  }
}

AttendedAnyway Budget::attended_anyway(const HeadContext& context) const noexcept {
  const NearSet& near = *context.near;
  const std::uint32_t newest = newest_page(context.tokens, page_tokens_);
  // Where whole pages are attended near, the newest always is.
  const bool near_newest = near.holds(newest / page_tokens_);
  return {.sink_end = near.sink_end,
          .recent_begin = near_newest ? std::min(near.recent_begin, newest) : near.recent_begin,
          .open = estimates() ? newest : context.tokens};
}

std::uint64_t Budget::unite_kept(const HeadContext& context, std::uint32_t group, std::uint32_t active,
                                 TokenSet& set) const {
  const std::uint32_t newest = newest_page(context.tokens, page_tokens_);
  const std::size_t ranked = context.ranked_pages.size() / group;
  const std::size_t words = context.kept.size() / group;
  set.add_range(newest, context.tokens);
  std::uint64_t candidates = 0;
  for (std::uint32_t h = 0; h < group; ++h) {
    if (((active >> h) & 1) == 0) continue;
    const std::span<const std::uint32_t> kept = context.kept.subspan(h * words, words);
    candidates += context.tokens - newest;
    if (spec_.uses(Source::exact)) {
      add_marked(kept, 0, newest, 0, set);
      candidates += newest;
      continue;
    }
    const std::span<const std::uint32_t> pages = context.ranked_pages.subspan(h * ranked, ranked);
    for (std::uint32_t i = 0; i < pages.size(); ++i) {
      add_marked(kept, i * page_tokens_, page_tokens_, pages[i] * page_tokens_, set);
    }
    candidates += std::uint64_t{ranked} * page_tokens_;
  }
  return candidates;
}

}  // namespace sluice::scheduler
