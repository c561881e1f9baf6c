// Traces of an Engine: what its forwards were planned to do, and when it was done.
#include <string>

#include "runtime/engine/impl.hpp"
#include "scheduler/plan/forward_work.hpp"

namespace sluice {

void Engine::Impl::begin_trace(const ForwardMemory& m) {
  runtime::Program& program = programs.newest();
  program.trace = std::make_unique<runtime::TraceNotes>();
  program.trace->forward = program.forward;
  program.trace->rows.assign(m.slip_rows, m.slip_rows + m.bucket.decode_rows);
  program.trace->fetches_chosen = m.fetches_chosen;
  program.trace->awaits_lists = m.handover == Handover::device;
  program.trace->stamps.reserve(std::size_t{m.shape.layers} * kStampedStages);
  program.trace->before = stats();
  program.trace->looks = looked;
  far_notes.expect(program.forward);
  program.trace->planned = Clock::now();
  if (programs.all().size() == 1) program.trace->idle = program.trace->planned;
}

void Engine::Impl::note_trace(runtime::Program& program) const noexcept {
  if (!program.trace || !program.trace->stamps.empty()) return;
  runtime::TraceNotes& notes = *program.trace;
  const ForwardMemory& m = memory.largest();
  notes.ended = Clock::now();
  notes.after = stats();
  const ForwardStamp* const first = m.stamps_of(program.forward, 0);
  notes.stamps.assign(first, first + std::size_t{m.shape.layers} * kStampedStages);  // There is room.
  try {
    notes.far = far_notes.take(program.forward);
  } catch (const std::bad_alloc&) {
    program.trace.reset();
  }
}

void Engine::Impl::keep_trace(runtime::Program& program, bool done) noexcept {
  if (!program.trace) return;
  if (traced && traced->forward + 1 == program.forward) program.trace->idle = runtime::end_of(*traced);
  traced.reset();
  note_trace(program);
  if (!program.trace) return;
  const runtime::TraceNotes& notes = *program.trace;
  const ForwardMemory m = memory.of(program.bucket).teams();
  const scheduler::WorkPlace place{.shape = m.shape,
                                   .layout = m.far_layout,
                                   .placement = options.placement,
                                   .fetch_share = m.fetched_share(),
                                   .bucket = program.bucket,
                                   .promotes = m.promotions != 0,
                                   .windows = options.windows,
                                   .code_bits = m.code_bits};
  try {
    const scheduler::WorkShares shares = scheduler::shares_of(place, notes.rows, notes.before, notes.after);
    const runtime::ClockOffset offset = verbs.stamps_by_clock() ? runtime::ClockOffset{} : runtime::align(notes);
    traced = std::make_unique<const ForwardTrace>(runtime::trace_of(
        notes, offset, graph_of(m), scheduler::forward_work(place, notes.rows, program.chunks, shares), done));
  } catch (const std::bad_alloc&) {
    // The forward is worth more than its trace.
  }
}

const ForwardTrace& Engine::Impl::trace(const Batch& batch) const {
  if (!traced || traced->forward != batch.forward)
    throw Error(Errc::not_found, "there is no trace of forward " + std::to_string(batch.forward) +
                                     "; plan it with Bucket::trace, and ask before the next such one is finished");
  return *traced;
}

}  // namespace sluice
