// What each node of the step graph does. Device and link nodes only enqueue; see pipeline.hpp.
#include <algorithm>
#include <thread>

#include "cpu/lent.hpp"
#include "runtime/host_kv.hpp"
#include "runtime/pipeline.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {

using scheduler::NodeKind;

void Pipeline::issue(NodeKind kind) {
  switch (kind) {
    case NodeKind::append: return append();
    case NodeKind::attend_near: return attend_near();
    case NodeKind::rank_pages: return rank_pages();
    case NodeKind::hand_over: return hand_over();
    case NodeKind::write_through: return write_through();
    case NodeKind::select: return select();
    case NodeKind::place: return place();
    case NodeKind::fetch: return fetch();
    case NodeKind::attend_fetched: return attend_fetched();
    case NodeKind::attend_far: return attend_far();
    case NodeKind::progress: return progress();
    case NodeKind::merge: return merge();
    case NodeKind::observe:
    case NodeKind::promote: break;  // Background nodes: post_observe and collect_front.
  }
  throw Error(Errc::unsupported, std::string("node ") + to_string(kind) + " does not run inside a step");
}

void Pipeline::append() {
  auto& tasks = buffers_.append_tasks;
  tasks.clear();
  for (const HeadWork& work : heads_) {
    const std::uint32_t position = work.tokens - 1;
    const std::uint32_t slot = work.pages().slots[position / layout_.page_tokens];
    tasks.push_back({.k = args_->k.row(work.row, work.kv_head),
                     .v = args_->v.row(work.row, work.kv_head),
                     .dtype = args_->k.dtype,
                     .token_stride = 0,
                     .page = parts_.residency.memory() + slot * layout_.page_bytes(),
                     .first_row = position % layout_.page_tokens,
                     .count = 1});
  }
  // Later verbs of the device and, after the hand-over, the CPU read q, k and v in one form, wherever they came from.
  const ToF32Task widened[] = {{args_->q, buffers_.device_q(0, 0)},
                               {args_->q, buffers_.q(0, 0)},
                               {args_->k, buffers_.k(0, 0)},
                               {args_->v, buffers_.v(0, 0)}};
  parts_.device.backend().append_and_widen(tasks, layout_, widened, &executor_.device_stream());
}

void Pipeline::hand_over() {
  // q, k, v, the ranked pages and what is kept of them were written to pinned memory by the nodes before; the flag that
  // follows this node tells the CPU that they are there.
}

void Pipeline::attend_near() {
  // The device is busy with the nodes before this one: time to settle what the background found out. From here on
  // the step's near set is fixed.
  collect_older(deadline_after(parts_.options.timeout));
  // On a GPU there is time until the far part is done, so that listing and queueing may go on beside the selection.
  near_waits_ = selects_ && parts_.options.trace == nullptr && parts_.device.info().own_processor;
  if (!near_waits_) queue_near();
}

void Pipeline::queue_near() {
  near_waits_ = false;
  const std::uint32_t group = shape_.group();
  auto& tasks = buffers_.late.near;
  tasks.clear();
  for (HeadWork& work : heads_) {
    list_near_runs(work);
    const std::uint32_t head = work.kv_head * group;
    tasks.push_back({.q = buffers_.device_q(work.row, head),
                     .kv = {.base = parts_.residency.memory(), .frames = work.near_frames, .layout = layout_},
                     .runs = work.near_runs,
                     .tokens = {},
                     .members = {},
                     .scores = {},
                     .out = buffers_.near(work.row, head)});
  }
  parts_.device.backend().attend(tasks, shape_, &executor_.device_stream());
}

void Pipeline::write_through() {
  auto& tasks = buffers_.write_tasks;
  tasks.clear();
  for (const HeadWork& work : heads_) {
    const std::uint32_t position = work.tokens - 1;
    tasks.push_back({.k = reinterpret_cast<const std::byte*>(buffers_.k(work.row, work.kv_head)),
                     .v = reinterpret_cast<const std::byte*>(buffers_.v(work.row, work.kv_head)),
                     .dtype = DType::f32,
                     .token_stride = 0,
                     .page = parts_.pool.frame(work.pages().frames[position / layout_.page_tokens]),
                     .first_row = position % layout_.page_tokens,
                     .count = 1});
  }
  parts_.host.append(tasks, layout_, nullptr);
}

std::span<const float> Pipeline::page_scores(const HeadWork& work) const {
  if (work.scored_pages == 0) return {};
  const std::uint32_t group = shape_.group();
  return {buffers_.host_page_scores(work.row, work.kv_head * group), std::size_t{work.scored_pages} * group};
}

void Pipeline::select() {
  const std::uint32_t group = shape_.group();
  const auto caller = std::this_thread::get_id();
  parts_.workers.parallel_for(static_cast<std::uint32_t>(heads_.size()), [this, caller, group](std::uint32_t i) {
    // By the caller, beside whom the workers have begun: a worker that is lost must not come back to a stream.
    if (std::this_thread::get_id() == caller && near_waits_) queue_near();
    HeadWork& work = heads_[i];
    if (work.progressive) return;  // Nothing is far but what the device will visit.
    const std::uint32_t head = work.kv_head * group;
    const cpu::Lent<HostKv> reader(parts_.workers, parts_.host, shape_, parts_.pool, work.pages());
    if (estimates(work.sequence->spec, layer_)) reader->estimate_from(copies_.host(), work.layer->copied_pages);
    const std::size_t ranked = std::size_t{work.ranked} * group;
    const std::size_t masks = std::size_t{work.mask_words()} * group;
    const scheduler::HeadContext context{
        .kv_head = work.kv_head,
        .tokens = work.tokens,
        .q = buffers_.q(work.row, head),
        .ranked_pages = ranked == 0
                            ? std::span<const std::uint32_t>{}
                            : std::span<const std::uint32_t>(buffers_.ranked(work.row, head, work.ranked), ranked),
        .page_scores = page_scores(work),
        .kept = masks == 0 ? std::span<const std::uint32_t>{}
                           : std::span<const std::uint32_t>(buffers_.kept(work.row, head, work.mask_words()), masks),
        .near = &work.near,
        .kv = reader.get(),
        .defer_scores = parts_.device.info().own_processor};
    work.layer->policy->select(context, work.selected, work.bypass, work.counters);
  });
  if (near_waits_) queue_near();  // The workers were through before the caller began.
}

void Pipeline::place() {
  for (HeadWork& work : heads_) {
    scheduler::place(work.selected, shape_.group(), layout_, parts_.options.placement, parts_.rates,
                     static_cast<std::uint32_t>(heads_.size()), buffers_.max_pages(), work.placement);
  }
}

void Pipeline::attend_far() {
  const std::uint32_t group = shape_.group();
  auto& tasks = buffers_.far_tasks;
  tasks.clear();
  for (HeadWork& work : heads_) {
    const std::uint32_t head = work.kv_head * group;
    const SelectionRow& row = work.placement.far;
    // A history that is fed in every step learns there; only between feedings does it want what was attended.
    const PolicySpec& spec = work.sequence->spec;
    const bool deferred = row.scores.empty() && spec.uses(Source::history) && spec.history.observe_every != 1;
    work.seen.resize(deferred ? row.tokens.size() * group : 0);
    tasks.push_back({.q = buffers_.q(work.row, head),
                     .kv = far_view(parts_.pool, work.pages()),
                     .runs = row.runs,
                     .tokens = row.tokens,
                     .members = row.members,
                     .scores = row.scores,
                     .seen = deferred ? work.seen.data() : nullptr,
                     .out = buffers_.far(work.row, head)});
  }
  parts_.host.attend(tasks, shape_, nullptr);
  for (const HeadWork& work : heads_) {
    for (std::uint32_t h = 0; h < group; ++h) {
      if ((work.bypass.heads >> h & 1u) == 0) continue;
      const Partial far = buffers_.far(work.row, work.kv_head * group + h);
      std::copy_n(work.bypass.out.data() + std::size_t{h} * shape_.head_dim, shape_.head_dim, far.out);
      *far.lse = work.bypass.lse[h];
    }
  }
}

void Pipeline::progress() {
  page_scores_.clear();
  for (HeadWork& work : heads_) {
    page_scores_.push_back(page_scores(work));
    if (!work.audited || work.near.pages.empty()) continue;
    // Pages that the device visits take slots of pages that were attended near; the audit wants to know those.
    work.attended_near.assign(work.near.pages.begin(), work.near.pages.end());
    work.near.pages = work.attended_near;
  }
  progressive_.run(heads_, page_scores_);
  executor_.add_wait(progressive_.waited());
}

void Pipeline::merge() {
  const std::uint32_t group = shape_.group();
  auto& tasks = buffers_.late.merges;
  tasks.clear();
  for (HeadWork& work : heads_) {
    const std::uint32_t head = work.kv_head * group;
    work.parts.push_back(buffers_.near(work.row, head));
    if (selects_) work.parts.push_back(buffers_.far(work.row, head));
    tasks.push_back({.parts = work.parts, .out = args_->out.row(work.row, head), .lse = nullptr});
  }
  parts_.device.backend().merge(tasks, shape_, args_->out.dtype, &executor_.device_stream());
  if (audited_) merge_for_audit();
}

/// Once more, to where the CPU can read it.
void Pipeline::merge_for_audit() {
  auto& tasks = buffers_.late.audits;
  tasks.clear();
  for (HeadWork& work : heads_) {
    const std::uint32_t head = work.kv_head * shape_.group();
    tasks.push_back({.parts = work.parts,
                     .out = reinterpret_cast<std::byte*>(buffers_.merged_out(work.row, head)),
                     .lse = buffers_.merged_lse(work.row, head)});
  }
  parts_.device.backend().merge(tasks, shape_, DType::f32, &executor_.device_stream());
}

}  // namespace sluice::runtime
