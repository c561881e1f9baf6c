// What an engine tells of itself.
#include "capi/engine.hpp"
#include "capi/sized.hpp"

namespace sluice::capi {
namespace {

static_assert(offsetof(sluice_stats, wide_bars) + sizeof(std::uint64_t) == sizeof(sluice_stats));
static_assert(offsetof(sluice_memory, buffers) + sizeof(std::uint64_t) == sizeof(sluice_memory));
static_assert(offsetof(sluice_sequence_memory, near_pages_shared) + sizeof(std::uint64_t) ==
              sizeof(sluice_sequence_memory));
static_assert(offsetof(sluice_audit, watched_min) + sizeof(double) == sizeof(sluice_audit));
static_assert(offsetof(sluice_head_audit, watched_kept) + sizeof(double) == sizeof(sluice_head_audit));

sluice_stats from(const EngineStats& stats) noexcept {
  return {.struct_size = sizeof(sluice_stats),
          .reserved = 0,
          .asked = stats.asked,
          .unplanned = stats.unplanned,
          .near_tokens = stats.near_tokens,
          .far_tokens = stats.far_tokens,
          .fetched_tokens = stats.fetched_tokens,
          .promoted = stats.promoted,
          .scored = stats.scored,
          .estimated = stats.estimated,
          .ranked_pages = stats.ranked_pages,
          .waited_ns = stats.waited_ns,
          .answer_ns = stats.answer_ns,
          .sparse_chunks = stats.sparse_chunks,
          .dense_chunks = stats.dense_chunks,
          .kept_blocks = stats.kept_blocks,
          .causal_blocks = stats.causal_blocks,
          .matched_tokens = stats.matched_tokens,
          .evicted_blocks = stats.evicted_blocks,
          .missed = stats.missed,
          .stalls = stats.stalls,
          .awaited = stats.awaited,
          .drawn_heads = stats.drawn_heads,
          .error_bars = stats.error_bars,
          .wide_bars = stats.wide_bars};
}

sluice_sequence_memory from(const SequenceMemoryUse& use) noexcept {
  return {.struct_size = sizeof(sluice_sequence_memory),
          .reserved = 0,
          .far_pages = use.far_pages,
          .far_pages_shared = use.far_pages_shared,
          .policy = use.policy,
          .names = use.names,
          .tail = use.tail,
          .near_pages = use.near_pages,
          .near_pages_shared = use.near_pages_shared};
}

sluice_audit from(const AuditReport& report) noexcept {
  return {.struct_size = sizeof(sluice_audit),
          .top_k = AuditReport::top_k,
          .layers = report.layers,
          .q_heads = report.q_heads,
          .tokens = report.tokens,
          .attended_tokens = report.attended_tokens,
          .dense_tokens = report.dense_tokens,
          .bypassed_heads = report.bypassed_heads,
          .coverage_count = report.coverage.count(),
          .coverage_mean = report.coverage.mean(),
          .coverage_min = report.coverage.min(),
          .coverage_p5 = report.coverage.percentile(0.05),
          .coverage_p50 = report.coverage.percentile(0.5),
          .overlap_count = report.overlap.count(),
          .overlap_mean = report.overlap.mean(),
          .overlap_min = report.overlap.min(),
          .watched_count = report.watched.count(),
          .watched_mean = report.watched.mean(),
          .watched_min = report.watched.min()};
}

sluice_head_audit from(const HeadAudit& head) noexcept {
  return {.struct_size = sizeof(sluice_head_audit),
          .reserved = 0,
          .steps = head.steps,
          .bound_broken = head.bound_broken,
          .watched_steps = head.watched_steps,
          .coverage = head.coverage,
          .coverage_min = head.coverage_min,
          .overlap = head.overlap,
          .error = head.error,
          .relative_error = head.relative_error,
          .error_bound = head.error_bound,
          .watched_mass = head.watched_mass,
          .watched_kept = head.watched_kept};
}

void write_heads(const AuditReport& report, std::size_t count, sluice_head_audit* heads) {
  for (std::size_t i = 0; i < count; ++i) {
    write_sized(report.heads.empty() ? sluice_head_audit{} : from(report.heads[i]), element(heads, i),
                "sluice_head_audit");
  }
}

}  // namespace

sluice_memory memory_of(const EngineMemoryUse& use) noexcept {
  return {.struct_size = sizeof(sluice_memory),
          .reserved = 0,
          .far_pages = use.far_pages,
          .far_pages_used = use.far_pages_used,
          .far_pages_cached = use.far_pages_cached,
          .prefixes = use.prefixes,
          .pinned = use.pinned,
          .partials = use.partials,
          .policies = use.policies,
          .near_pages = use.near_pages,
          .near_pages_used = use.near_pages_used,
          .codes = use.codes,
          .digests = use.digests,
          .buffers = use.buffers};
}

}  // namespace sluice::capi

using namespace sluice;

sluice_status sluice_engine_stats(const sluice_engine* engine, sluice_stats* stats) {
  return capi::guarded([&] { capi::write_sized(capi::from(capi::engine_of(engine).stats()), stats, "sluice_stats"); });
}

sluice_status sluice_engine_memory(const sluice_engine* engine, sluice_memory* memory) {
  return capi::guarded(
      [&] { capi::write_sized(capi::memory_of(capi::engine_of(engine).memory()), memory, "sluice_memory"); });
}

sluice_status sluice_engine_sequence_memory(const sluice_engine* engine, sluice_sequence sequence,
                                            sluice_sequence_memory* memory) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_sized(memory, "sluice_sequence_memory");
    capi::write_sized(capi::from(of.memory(SequenceId{sequence})), memory, "sluice_sequence_memory");
  });
}

sluice_status sluice_engine_audit(const sluice_engine* engine, sluice_sequence sequence, sluice_audit* audit) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    capi::require_sized(audit, "sluice_audit");
    capi::write_sized(capi::from(of.audit(SequenceId{sequence})), audit, "sluice_audit");
  });
}

sluice_status sluice_engine_audit_heads(const sluice_engine* engine, sluice_sequence sequence, sluice_head_audit* heads,
                                        size_t head_count) {
  return capi::guarded([&] {
    const Engine& of = capi::engine_of(engine);
    const AttentionShape& shape = of.options().shape;
    const std::size_t have = std::size_t{shape.layers} * shape.q_heads;
    capi::require(head_count == have, "head_count is " + std::to_string(head_count) +
                                          "; it must be layers * q_heads, which are " + std::to_string(have));
    capi::require_array(heads, head_count, "sluice_head_audit");
    capi::write_heads(of.audit(SequenceId{sequence}), have, heads);
  });
}
