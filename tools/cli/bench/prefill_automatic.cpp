#include "tools/cli/bench/prefill_automatic.hpp"

#include "scheduler/prefill_auto.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::tools {

std::vector<double> automatic_shares(const PrefillPass& pass, std::uint32_t q_heads, std::uint32_t layers,
                                     const PrefillCosts& costs) {
  const std::vector<PrefillChoice> choices = pass.choices();
  scheduler::PrefillBets bets;
  std::vector<std::uint32_t> rest(layers);
  std::vector<double> shares;
  for (std::size_t c = 0; c < pass.chunks(); ++c) {
    std::uint64_t kept = 0, causal = 0;
    for (std::size_t i = c * q_heads; i < (c + 1) * q_heads; ++i) {
      kept += choices[i].kept;
      causal += choices[i].causal;
    }
    std::uint32_t chosen = 0;
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      const scheduler::ChunkWork work{.first = pass.first(c), .count = pass.keys(c) - pass.first(c)};
      if (!bets.bet(work, layer, layers, costs, rest[layer])) continue;
      bets.settle(kept, causal, q_heads, rest[layer]);
      ++chosen;
    }
    shares.push_back(static_cast<double>(chosen) / layers);
  }
  return shares;
}

}  // namespace sluice::tools
