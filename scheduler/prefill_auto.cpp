#include "scheduler/prefill_auto.hpp"
#include "sluice/step/prefill_choice.hpp"

#include <algorithm>

namespace sluice::scheduler {
namespace {

/// What may be lost, as a share of dense attention's time: less than the 3% that are allowed.
constexpr double kStake = 0.02;
/// A choice that keeps more than this share of all blocks lost its bet, whatever it cost.
constexpr double kNearlyAll = 0.85;
/// So many chunks the layer is dense then.
constexpr std::uint32_t kRest = 8;

}  // namespace

double ChunkWork::key_blocks() const noexcept {
  return static_cast<double>(div_up(std::uint64_t{first} + count, kPrefillBlock));
}

double ChunkWork::query_blocks() const noexcept { return prefill_blocks(first, count); }

double ChunkWork::pairs() const noexcept { return query_blocks() * (key_blocks() - (query_blocks() - 1.0) / 2.0); }

bool PrefillBets::bet(const ChunkWork& work, std::uint32_t layer, std::uint32_t layers, const PrefillCosts& costs,
                      std::uint32_t& rest) noexcept {
  const double stake = kStake * work.pairs();
  const double to_come = stake * (layers - 1 - std::min(layer, layers - 1));
  balance_ += stake;
  if (rest != 0) {
    --rest;
    return false;
  }
  const double cost = costs.per_chunk + costs.per_key_block * work.key_blocks() +
                      costs.per_pair * work.query_blocks() * work.key_blocks();
  if (balance_ + to_come < cost) return false;
  balance_ -= cost;
  return true;
}

void PrefillBets::settle(std::uint64_t kept, std::uint64_t causal, std::uint32_t q_heads,
                         std::uint32_t& rest) noexcept {
  balance_ += static_cast<double>(causal - kept) / q_heads;
  if (static_cast<double>(kept) > kNearlyAll * static_cast<double>(causal)) rest = kRest;
}

}  // namespace sluice::scheduler
