#include "gpu/forward/forward_verbs.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "gpu/device/cuda_error.hpp"
#include "gpu/device/current_device.hpp"
#include "gpu/device/driver.hpp"
#include "gpu/forward/forward_scratch.hpp"
#include "gpu/forward/forward_side.hpp"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/kernels/select/choose_pages.hpp"
#include "gpu/kernels/select/score.hpp"
#include "gpu/kernels/transfer/signal.hpp"
#include "gpu/stages/shapes.hpp"

namespace sluice::gpu {
namespace {

cudaStream_t handle(void* stream) { return static_cast<cudaStream_t>(stream); }

/// Thread block i of a launch is of job job_of(i), counted from `jobs`.
template <class JobOf>
void launch_jobs(const ForwardMemory& memory, const ForwardScratch& scratch, const AttendVariant& variant,
                 const AttendJob* jobs, std::uint32_t blocks, const JobOf& job_of, cudaStream_t stream) {
  AttendArgs args{.jobs = jobs,
                  .partials = scratch.partials,
                  .counters = scratch.counters,
                  .partial_count = blocks,
                  .score_scale = memory.shape.score_scale(),
                  .softcap = memory.shape.softcap};
  for (std::uint32_t i = 0; i < blocks; ++i) args.job_of[i] = static_cast<std::uint16_t>(job_of(i));
  launch_attend(variant, args, blocks, stream);
}

/// Jobs of one kind, as many launches as it takes; before each `launch_before(first, last)` of these.
template <class LaunchBefore>
void launch_in_turns(const ForwardMemory& memory, const ForwardScratch& scratch, const AttendVariant& variant,
                     const AttendJob* jobs, std::uint32_t slices, std::uint32_t at_once, cudaStream_t stream,
                     const LaunchBefore& launch_before) {
  for (std::uint32_t done = 0; done < scratch.job_count; done += at_once) {
    const std::uint32_t some = std::min(at_once, scratch.job_count - done);
    launch_before(done, done + some);
    launch_jobs(
        memory, scratch, variant, jobs + done, some * slices, [&](std::uint32_t i) { return i / slices; }, stream);
  }
}

}  // namespace

ForwardVerbs::ForwardVerbs(int ordinal, std::uint32_t multiprocessors, const KernelLimits& limits,
                           std::uint32_t link_rows)
    : ordinal_(ordinal),
      multiprocessors_(multiprocessors),
      limits_(limits),
      link_rows_(link_rows),
      sight_(make_stream(0)) {}

std::unique_ptr<sluice::ForwardSide> ForwardVerbs::make_side() { return std::make_unique<ForwardSide>(ordinal_); }

void ForwardVerbs::apply(const ForwardMemory& memory, sluice::ForwardSide& side, void* stream) {
  const CurrentDevice current(ordinal_);
  if (memory.promotions != 0) static_cast<const ForwardSide&>(side).join(handle(stream));
  launch_forward_apply(memory, handle(stream));
}

void ForwardVerbs::fill(const ForwardMemory& memory, sluice::ForwardSide& side, void* stream) {
  const CurrentDevice current(ordinal_);
  static_cast<const ForwardSide&>(side).fill(memory, handle(stream));
}

void ForwardVerbs::derive(const ForwardMemory& memory, std::uint32_t plane, std::span<const FarPage> pages,
                          const float* mean, void* stream) {
  const CurrentDevice current(ordinal_);
  launch_forward_derive(memory, plane, pages, mean, handle(stream));
}

void ForwardVerbs::begin(const ForwardMemory& memory, void* stream) {
  const CurrentDevice current(ordinal_);
  launch_forward_begin(memory, choice_of(memory), handle(stream));
}

void ForwardVerbs::append(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  const bool attends = layer.out.tokens != 0;
  if (!attends || !appends_beside_scores(memory))
    launch_forward_append(memory, attends ? choice_of(memory) : ForwardScratch{}, layer);
  if (layer.rehearsed.tokens != 0) launch_forward_rehearsed(memory.teams(), layer);
  if (layer.out.tokens == 0 || memory.bucket.drafts == 1) return;
  const ForwardMemory teams = memory.teams();
  launch_forward_teams(teams, choice_of(teams), layer);
}

void ForwardVerbs::rank(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  const ForwardScratch scratch = choice_of(memory);
  const std::uint32_t pages = memory.bucket.max_tokens / memory.layout.page_tokens;
  launch_score_pages(scratch.page_tasks, memory.bucket.decode_rows * memory.shape.kv_heads, pages,
                     {.dtype = memory.layout.dtype,
                      .group = memory.shape.group(),
                      .head_dim = memory.shape.head_dim,
                      .multiprocessors = multiprocessors_},
                     handle(layer.stream));
  launch_top_k(scratch.page_rows, memory.bucket.decode_rows * memory.shape.q_heads, pages, limits_.longest_top_k,
               handle(layer.stream));
}

void ForwardVerbs::score(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  if (memory.bucket.scores && layer.scores.tokens != 0) launch_forward_spread_scores(memory, layer);
  if (!memory.has_codes()) return;  // Nobody chooses by them.
  const ForwardScratch scratch = choice_of(memory);
  const ScoreInt4Shape shape{.layout = memory.code_layout(),
                             .dtype = memory.layout.dtype,
                             .group = memory.shape.group(),
                             .scale = memory.shape.score_scale(),
                             .softcap = memory.shape.softcap,
                             .multiprocessors = multiprocessors_};
  if (appends_beside_scores(memory)) return launch_forward_append_score(memory, scratch, layer, shape);
  launch_score_int4(scratch.score_tasks, memory.bucket.decode_rows * memory.shape.kv_heads,
                    memory.scores_in(memory.bucket), memory.bucket.pages, foresight_of(memory, scratch, layer.layer),
                    shape, handle(layer.stream));
}

void ForwardVerbs::propose(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  launch_forward_propose(memory, layer);
}

void ForwardVerbs::choose(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  const ForwardScratch scratch = choice_of(memory);
  const std::uint32_t rows = memory.bucket.decode_rows * memory.shape.q_heads;
  const std::uint32_t longest = memory.scores_in(memory.bucket);
  // Of all tokens the largest are chosen where they are told apart.
  if (memory.bucket.top_k && memory.bucket.pages)
    launch_top_k(scratch.top_k_rows, rows, longest, limits_.longest_top_k, handle(layer.stream));
  if (memory.bucket.unbounded)
    launch_top_p(scratch.top_p_rows, rows, longest, limits_.longest_top_p, handle(layer.stream));
  if (scratch.page_choices != nullptr && memory.takes_pages(memory.bucket)) {
    TaskArray<ChoosePagesTask> tasks;
    tasks.queued = scratch.page_choices;
    tasks.count = memory.bucket.decode_rows * memory.shape.kv_heads;
    launch_choose_pages(tasks, memory.bucket.max_tokens / memory.layout.page_tokens,
                        {.page_tokens = memory.layout.page_tokens,
                         .group = memory.shape.group(),
                         .softcap = memory.shape.softcap,
                         .multiprocessors = multiprocessors_},
                        handle(layer.stream));
  }
  if (memory.bucket.unbounded && memory.cluster_slots != 0) choose_clusters(memory, scratch, layer);
}

void ForwardVerbs::split(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  launch_forward_split(memory, choice_of(memory), layer);
}

void ForwardVerbs::attend(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  const ForwardScratch scratch = choice_of(memory);
  if (attends_in_split(memory, scratch)) return;
  if (attends_together(memory, scratch)) {
    const std::uint32_t near = scratch.job_count * scratch.slices;
    launch_jobs(
        memory, scratch, variant_of(memory), scratch.jobs, near + scratch.job_count * scratch.fetch_slices,
        [&](std::uint32_t i) {
          return i < near ? i / scratch.slices : scratch.job_count + (i - near) / scratch.fetch_slices;
        },
        handle(layer.stream));
  } else {
    launch_in_turns(memory, scratch, variant_of(memory), scratch.jobs, scratch.slices, scratch.jobs_at_once,
                    handle(layer.stream), [](std::uint32_t, std::uint32_t) {});
  }
  if (memory.drafts != 1) launch_forward_edge(memory, layer);
}

void ForwardVerbs::attend_whole(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  const ForwardScratch scratch = choice_of(memory);
  launch_forward_attend_whole(memory, scratch, layer, variant_of(memory),
                              whole_slices(memory, scratch.job_count, multiprocessors_, memory.bucket.max_tokens));
}

void ForwardVerbs::fetch(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  const ForwardScratch scratch = choice_of(memory);
  if (attends_together(memory, scratch)) return;
  const auto await_lists = [&](std::uint32_t first, std::uint32_t last) {
    if (memory.fetches_chosen)
      launch_forward_await(memory, scratch, layer, first / scratch.head_blocks,
                           static_cast<std::uint32_t>(div_up(last, scratch.head_blocks)));
  };
  if (memory.keeps_chosen()) {
    for (std::uint32_t done = 0; done < scratch.job_count; done += scratch.fetches_at_once) {
      const std::uint32_t last = std::min(done + scratch.fetches_at_once, scratch.job_count);
      await_lists(done, last);
      launch_forward_attend_chosen(memory, scratch, layer, fetch_variant(memory), done, last);
    }
    return;
  }
  launch_in_turns(memory, scratch, fetch_variant(memory), scratch.jobs + scratch.job_count, scratch.fetch_slices,
                  scratch.fetches_at_once, handle(layer.stream), await_lists);
}

void ForwardVerbs::promote(const ForwardMemory& memory, const ForwardLayer& layer) {
  if (promotes_beside_merge(memory)) return;
  const CurrentDevice current(ordinal_);
  launch_forward_promote(memory, choice_of(memory), layer);
}

void ForwardVerbs::await_answer(const ForwardMemory& memory, void* stream) {
  const CurrentDevice current(ordinal_);
  check(Driver::instance().wait_for_bits(handle(stream), &memory.mailbox->gate.word, ForwardGate::kOpen),
        "wait for an answer on a stream");
}

void ForwardVerbs::signal(const ForwardMemory& memory, std::uint64_t ticket, void* stream) {
  const CurrentDevice current(ordinal_);
  // A kernel, and no memory operation: this is for devices that may do without these.
  launch_signal(&memory.mailbox->question.passed, ticket, handle(stream));
}

void ForwardVerbs::tell_read(const ForwardMemory& memory, std::uint64_t forward, void* stream) {
  const CurrentDevice current(ordinal_);
  launch_signal(&memory.slip->read, forward, handle(stream));
}

bool ForwardVerbs::capturing(void* stream) const {
  const CurrentDevice current(ordinal_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(handle(stream), &status);
  if (error == cudaErrorStreamCaptureImplicit) {  // The default stream, which a capture elsewhere would have in it.
    (void)cudaGetLastError();
    return true;
  }
  check(error, "ask whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

void ForwardVerbs::merge(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  launch_forward_merge(memory, choice_of(memory), layer);
}

void ForwardVerbs::audit(const ForwardMemory& memory, const ForwardLayer& layer) {
  const CurrentDevice current(ordinal_);
  launch_forward_audit(memory, choice_of(memory), layer);
}

void ForwardVerbs::stamp(const ForwardMemory& memory, std::uint32_t layer, Stage stage, void* stream) {
  const CurrentDevice current(ordinal_);
  launch_forward_stamp(memory, layer, stage, handle(stream));
}

void ForwardVerbs::cancel(const ForwardMemory& memory, std::uint64_t before, void* stream) {
  const CurrentDevice current(ordinal_);
  launch_forward_cancel(memory, before, handle(stream));
}

void ForwardVerbs::require_alive(void* stream) {
  const CurrentDevice current(ordinal_);
  // Elsewhere a caller may be capturing, which a query must not break.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "look after a stream");
  const cudaError_t status = cudaStreamQuery(handle(stream));
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
  } else {
    check(status, "run a forward");
  }
}

void ForwardVerbs::end(const ForwardMemory& memory, void* stream) {
  const CurrentDevice current(ordinal_);
  launch_forward_end(memory, handle(stream));
}

}  // namespace sluice::gpu
