#include "scheduler/policy/scored_set.hpp"

#include <algorithm>
#include <array>
#include <bit>

namespace sluice::scheduler {
namespace {

/// Bits of the word's 64 positions that are near.
std::uint64_t near_bits(const NearSet& near, std::size_t word) noexcept {
  const std::uint64_t first = std::uint64_t{word} * 64;
  std::uint64_t bits = 0;
  if (first < near.sink_end) {
    const std::uint64_t count = near.sink_end - first;
    bits |= count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
  }
  if (first + 64 > near.recent_begin) {
    bits |= first >= near.recent_begin ? ~std::uint64_t{0} : ~std::uint64_t{0} << (near.recent_begin - first);
  }
  return bits;
}

}  // namespace

void ScoredSet::collect(const CandidateSets& candidates, const NearSet& near) {
  clear();
  active_ = candidates.active;
  TokenSet const* sets[33] = {};
  std::uint32_t head_of[32] = {};
  std::size_t count = 0;
  for (std::uint32_t h = 0; h < candidates.sets.size(); ++h) {
    if (((candidates.active >> h) & 1) == 0) continue;
    head_of[count] = h;
    sets[count++] = &candidates.sets[candidates.shared ? 0 : h];
    if (candidates.shared) break;
  }
  if (count == 0) return;
  sets[count] = candidates.weighed;
  const std::size_t all = count + (candidates.weighed != nullptr ? 1 : 0);

  std::size_t kept = 0;
  TokenSet::for_each_word_of_any(std::span<TokenSet const* const>(sets, all), [&](std::size_t word) {
    std::array<std::uint64_t, 32> bits;
    std::uint64_t any = 0;
    for (std::size_t i = 0; i < count; ++i) any |= bits[i] = sets[i]->word(word);
    const std::uint64_t is_near = any & near_bits(near, word);
    united_ += static_cast<std::uint64_t>(std::popcount(any));
    near_hits_ += static_cast<std::uint64_t>(std::popcount(is_near));
    if (!candidates.keep_near) any &= ~is_near;
    const std::uint64_t proposed = any;
    if (candidates.weighed != nullptr) any |= candidates.weighed->word(word);
    if (tokens_.size() < kept + 64) grow(kept);
    for (; any != 0; any &= any - 1) {
      const int bit = std::countr_zero(any);
      std::uint32_t heads = candidates.active & (0u - static_cast<std::uint32_t>((proposed >> bit) & 1));
      if (!candidates.shared) {
        heads = 0;
        for (std::size_t i = 0; i < count; ++i) heads |= static_cast<std::uint32_t>((bits[i] >> bit) & 1) << head_of[i];
      }
      tokens_[kept] = static_cast<std::uint32_t>(word * 64) + static_cast<std::uint32_t>(bit);
      heads_[kept] = heads;
      far_[kept] = heads & (static_cast<std::uint32_t>((is_near >> bit) & 1) - 1);
      ++kept;
    }
  });
  tokens_.resize(kept);
  heads_.resize(kept);
  far_.resize(kept);
}

void ScoredSet::emit_far(const TokenSet& candidates, const NearSet& near, SelectionRow& row) {
  clear();
  std::size_t kept = 0;
  candidates.for_each_word([&](std::size_t word) {
    const std::uint64_t any = candidates.word(word);
    const std::uint64_t is_near = any & near_bits(near, word);
    united_ += static_cast<std::uint64_t>(std::popcount(any));
    near_hits_ += static_cast<std::uint64_t>(std::popcount(is_near));
    if (row.tokens.size() < kept + 64) row.tokens.resize(std::max(2 * kept + 64, row.tokens.capacity()));
    for (std::uint64_t far = any & ~is_near; far != 0; far &= far - 1) {
      row.tokens[kept++] = static_cast<std::uint32_t>(word * 64) + static_cast<std::uint32_t>(std::countr_zero(far));
    }
  });
  row.tokens.resize(kept);
}

/// Room for the 64 candidates that one word may hold, and for as many again as there are.
void ScoredSet::grow(std::size_t kept) {
  const std::size_t room = std::max(2 * kept + 64, tokens_.capacity());
  tokens_.resize(room);
  heads_.resize(room);
  far_.resize(room);
}

void ScoredSet::score(KvReader& kv, const float* q, std::uint32_t group) {
  scores_.resize(tokens_.size() * group);
  if (!tokens_.empty()) kv.score(q, tokens_, scores_.data());
}

void ScoredSet::estimate(KvReader& kv, const float* q, std::uint32_t group) {
  estimated_ = true;
  scores_.resize(tokens_.size() * group);
  if (!tokens_.empty()) kv.estimate(q, tokens_, scores_.data());
}

void ScoredSet::emit(std::uint32_t group, Membership membership, SelectionRow& row) const {
  const std::uint32_t everyone = ~0u >> (32 - group);
  const bool united = membership == Membership::united;
  std::size_t count = 0;
  for (const std::uint32_t heads : attended_) count += heads != 0;
  row.tokens.resize(count);
  row.members.resize(united && active_ == everyone ? 0 : count);
  row.scores.resize(estimated_ ? 0 : count * group);
  std::size_t to = 0;
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    if (attended_[i] == 0) continue;
    row.tokens[to] = tokens_[i];
    if (!row.members.empty()) row.members[to] = united ? active_ : attended_[i];
    if (!row.scores.empty()) {
      const float* scores = scores_.data() + i * group;
      float* out = row.scores.data() + to * group;
      for (std::uint32_t h = 0; h < group; ++h) out[h] = scores[h];
    }
    ++to;
  }
}

ScoredSet::Observed ScoredSet::observed(std::uint32_t h, std::uint32_t group) {
  observed_tokens_.resize(tokens_.size());
  observed_scores_.resize(tokens_.size());
  std::uint32_t* tokens = observed_tokens_.data();
  float* scores = observed_scores_.data();
  std::size_t count = 0;  // Written always, kept if the bit is set: which bits are set cannot be predicted.
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    tokens[count] = tokens_[i];
    scores[count] = scores_[i * group + h];
    count += (observed_[i] >> h) & 1;
  }
  return {.tokens = {tokens, count}, .scores = {scores, count}};
}

void ScoredSet::clear() noexcept {
  tokens_.clear();
  heads_.clear();
  far_.clear();
  scores_.clear();
  attended_.clear();
  observed_.clear();
  united_ = near_hits_ = 0;
  estimated_ = false;
}

}  // namespace sluice::scheduler
