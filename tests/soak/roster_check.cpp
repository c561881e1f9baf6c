// What an engine says of its sequences, its memory and itself is what the model says.
#include <algorithm>
#include <array>

#include "scheduler/plan/forward_rows.hpp"
#include "tests/soak/expect.hpp"
#include "tests/soak/roster.hpp"

namespace sluice::test {

void Roster::check() {
  const Engine& engine = driven_.engine;
  const std::uint64_t block = stack_bytes();
  for (const auto& sequence : sequences_) {
    const std::uint32_t tokens = engine.tokens(sequence->id);
    require(tokens == sequence->settled, sequence->name() + " has " + std::to_string(tokens) +
                                             " tokens, and should have " + std::to_string(sequence->settled));
    const std::uint64_t held = engine.far_bytes(sequence->id) / block;
    require(held == pages_.held(sequence->id), sequence->name() + " holds " + std::to_string(held) +
                                                   " blocks instead of " + std::to_string(pages_.held(sequence->id)));
    check_audit(*sequence);
  }
  check_stats();
  const std::uint64_t used = engine.memory().far_pages_used;
  require(used == pages_.used() * block, "sequences hold " + std::to_string(used) + " bytes instead of " +
                                             std::to_string(pages_.used()) + " blocks of " + std::to_string(block));
  const std::uint64_t pages = std::min<std::uint64_t>(pages_.stacks().pages_in(blocks() - pages_.used()), kNone);
  const auto room = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(pages * engine.options().page_tokens, engine.options().largest.max_tokens));
  const bool slot = sequences_.size() < engine.options().sequences;
  require(engine.can_admit(room) == slot && !engine.can_admit(room + 1), "it admits too much or too little");
}

void Roster::check_audit(const Sequence& sequence) const {
  const AuditReport report = driven_.engine.audit(sequence.id);
  require(report.tokens == sequence.audited, "of " + sequence.name() + " " + std::to_string(report.tokens) +
                                                 " tokens were audited instead of " + std::to_string(sequence.audited));
  for (std::size_t i = 0; i < report.heads.size(); ++i) {
    const HeadAudit& head = report.heads[i];
    const auto layer = static_cast<std::uint32_t>(i / driven_.pool.shape().q_heads);
    const Window window = window_of(sequence.spec, layer);
    const double rounding = std::max(1e-3, 2 * driven_.pool.terrain().tolerance);
    const bool exact = sequence.spec.bypass_threshold == 0.f && !scheduler::corrects_scores(sequence.spec);
    require(head.bound_broken == 0 || !exact, "an error is larger than the bound: " + sequence.name());
    require(!window.known || window.sinks < kSoakTokens || (head.coverage_min > 0.9999 && head.error < rounding),
            "a dense layer does not attend everything: " + sequence.name());
  }
}

void Roster::check_stats() {
  const EngineStats now = driven_.engine.stats();
  const auto values = [](const EngineStats& s) {
    return std::array{s.asked,         s.unplanned,    s.near_tokens,  s.far_tokens,   s.promoted,
                      s.scored,        s.estimated,    s.ranked_pages, s.waited_ns,    s.answer_ns,
                      s.sparse_chunks, s.dense_chunks, s.kept_blocks,  s.causal_blocks};
  };
  const auto before = values(last_);
  const auto after = values(now);
  for (std::size_t i = 0; i < after.size(); ++i)
    require(after[i] >= before[i], "number " + std::to_string(i) + " of the engine's statistics falls");
  require(now.kept_blocks <= now.causal_blocks, "more blocks are computed than there are");
  last_ = now;
}

}  // namespace sluice::test
