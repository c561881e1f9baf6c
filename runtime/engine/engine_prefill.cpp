// Where chunks of prompts choose blocks of keys, and what becomes of that.
#include "runtime/engine/impl.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice {

void Engine::Impl::bet(Sequence& sequence, ForwardChunk& chunk) {
  const PrefillSpec& spec = options.prefill;
  if (spec.mode == PrefillMode::full || chunk.keys() <= dense_prompt_tokens(spec)) return;
  runtime::PrefillBook& bets = sequence.bets;
  bets.rests.resize(options.shape.layers);
  bets.end = chunk.keys();
  for (std::uint32_t layer = 0; layer < options.shape.layers; ++layer) {
    if (memory.largest().window_in(layer) != 0) continue;  // What a row sees is little as it is.
    const bool sparse = spec.mode != PrefillMode::automatic ||
                        bets.balance.bet({.first = chunk.first, .count = chunk.count}, layer, options.shape.layers,
                                         verbs.prefill_costs(), bets.rests[layer]);
    chunk.sparse[layer / 32] |= (sparse ? 1u : 0u) << layer % 32;
  }
}

void Engine::Impl::give_back(Sequence& sequence, runtime::Program& program, std::size_t item) noexcept {
  // Of several forwards that come to nothing, as it was before the first.
  const std::uint32_t begin = program.ends[item] - program.items[item].tokens;
  if (program.books.empty() || !program.items[item].prefill || begin >= sequence.bets.end) return;
  sequence.bets = std::move(program.books[item]);
  sequence.bets.end = begin;
}

void Engine::Impl::tally(runtime::Program& program) const noexcept {
  if (program.tallies.empty()) return;
  for (std::uint32_t c = 0; c < program.chunks.size(); ++c) {
    for (std::uint32_t layer = 0; layer < options.shape.layers; ++layer) {
      runtime::ChunkTally& tally = program.tallies[c * options.shape.layers + layer];
      if (!program.chunks[c].sparse_in(layer)) continue;
      const PrefillChoice* const choices = memory.largest().choices_of(program.forward, layer, c);
      for (std::uint32_t head = 0; head < options.shape.q_heads; ++head) {
        tally.kept += choices[head].kept;
        tally.causal += choices[head].causal;
      }
    }
  }
}

void Engine::Impl::settle(const runtime::Program& program) {
  std::size_t chunk = 0;
  for (const PlanItem& item : program.items) {
    if (!item.prefill || program.bucket.prefills == 0) continue;
    for (std::uint32_t layer = 0; layer < options.shape.layers; ++layer) {
      const bool sparse = program.chunks[chunk].sparse_in(layer);
      runtime::count(sparse ? counted.sparse_chunks : counted.dense_chunks);
      if (!sparse) continue;
      const runtime::ChunkTally& tally = program.tallies[chunk * options.shape.layers + layer];
      runtime::count(counted.kept_blocks, tally.kept);
      runtime::count(counted.causal_blocks, tally.causal);
      runtime::PrefillBook& bets = at(item.sequence).bets;
      if (options.prefill.mode == PrefillMode::automatic)
        bets.balance.settle(tally.kept, tally.causal, options.shape.q_heads, bets.rests[layer]);
    }
    ++chunk;
  }
}

}  // namespace sluice
