#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "gpu/tuning.hpp"

namespace sluice::gpu {

/// One thread block's work: part of the rows of one task, for up to 16 of its query heads. Lies in pinned memory with
/// its row lists behind it, as 32-bit words:
///   [pages]      first K row of 2^octet_shift octets, as a rule a page; an octet is 8 consecutive rows
///   [pieces, 2]  first K row and number (1..8) of consecutive rows
///   [tokens]     K row of each single token
///   [tokens]     its members, if `has_members`
/// A K row is counted in rows from `base`: page frame f begins at row f * 2 * page_tokens, and the V row of a token
/// lies page_tokens rows behind its K row. A piece takes the place of an octet, and two octets or 16 tokens are a unit.
/// A slice may begin and end inside a page, but not inside an octet.
struct alignas(16) AttendSlice {
  const float* q = nullptr;         ///< [heads, head_dim], device or pinned; null if no row needs it
  const std::byte* base = nullptr;  ///< device or registered host memory, 16-byte aligned
  const float* scores = nullptr;    ///< pinned [tokens, group] from the slice's first token and head on; null: read K
  float* out = nullptr;             ///< the task's, from the slice's first head on
  float* lse = nullptr;
  std::uint32_t heads = 0;
  std::uint32_t group = 0;       ///< row length of `scores`
  std::uint32_t first_head = 0;  ///< of the task's, whose member bit is the lowest that counts
  std::uint32_t page_tokens = 0;
  std::uint32_t octet_shift = 0;
  std::uint32_t pages = 0;
  std::uint32_t octet_skip = 0;   ///< octets of the first page that belong to the slice before
  std::uint32_t page_octets = 0;  ///< octets of pages
  std::uint32_t pieces = 0;
  std::uint32_t tokens = 0;
  std::uint32_t has_members = 0;
  std::uint32_t index = 0;          ///< among the slices that are merged into one result
  std::uint32_t slices = 1;         ///< how many these are
  std::uint32_t first_partial = 0;  ///< their first place in AttendArgs::partials
  std::uint32_t counter = 0;        ///< theirs in AttendArgs::counters

  [[nodiscard]] constexpr std::uint32_t octets() const noexcept { return page_octets + pieces; }
  [[nodiscard]] constexpr std::uint32_t octet_units() const noexcept { return (octets() + 1) / 2; }
  [[nodiscard]] constexpr std::uint32_t units() const noexcept { return octet_units() + (tokens + 15) / 16; }
  [[nodiscard]] constexpr std::uint32_t words() const noexcept {
    return pages + 2 * pieces + (has_members != 0 ? 2 : 1) * tokens;
  }
};
static_assert(sizeof(AttendSlice) == 112);

/// A block reads this much of its slice before it knows how long the lists are: one way over the link, not two.
inline constexpr std::uint32_t kAttendFirstRead = 512;

struct AttendArgs {
  const std::byte* slices = nullptr;  ///< pinned; readable for kAttendFirstRead bytes from each slice's begin
  /// Device scratch: [slices][heads, head_dim] normalised, then [slices][heads] lse to base 2, heads of the variant.
  float* partials = nullptr;
  std::uint32_t* counters = nullptr;  ///< device scratch, zero before and after
  std::uint32_t partial_count = 0;
  float score_scale = 0.f;                      ///< 1 / sqrt(head_dim)
  std::uint16_t offsets[kAttend.max_slices]{};  ///< slice i begins at slices + 16 * offsets[i]
};

/// @throws Error{Errc::device} if the launch is refused.
void launch_attend(const AttendVariant& variant, const AttendArgs& args, std::uint32_t slices, cudaStream_t stream);
/// Loads all variants, so that none is loaded while another kernel spins.
void load_attend_kernels();

}  // namespace sluice::gpu
