// Audits of an Engine: which forwards are, and what sequences get of it.
#include <algorithm>
#include <utility>

#include "runtime/engine/impl.hpp"
#include "scheduler/plan/forward_rows.hpp"

namespace sluice {

void Engine::Impl::require_auditable(const Bucket& bucket) const {
  const bool under_way = !programs.empty() && programs.newest().bucket.audit;
  if (!bucket.audit && !under_way) return;
  if (!programs.empty())
    throw Error(Errc::invalid_argument, "plan: an audited forward runs alone; finish or cancel forward " +
                                            std::to_string(programs.newest().forward) + " first");
  if (compares())
    throw Error(Errc::timeout,
                "plan: a thread that compared an earlier forward has not come back; plan without audit, "
                "or when it has");
}

std::shared_ptr<runtime::ForwardAudit> Engine::Impl::audit_of(std::span<const Wanted> wanted,
                                                              const Bucket& bucket) const {
  const std::uint32_t drafts = bucket.drafts;
  auto audit = std::make_shared<runtime::ForwardAudit>(memory.of(bucket).teams(), cpu::fastest_kernels());
  std::uint32_t lists = 0;
  for (const auto& [sequence, item] : wanted) {
    for (std::uint32_t i = 0; i < item.tokens && !item.prefill; ++i) {
      audit->add({.sequence = item.sequence,
                  .list = lists + i / drafts,
                  .draft = i % drafts,
                  .tokens = sequence->planned + i + 1,
                  .listed = drafts == 1 ? kNone : sequence->planned + i / drafts * drafts,
                  .corrected = scheduler::corrects_scores(sequence->spec),
                  .blocks = sequence->blocks(),
                  .watched = sequence->watched,
                  .notes = {}});
    }
    if (!item.prefill) lists += static_cast<std::uint32_t>(div_up(item.tokens, drafts));
  }
  return audit;
}

void Engine::Impl::compare(const std::shared_ptr<runtime::ForwardAudit>& of) {
  runtime::ForwardAudit& audit = *of;
  const auto require_back = [&](bool back) {
    if (!back)
      throw Error(Errc::timeout,
                  "finish: a thread that compares a forward with exact attention has not come back "
                  "within " +
                      std::to_string(options.timeout.count()) + " ms; finish it when it may have, or cancel it");
  };
  require_back(!comparison || comparison->await(options.timeout));  // One that was given up writes what this one would.
  comparison = begin_job(audit.begin(), [of](std::uint32_t piece) { of->compare(piece); });
  require_back(comparison->await(options.timeout));
  std::exchange(comparison, nullptr)->rethrow();
  for (const runtime::AuditedRow& row : audit.rows()) {
    auto& report = at(row.sequence).audit;
    if (!report) report = std::make_unique<AuditReport>();
    report->heads.resize(std::size_t{options.shape.layers} * options.shape.q_heads);
  }
  // Nothing fails any more: all of them, or none.
  for (std::uint32_t row = 0; row < audit.rows().size(); ++row)
    audit.report(row, *at(audit.rows()[row].sequence).audit);
}

void Engine::Impl::watch(SequenceId id, std::span<const std::uint32_t> tokens) {
  Sequence& sequence = at(id);
  // Before one is read: a count that cannot be has memory of others behind it.
  if (const std::uint32_t most = memory.largest().largest.max_tokens; tokens.size() > most)
    throw Error(Errc::invalid_argument, "watch: there are " + text(tokens.size()) +
                                            " tokens, and a sequence may have " + text(most) + "; name each once");
  std::vector<std::uint32_t> watched(tokens.begin(), tokens.end());
  std::ranges::sort(watched);
  watched.erase(std::ranges::unique(watched).begin(), watched.end());
  sequence.watched = std::move(watched);
}

}  // namespace sluice
