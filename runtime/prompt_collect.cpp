// The end of a pass of the prompt phase: waiting for it, booking it, and what it leaves behind.
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "runtime/prompt.hpp"
#include "runtime/wait.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {
Prompt::Pass& Prompt::next() {
  newest_ ^= 1;
  collect(passes_[newest_]);
  if (passes_[newest_ ^ 1].spread) collect(passes_[newest_ ^ 1]);
  Pass& pass = passes_[newest_];
  pass.spread = false;
  pass.legacies.clear();
  pass.appends.clear();
  pass.frames.clear();
  pass.prefills.clear();
  pass.selects.clear();
  pass.sum_tasks.clear();
  pass.digests.clear();
  pass.quantized.clear();
  pass.device_marks.clear();
  pass.flush_marks.clear();
  return pass;
}

void Prompt::collect(Pass& pass) {
  if (!pass.queued) return;
  const Clock::time_point asked = Clock::now();
  await(pass.device_marks, "prompt attention");
  await(pass.flush_marks, "write-through of a prompt chunk");
  pass.queued = false;
  for (const auto& [marks, what] : {std::pair{&pass.flush_marks, "write-through of a prompt chunk"},
                                    std::pair{&pass.device_marks, "prompt attention"}}) {
    if (const std::string failure = marks->failure(); !failure.empty()) fail(pass, std::string(what) + " failed: " + failure);
  }
  finish(pass, asked);
}

void Prompt::fail(const Pass& pass, const std::string& reason) {
  if (running_ && pass.call == call_) throw Error(Errc::device, reason + "; the call may be repeated");
  // Its call has returned. What came after it may have read what never arrived, so that it cannot be made good.
  std::string lost;
  for (const Legacy& legacy : pass.legacies) {
    if (legacy.sequence->lost.empty()) legacy.sequence->lost = reason;
    lost += (lost.empty() ? "" : ", ") + std::to_string(legacy.sequence->id.value);
  }
  throw Error(Errc::device, reason + "; it belonged to an ordered prefill of sequence " + lost +
                                ", which must be ended; a call about other sequences may be repeated");
}

void Prompt::await(Marks& marks, const char* what) {
  if (wait_until([&] { return marks.passed(); }, deadline_after(parts_.options.timeout))) return;
  try {
    // Whatever is queued still refers to the caller's tensors; give it one more time-out to finish.
    parts_.device_stream.synchronize(deadline_after(parts_.options.timeout));
  } catch (const Error&) {  // That it came too late is the news.
  }
  throw Error(Errc::timeout, std::string(what) + " did not finish within " +
                                 std::to_string(parts_.options.timeout.count()) +
                                 " ms; raise the timeout or prefill in smaller chunks");
}

void Prompt::finish(Pass& pass, Clock::time_point asked) {
  PromptStats times;
  pass.device_marks.add_to(times);
  pass.flush_marks.add_to(times);
  const Legacy& any = pass.legacies.front();  // A pass is of one layer.
  const auto layer = static_cast<std::uint32_t>(any.layer - any.sequence->layers.data());
  pass.device_marks.trace(parts_.options.trace, Lane::device, layer, "prompt append");
  pass.flush_marks.trace(parts_.options.trace, Lane::link, layer);
  const Clock::time_point needed = std::max(asked, pass.device_marks.last().time());
  const auto waited = std::chrono::nanoseconds(pass.flush_marks.last().time() - needed).count();
  times.flush_wait_ns += static_cast<std::uint64_t>(std::max<std::int64_t>(waited, 0));
  for (const Legacy& legacy : pass.legacies) {
    if (!legacy.sequence->lost.empty()) continue;  // It may have attended, and built on, what never arrived.
    Receipt receipt{.legacy = legacy, .stats = std::exchange(times, {}), .sums = {}};
    if (legacy.sparse) count_choices(pass, legacy, receipt.stats);
    if (legacy.attended) ++(legacy.sparse ? receipt.stats.sparse_chunks : receipt.stats.dense_chunks);
    if (legacy.sums != 0) {
      const auto* const first = reinterpret_cast<const float*>(pass.sums->data()) + legacy.sums_at;
      receipt.sums.assign(first, first + legacy.sums);
    }
    if (legacy.last_q_rows != 0) keep_last_q(pass, legacy);
    if (running_ && pass.call == call_) {
      receipts_.push_back(std::move(receipt));
    } else {
      book(receipt);
    }
  }
}

void Prompt::book(Receipt& receipt) {
  const Legacy& legacy = receipt.legacy;
  Stats& stats = legacy.sequence->stats;
  stats.d2h_bytes += 2 * layout_.row_bytes() * shape_.kv_heads * legacy.tokens;
  stats.h2d_bytes += legacy.loaded_bytes;
  stats.prompt.merge(receipt.stats);
  if (legacy.indexed) {
    parts_.heir.indexed(*legacy.sequence, *legacy.layer, legacy.prefix, legacy.end / layout_.page_tokens);
  }
  if (legacy.complete) parts_.heir.complete(*legacy.sequence, *legacy.layer, legacy.end, std::move(receipt.sums));
}

/// The newest queries that the policy wants, some of them of earlier chunks if this one was short. What was kept before
/// may lie apart from these, or reach into them if this is a second attempt.
void Prompt::keep_last_q(const Pass& pass, const Legacy& legacy) {
  LayerState& layer = *legacy.layer;
  const std::uint64_t row = std::uint64_t{shape_.q_heads} * shape_.head_dim;
  const std::uint32_t begin = legacy.end - legacy.last_q_rows;
  const std::uint32_t old_begin = layer.last_q_end - layer.last_q_rows;
  const std::uint32_t before = layer.last_q_end < begin || old_begin > begin ? 0 : begin - old_begin;
  const std::uint32_t kept = std::min(before, scheduler::prompt_queries(legacy.sequence->spec) - legacy.last_q_rows);
  std::vector<float> rows(std::uint64_t{kept + legacy.last_q_rows} * row);
  const auto old = layer.last_q.begin() + static_cast<std::ptrdiff_t>((before - kept) * row);
  std::copy_n(old, kept * row, rows.begin());
  const auto* const landed = reinterpret_cast<const float*>(pass.last_q->data()) + legacy.last_q_at;
  std::copy_n(landed, legacy.last_q_rows * row, rows.begin() + static_cast<std::ptrdiff_t>(kept * row));
  layer.last_q = std::move(rows);
  layer.last_q_rows = kept + legacy.last_q_rows;
  layer.last_q_end = legacy.end;
}

void Prompt::count_choices(const Pass& pass, const Legacy& legacy, PromptStats& stats) {
  const auto* const choices = reinterpret_cast<const PrefillChoice*>(pass.choices->data()) + legacy.choices;
  std::uint64_t kept = 0;
  std::uint64_t causal = 0;
  for (std::uint32_t head = 0; head < shape_.q_heads; ++head) {
    kept += choices[head].kept;
    causal += choices[head].causal;
  }
  stats.kept_blocks += kept;
  stats.causal_blocks += causal;
  legacy.sequence->bets.settle(kept, causal, shape_.q_heads, legacy.layer->prefill_rest);
}

/// After an exception: what was queued refers to the pass, so it has to finish, however it ends.
bool Prompt::abandon(Pass& pass) noexcept {
  pass.queued = false;
  try {
    parts_.link.stream().record(*pass.loaded);  // It may have been queued that far.
    parts_.device_stream.wait(*pass.loaded);
    pass.device_marks.mark(parts_.device_stream);
    pass.flush_marks.mark(*flush_);
    const Deadline deadline = deadline_after(parts_.options.timeout);
    return wait_until([&] { return pass.device_marks.passed() && pass.flush_marks.passed(); }, deadline);
  } catch (...) {  // The device refuses even that; the error that brought us here says more.
    return false;
  }
}

/// The passes of the call under way.
bool Prompt::abandon_call() noexcept {
  bool quiet = true;
  for (Pass& pass : passes_) {
    if (pass.queued && pass.call == call_) quiet = abandon(pass) && quiet;
  }
  return quiet;
}

}  // namespace sluice::runtime
