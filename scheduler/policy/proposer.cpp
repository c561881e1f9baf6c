#include "scheduler/policy/proposer.hpp"

#include <algorithm>

#include "scheduler/policy/budget.hpp"

namespace sluice::scheduler {

void Proposer::propose_all(std::uint32_t tokens, std::span<TokenSet> candidates) const {
  for (TokenSet& set : candidates) {
    set.reset(tokens);
    set.add_range(first_, tokens);
  }
}

void Proposer::propose(const HeadContext& context, SparseHead& head, std::span<TokenSet> candidates,
                       SelectCounters& counters) const {
  if (head.clusters) {
    head.clusters->rank(context.q, *context.kv);
    counters.index_bytes += head.clusters->ranking_bytes();
  }
  if (head.lsh) {
    head.lsh->hash(context.q, *context.kv);
    counters.index_bytes += group_ * head.lsh->lookup_bytes();
  }
  if (head.snapshot) head.snapshot->settle();
  if (together(head)) {
    TokenSet& set = candidates.front();
    set.reset(context.tokens);
    if (head.followed) {
      head.history->unite_followed(set);
    } else {
      set.unite(head.history->united());
    }
    add_local(context, set);
    add_pages(context, 0, group_, set);
    for (std::uint32_t h = 0; h < group_; ++h) add_like_keys(context, h, head, set);
    add_best_labelled(context, head, candidates.first(1), counters);
    return;
  }
  for (std::uint32_t h = 0; h < group_; ++h) {
    if (((head.observing >> h) & 1) == 0) continue;
    TokenSet& set = candidates[h];
    set.reset(context.tokens);
    if (head.history) {
      set.unite(head.history->expanded(h));
      add_local(context, set);
    }
    add_pages(context, h, h + 1, set);
    add_like_keys(context, h, head, set);
  }
  add_best_labelled(context, head, candidates.first(group_), counters);
}

/// What lies in clusters, or meets in hash tables, with the query of head `h`, and what is in neither of them; what was
/// kept of the prompt.
void Proposer::add_like_keys(const HeadContext& context, std::uint32_t h, SparseHead& head, TokenSet& set) const {
  if (head.clusters) head.clusters->propose(h, spec_.near.sink_tokens, context.tokens, set);
  if (head.snapshot) head.snapshot->propose(spec_.near.sink_tokens, context.tokens, set);
  if (!head.lsh) return;
  head.lsh->add_collisions(h, set);
  set.add_range(std::max(head.lsh->end(), spec_.near.sink_tokens), context.tokens);
}

/// Of the tokens that are not attended anyway. A set of its own for every query head, or one for all.
void Proposer::add_best_labelled(const HeadContext& context, SparseHead& head, std::span<TokenSet> candidates,
                                 SelectCounters& counters) const {
  if (!head.labels) return;
  head.labels->follow(context.tokens, *context.kv);
  const std::uint32_t begin = std::min(context.near->sink_end, context.tokens);
  head.labels->propose({.q = context.q,
                        .begin = begin,
                        .end = std::max(begin, std::min(context.near->recent_begin, context.tokens)),
                        .most = budget_tokens(spec_.labels, context.tokens),
                        .heads = head.observing},
                       *context.kv, candidates, counters);
}

/// The newest token and the local ones before it: their vertical entries are too young to speak.
void Proposer::add_local(const HeadContext& context, TokenSet& set) const {
  const std::uint32_t local = std::min(spec_.history.local_tokens + 1, context.tokens - spec_.near.sink_tokens);
  set.add_range(context.tokens - local, context.tokens);
}

/// The ranked pages of query heads [begin, end), and the newest page: no digest speaks for it. Beside history its
/// tokens are the local ones.
void Proposer::add_pages(const HeadContext& context, std::uint32_t begin, std::uint32_t end, TokenSet& set) const {
  if (!spec_.uses(Source::pages)) return;
  const std::size_t ranked = context.ranked_pages.size() / group_;
  for (const std::uint32_t page : context.ranked_pages.subspan(begin * ranked, (end - begin) * ranked)) {
    set.add_range(std::max(page * page_tokens_, first_), std::min((page + 1) * page_tokens_, context.tokens));
  }
  if (!spec_.uses(Source::history)) set.add_range(newest_page(context.tokens, page_tokens_), context.tokens);
}

}  // namespace sluice::scheduler
