#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/tuning.hpp"

namespace sluice::gpu {

/// One task's rows, for up to 16 of its query heads. They are listed in pinned memory, as 32-bit words:
///   [pages]      first K row of 2^octet_shift octets, as a rule a page; an octet is 8 consecutive rows
///   [pieces, 2]  first K row and number (1..8) of consecutive rows
///   [tokens]     K row of each single token
///   [tokens]     its members, if `has_members` and not `corrected`
/// A K row is counted in rows from `base`: page frame f begins at row f * 2 * page_tokens, and the V row of a token
/// lies page_tokens rows behind its K row. Of rows with scales the same, though pages are longer by these; such a job
/// has single tokens alone. A piece takes the place of an octet, and two octets or 16 tokens are a unit.
struct alignas(16) AttendJob {
  const float* q = nullptr;         ///< [heads, head_dim], device or pinned; null if no row needs it
  const std::byte* base = nullptr;  ///< device or registered host memory, 16-byte aligned
  /// Pinned [tokens, group] from the job's first head on; null: read K. Or, if `corrected`, device memory [tokens]: what
  /// is added to the scores of a token, of a job of single tokens alone.
  const float* scores = nullptr;
  float* out = nullptr;             ///< the task's, from the job's first head on
  float* lse = nullptr;
  const std::uint32_t* lists = nullptr;
  std::uint32_t heads = 0;
  std::uint32_t group = 0;       ///< row length of `scores`
  std::uint32_t first_head = 0;  ///< of the task's, whose member bit is the lowest that counts
  std::uint32_t page_tokens = 0;
  std::uint32_t octet_shift = 0;
  std::uint32_t pages = 0;
  std::uint32_t pieces = 0;
  std::uint32_t tokens = 0;
  std::uint32_t has_members = 0;
  std::uint32_t slices = 1;         ///< thread blocks that share the job
  std::uint32_t first_slice = 0;    ///< the block that is the first of them
  std::uint32_t first_partial = 0;  ///< their first place in AttendArgs::partials
  std::uint32_t counter = 0;        ///< theirs in AttendArgs::counters
  std::uint32_t first_unit = 0;     ///< among those of all jobs, where blocks have shares of them
  std::uint32_t corrected = 0;      ///< not 0: see `scores`

  [[nodiscard]] constexpr std::uint32_t page_octets() const noexcept { return pages << octet_shift; }
  [[nodiscard]] constexpr std::uint32_t octets() const noexcept { return page_octets() + pieces; }
  [[nodiscard]] constexpr std::uint32_t octet_units() const noexcept { return (octets() + 1) / 2; }
  [[nodiscard]] constexpr std::uint32_t units() const noexcept { return octet_units() + (tokens + 15) / 16; }
  [[nodiscard]] constexpr std::uint32_t words() const noexcept {
    return pages + 2 * pieces + (has_members != 0 ? 2 : 1) * tokens;
  }
  /// Where the job's units end. One without any counts as one, so that a block writes its result.
  [[nodiscard]] constexpr std::uint32_t end_unit() const noexcept { return first_unit + (units() == 0 ? 1 : units()); }
  /// Where those of the job behind it begin: until a block goes on with that, it could have attended so many more.
  [[nodiscard]] constexpr std::uint32_t next_unit() const noexcept { return end_unit() + kAttend.next_job_units; }
};
static_assert(sizeof(AttendJob) == 112);

/// What one thread block attends: some units of a job. May begin and end inside a page, but not inside an octet.
struct AttendSlice {
  const float* q = nullptr;
  const std::byte* base = nullptr;
  const std::byte* far_base = nullptr;  ///< of rows over the link, where a launch finds its rows itself
  const float* scores = nullptr;  ///< as the job's, from the slice's first token on
  float* out = nullptr;
  float* lse = nullptr;
  const std::uint32_t* lists = nullptr;
  std::uint32_t first_page = 0;  ///< where the slice's part of each list begins, in words of `lists`
  std::uint32_t first_piece = 0;
  std::uint32_t first_token = 0;
  std::uint32_t first_member = 0;
  std::uint32_t heads = 0;
  std::uint32_t group = 0;
  std::uint32_t first_head = 0;
  std::uint32_t page_tokens = 0;
  std::uint32_t octet_shift = 0;
  std::uint32_t octet_skip = 0;  ///< octets of the first page that belong to the slice before
  std::uint32_t pages = 0;
  std::uint32_t page_octets = 0;  ///< octets of pages
  std::uint32_t pieces = 0;
  std::uint32_t tokens = 0;
  std::uint32_t has_members = 0;
  std::uint32_t corrected = 0;
  std::uint32_t index = 0;   ///< among the slices that are merged into one result
  std::uint32_t slices = 1;  ///< how many these are
  std::uint32_t first_partial = 0;
  std::uint32_t counter = 0;

  [[nodiscard]] constexpr std::uint32_t octets() const noexcept { return page_octets + pieces; }
  [[nodiscard]] constexpr std::uint32_t octet_units() const noexcept { return (octets() + 1) / 2; }
  [[nodiscard]] constexpr std::uint32_t units() const noexcept { return octet_units() + (tokens + 15) / 16; }
  [[nodiscard]] constexpr std::uint32_t words() const noexcept {
    return pages + 2 * pieces + (has_members != 0 ? 2 : 1) * tokens;
  }
};

/// Units [begin, end) of a job as its slice `index`.
[[nodiscard]] constexpr AttendSlice cut_units(const AttendJob& job, std::uint32_t index, std::uint32_t begin,
                                              std::uint32_t end) noexcept {
  const auto least = [](std::uint32_t a, std::uint32_t b) { return a < b ? a : b; };
  const auto octet = [&](std::uint32_t unit) { return least(2 * unit, job.octets()); };
  const auto token = [&](std::uint32_t unit) {
    return unit <= job.octet_units() ? 0u : least(16 * (unit - job.octet_units()), job.tokens);
  };
  AttendSlice slice{.q = job.q,
                    .base = job.base,
                    .scores = job.scores,
                    .out = job.out,
                    .lse = job.lse,
                    .lists = job.lists,
                    .heads = job.heads,
                    .group = job.group,
                    .first_head = job.first_head,
                    .page_tokens = job.page_tokens,
                    .octet_shift = job.octet_shift,
                    .tokens = token(end) - token(begin),
                    .has_members = job.has_members,
                    .corrected = job.corrected,
                    .index = index,
                    .slices = job.slices,
                    .first_partial = job.first_partial,
                    .counter = job.counter};
  const std::uint32_t page_end = least(octet(end), job.page_octets());
  if (octet(begin) < page_end) {
    slice.first_page = octet(begin) >> job.octet_shift;
    slice.octet_skip = octet(begin) - (slice.first_page << job.octet_shift);
    slice.page_octets = page_end - octet(begin);
    slice.pages = ((page_end - 1) >> job.octet_shift) + 1 - slice.first_page;
  }
  slice.pieces = octet(end) - octet(begin) - slice.page_octets;
  const std::uint32_t pieces_before = octet(begin) > job.page_octets() ? octet(begin) - job.page_octets() : 0;
  slice.first_piece = job.pages + 2 * pieces_before;
  slice.first_token = job.pages + 2 * job.pieces + token(begin);
  slice.first_member = slice.first_token + job.tokens;
  if (job.scores != nullptr)
    slice.scores = job.scores + std::uint64_t{token(begin)} * (job.corrected != 0 ? 1 : job.group);
  return slice;
}

/// Slices of a job differ by a unit at most. Thread blocks cut for themselves, so that a launch says little per block.
[[nodiscard]] constexpr AttendSlice cut(const AttendJob& job, std::uint32_t index) noexcept {
  const std::uint32_t share = job.units() / job.slices;
  const std::uint32_t rest = job.units() % job.slices;  // The first slices have a unit more.
  const std::uint32_t begin = index * share + (index < rest ? index : rest);
  return cut_units(job, index, begin, begin + share + (index < rest ? 1 : 0));
}

/// The slice of a thread block that has units [block * share, (block + 1) * share) of all jobs', some of the job's
/// among them.
[[nodiscard]] constexpr AttendSlice cut_share(const AttendJob& job, std::uint32_t block, std::uint32_t share) noexcept {
  const auto of_job = [&](std::uint32_t unit) {
    return unit < job.first_unit ? 0 : unit - job.first_unit < job.units() ? unit - job.first_unit : job.units();
  };
  return cut_units(job, block - job.first_slice, of_job(block * share), of_job((block + 1) * share));
}

struct AttendArgs {
  /// A decode step of one sequence: its jobs travel by value, which spares the kernel a trip over the link.
  static constexpr std::uint32_t kInlineJobs = 16;

  const AttendJob* jobs = nullptr;  ///< pinned; null: `inline_jobs`
  /// Device scratch: [slices][heads, head_dim] normalised, then [slices][heads] lse to base 2, heads of the variant.
  float* partials = nullptr;
  std::uint32_t* counters = nullptr;  ///< device scratch, zero before and after
  std::uint32_t partial_count = 0;
  std::uint32_t share = 0;                     ///< units of each block, whichever jobs' they are; 0: it has a slice
  std::uint32_t units = 0;                     ///< where the last job's end, if `share` is not 0
  float score_scale = 0.f;                     ///< AttentionShape::score_scale
  float softcap = 0.f;                         ///< of scores that are computed, see AttentionShape; 0: none
  std::uint16_t job_of[kAttend.max_slices]{};  ///< by thread block, the first if it has several
  AttendJob inline_jobs[kInlineJobs]{};
};
static_assert(sizeof(AttendArgs) <= 4096);

/// @throws Error{Errc::device} if the launch is refused.
void launch_attend(const AttendVariant& variant, const AttendArgs& args, std::uint32_t slices, cudaStream_t stream);
/// Loads all variants, so that none is loaded while another kernel spins.
void load_attend_kernels();
/// As launch_attend, of a variant that is neither scored nor scaled; only here blocks may have shares. Lists and jobs
/// are in pinned memory, and were before the launch.
void launch_attend_ring(const AttendVariant& variant, const AttendArgs& args, std::uint32_t blocks,
                        cudaStream_t stream);
/// Whether the device has shared memory enough for them.
[[nodiscard]] bool load_attend_ring_kernels();

}  // namespace sluice::gpu
