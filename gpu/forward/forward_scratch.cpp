#include "gpu/forward/forward_scratch.hpp"

#include <algorithm>
#include <string>

#include "gpu/device/current_device.hpp"
#include "gpu/forward/forward_clusters.hpp"
#include "gpu/forward/forward_verbs.hpp"
#include "gpu/kernels/index/int4.hpp"
#include "gpu/stages/shapes.hpp"
#include "sluice/error.hpp"
#include "sluice/step/carver.hpp"

namespace sluice::gpu {
namespace {

/// By what scratch memory is laid out, whatever the bucket: rows that choose one by one.
ForwardMemory one_by_one(const ForwardMemory& memory) {
  ForwardMemory rows = memory;
  rows.shape.q_heads /= memory.drafts;
  rows.drafts = 1;
  return rows;
}

/// Near rows of a job at most.
std::uint64_t near_room(const ForwardMemory& memory) {
  return std::min<std::uint64_t>(memory.list_room(), std::uint64_t{memory.near_pages} * memory.layout.page_tokens);
}

std::uint32_t head_blocks(const ForwardMemory& memory) {
  return static_cast<std::uint32_t>(div_up(memory.shape.group(), variant_of(memory).heads()));
}

/// Jobs of `rows` rows that choose.
std::uint32_t jobs_of(const ForwardMemory& memory, std::uint32_t rows) {
  return rows * memory.shape.kv_heads * head_blocks(memory);
}

/// Rows that a job may fetch, and words that list them.
std::uint64_t fetch_room(const ForwardMemory& memory) {
  return memory.fetches_chosen ? memory.largest.max_tokens : fetched_rows(memory.list_room(), memory.fetch_share);
}
std::uint64_t fetch_words(const ForwardMemory& memory) {
  return memory.fetches_chosen ? memory.chosen_room() : fetched_rows(memory.list_room(), memory.fetch_share);
}
/// Slices that a launch has at most: all of one job's are merged in shared memory.
std::uint32_t most_slices(const ForwardMemory& memory) { return kAttend.max_slices / variant_of(memory).head_tiles; }

/// A job's slices are a fixed number, so that its grid is: as many as the machine runs at once, and enough for each
/// slice's list to fit shared memory; 0 if a launch may not have as many.
std::uint32_t slices_of(const ForwardMemory& memory, std::uint32_t jobs, std::uint32_t multiprocessors,
                        std::uint64_t rows, std::uint64_t words) {
  constexpr std::uint32_t kUnit = 16;
  if (jobs == 0) return 1;
  const std::uint64_t wanted = multiprocessors * blocks_per_sm(variant_of(memory)) / jobs;
  const std::uint64_t useful = div_up(rows, kUnit * kAttend.min_slice_units);
  const std::uint64_t least = div_up(words, kAttend.stage_words - 4 * kUnit);
  const std::uint64_t slices = std::max({std::min(wanted, useful), least, std::uint64_t{1}});
  return slices <= most_slices(memory) ? static_cast<std::uint32_t>(slices) : 0;
}
std::uint32_t near_slices(const ForwardMemory& memory, std::uint32_t jobs, std::uint32_t multiprocessors) {
  return slices_of(memory, jobs, multiprocessors, near_room(memory), near_room(memory));
}
std::uint32_t fetch_slices(const ForwardMemory& memory, std::uint32_t jobs, std::uint32_t multiprocessors) {
  return slices_of(memory, jobs, multiprocessors, fetch_room(memory), fetch_words(memory));
}

/// Jobs that are fetched at once of lists that the CPU chooses: the link is busy with them while it chooses for others,
/// where there are enough of these to make up for another launch or two. Long sequences leave room for fewer, see
/// most_slices.
std::uint32_t chosen_at_once(const ForwardScratch& scratch) {
  constexpr std::uint32_t kTurns = 4;
  constexpr std::uint32_t kLeastLists = 4;
  const std::uint32_t lists = scratch.job_count / scratch.head_blocks;
  return std::max(static_cast<std::uint32_t>(div_up(lists, kTurns)), kLeastLists) * scratch.head_blocks;
}

}  // namespace

AttendVariant variant_of(const ForwardMemory& memory) { return attend_variant(memory.shape, memory.layout, false); }
AttendVariant fetch_variant(const ForwardMemory& memory) {
  AttendVariant variant = variant_of(memory);
  variant.scaled = memory.far_layout.scaled();
  return variant;
}

std::uint32_t whole_slices(const ForwardMemory& memory, std::uint32_t jobs, std::uint32_t multiprocessors,
                           std::uint32_t tokens) {
  return slices_of(memory, jobs, multiprocessors, tokens, tokens);
}

bool attends_together(const ForwardMemory& memory, const ForwardScratch& scratch) {
  return memory.fetches() && !memory.fetches_chosen && !memory.far_layout.scaled() &&
         scratch.job_count * (scratch.slices + scratch.fetch_slices) <= most_slices(memory);
}

ForwardVerbs::Scratch ForwardVerbs::scratch_of(const ForwardMemory& memory, std::byte* from) const {
  const Bucket& largest = memory.largest;
  const ForwardMemory rows = one_by_one(memory);
  const std::uint32_t heads = largest.decode_rows * memory.shape.kv_heads;
  const std::uint64_t q_heads = std::uint64_t{largest.decode_rows} * rows.shape.q_heads;
  Carver carver(from);
  Scratch scratch;
  ForwardScratch& choice = scratch.choice;
  choice.head_blocks = head_blocks(memory);
  choice.block_heads = variant_of(memory).heads();
  choice.multiprocessors = multiprocessors_;
  choice.split = limits_.split;
  choice.link_rows = link_rows_;
  choice.job_count = jobs_of(memory, memory.bucket.decode_rows);
  choice.slices = near_slices(memory, choice.job_count, multiprocessors_);
  if (memory.fetches()) choice.fetch_slices = fetch_slices(memory, choice.job_count, multiprocessors_);
  const auto at_once = [&](std::uint32_t slices) { return std::max(1u, most_slices(memory) / std::max(1u, slices)); };
  choice.jobs_at_once = at_once(choice.slices);
  choice.fetches_at_once = at_once(choice.fetch_slices);
  if (memory.fetches_chosen) choice.fetches_at_once = std::min(choice.fetches_at_once, chosen_at_once(choice));
  if (attends_together(memory, choice)) choice.first_fetch_slice = choice.job_count * choice.slices;
  const std::uint32_t jobs = jobs_of(rows, largest.decode_rows) * (memory.may_fetch() ? 2 : 1);
  choice.score_tasks = carver.take<ScoreInt4Task>(heads);
  if (largest.pages) {
    choice.page_tasks = carver.take<ScorePagesTask>(heads);
    choice.page_rows = carver.take<TopKRow>(q_heads);
    choice.top_k_rows = carver.take<TopKRow>(q_heads);
  }
  if (largest.unbounded) choice.top_p_rows = carver.take<TopPRow>(q_heads);
  if (memory.takes_pages(largest)) {
    choice.page_choices = carver.take<ChoosePagesTask>(heads);
    choice.page_room =
        carver.take<std::uint32_t>(heads * ChoosePagesTask::scratch_words(rows.shape.group(), memory.max_pages));
  }
  if (memory.cluster_slots != 0) place_clusters(rows, carver, choice);
  if (jobs != 0 && largest.top_k && memory.max_picks != 0) {
    // More than the margin of a head that is hard to foresee; of many that are chosen less, and no more than the split
    // kernel has shared memory for.
    constexpr std::uint32_t kManyCandidates = 16'384;
    constexpr std::uint32_t kMostCandidates = 2 * kManyCandidates;
    choice.foresight.room = std::max(std::clamp(8 * memory.max_picks, 512u, kManyCandidates),
                                     std::min(3 * memory.max_picks, kMostCandidates));
    choice.foresight.bounds = carver.take<HeadBound>(memory.shape.layers * q_heads);
    choice.foresight.counts = carver.take<std::uint32_t>(q_heads);
    choice.foresight.candidates = carver.take<Candidate>(q_heads * choice.foresight.room);
    choice.foresight.head_dim = memory.shape.head_dim;
    choice.foresight.score_scale = memory.shape.score_scale();
    choice.foresight.centers = carver.take<float>(std::uint64_t{memory.shape.layers} * heads * memory.shape.head_dim);
  }
  choice.jobs = carver.take<AttendJob>(jobs);
  choice.counters = carver.take<std::uint32_t>(jobs);
  if (jobs != 0)
    choice.partials =
        carver.take<float>(std::uint64_t{kAttend.max_slices} * variant_of(rows).heads() * (memory.shape.head_dim + 1));
  choice.linked = carver.take<std::uint32_t>(heads);
  choice.far_rows = carver.take<std::uint32_t>(std::uint64_t{heads} * rows.list_room());
  if (memory.may_fetch()) choice.fetched = carver.take<std::uint32_t>(std::uint64_t{heads} * rows.list_room());
  choice.far_corrections = carver.take<float>(std::uint64_t{heads} * rows.draw_room());
  if (largest.prefills != 0) {
    const std::uint32_t items = largest.prefills * memory.shape.kv_heads;
    const std::uint32_t pages = memory.prefill_window / memory.layout.page_tokens;
    const std::uint64_t prompt_heads = std::uint64_t{largest.rows()} * rows.shape.q_heads;
    // Whichever kernels a layer's queries will want.
    scratch.prompt.items =
        carver.take<PrefillItem>(std::uint64_t{items} * (memory.sparse_prefill ? rows.shape.group() : 1));
    scratch.prompt.frames = carver.take<std::uint32_t>(std::uint64_t{items} * pages);
    scratch.prompt.lse = carver.take<float>(prompt_heads);
    scratch.prompt.so_far = carver.take<float>(prompt_heads * memory.shape.head_dim);
    if (memory.sparse_prefill) place_choices(rows, items, carver, scratch.prompt);
    scratch.prompt.pages = carver.take<std::byte>(std::uint64_t{items} * pages * memory.layout.page_bytes());
  }
  scratch.bytes = carver.used();
  return scratch;
}

ForwardScratch ForwardVerbs::choice_of(const ForwardMemory& memory) const {
  return scratch_of(memory, memory.scratch).choice;
}

std::uint64_t ForwardVerbs::scratch_bytes(const ForwardMemory& memory) const {
  const CurrentDevice current(ordinal_);
  check_supported("a forward", memory.shape, memory.layout);
  if (memory.cluster_slots != 0) check_clusters(memory);
  if (memory.sparse_prefill) check_tuned("sparse prompts", memory.shape.head_dim, "use PrefillMode::full");
  const auto refuse = [](const std::string& what, std::uint64_t have, std::uint64_t most) {
    throw Error(Errc::unsupported, "a forward with " + what + " " + std::to_string(have) +
                                       " does not fit this device; at most " + std::to_string(most));
  };
  if (memory.sparse_prefill && memory.largest.max_tokens > kFlexMaxKeys)
    refuse("max_tokens of sparse prompts", memory.largest.max_tokens, kFlexMaxKeys);
  if (memory.largest.max_tokens > limits_.split.max_tokens)
    refuse("max_tokens", memory.largest.max_tokens, limits_.split.max_tokens);
  if (memory.dense_tokens != 0 &&
      whole_slices(memory, jobs_of(memory, memory.largest.decode_rows), multiprocessors_, memory.dense_tokens) == 0)
    refuse("dense_tokens", memory.dense_tokens, std::uint64_t{most_slices(memory)} * (kAttend.stage_words - 64));
  for (std::uint32_t drafts = 1; drafts <= memory.largest.drafts; ++drafts) {
    const ForwardMemory teams = memory.teams(drafts);
    const std::uint32_t jobs = jobs_of(teams, memory.largest.decode_rows / drafts);
    const std::uint64_t most = std::uint64_t{most_slices(teams)} * (kAttend.stage_words - 64);
    if (near_slices(teams, jobs, multiprocessors_) == 0) refuse("near tokens of a row", near_room(teams), most);
    if (memory.may_fetch() && fetch_slices(teams, jobs, multiprocessors_) == 0)
      refuse("tokens and members of a row", fetch_words(teams), most);
  }
  const std::uint32_t items = memory.largest.prefills * memory.shape.kv_heads;
  constexpr std::uint32_t kMaxItems = 65'535;  // Of a grid's second and third dimension.
  const std::uint32_t heads = memory.sparse_prefill ? memory.shape.q_heads : memory.shape.kv_heads;
  if (memory.largest.prefills > kMaxItems / heads) refuse("prefills", memory.largest.prefills, kMaxItems / heads);
  constexpr std::uint64_t kMostFrames = std::uint64_t{1} << 31;
  const std::uint64_t frames = std::uint64_t{items} * (memory.prefill_window / memory.layout.page_tokens);
  if (frames > kMostFrames)
    refuse("prefills, with this prefill_window,", memory.largest.prefills,
           kMostFrames * memory.largest.prefills / frames);
  return scratch_of(memory, nullptr).bytes;
}

}  // namespace sluice::gpu
