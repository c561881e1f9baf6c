#pragma once

#include <cstdint>
#include <vector>

#include "sluice/page.hpp"
#include "sluice/units.hpp"

namespace sluice::runtime {

/// Where a page is, beyond its host frame, which every page has from its first token to the end of its
/// sequence. The host copy holds every token of every finished step, so near is a cache and eviction is free.
///
///              promote (copy queued)        copy done
///        far ------------------------> promoting ----> near
///         ^                                |            |
///         |           copy failed          |   evict    |
///         +--------------------------------+------------+
///
///   far        host only
///   promoting  a copy into a slot is queued; the slot is pinned and must not be read
///   near       host and slot agree, except that the open page's newest row may reach the slot first
enum class Residence : std::uint8_t { far, promoting, near };

/// Pages of one (sequence, layer, KV head), by logical page. Struct of arrays, because kernels take
/// `frames` and `slots` as they are.
struct HeadPages {
  std::vector<PageRef> refs;          ///< [pages] host frames with their generations
  std::vector<std::uint32_t> frames;  ///< [pages] refs[i].frame
  std::vector<std::uint32_t> slots;   ///< [pages] near slot, kNone unless promoting or near
  std::vector<Residence> residence;   ///< [pages]
  std::vector<std::uint8_t> near;     ///< [pages] 1 while residence is near, as NearSet wants it
  std::vector<std::uint32_t> held;    ///< pages that hold a slot, in no order
  std::vector<std::uint32_t> place;   ///< [pages] index in `held`; meaningless while far
  std::vector<std::uint8_t> is_forced;  ///< [pages] 1: pinned near (sinks, recent window, open page)
  std::vector<std::uint32_t> forced;    ///< those pages, in no order
  std::uint32_t needed_visits = 0;      ///< pages that progressive attention needed in the last step

  /// Near pages in no order, as attention takes them: run i is over page i of a view whose frames are near_slots. Valid
  /// if `listed`: no page came or went since they were listed.
  std::vector<PageRun> near_runs;
  std::vector<std::uint32_t> near_slots;
  std::uint32_t open_run = 0;  ///< the open page's run, the only one that is not a whole page
  bool listed = false;

  [[nodiscard]] std::uint32_t pages() const noexcept { return static_cast<std::uint32_t>(refs.size()); }
  /// Room for so many pages more, here and wherever they may be listed; whatever else is done with them cannot fail.
  void make_room(std::size_t more);
  /// After make_room.
  void push(PageRef ref) noexcept;
  /// Forgets the last page, which must be far; returns its reference for release.
  PageRef pop();
  /// far -> promoting.
  void promote(std::uint32_t page, std::uint32_t slot) noexcept;
  /// promoting -> near.
  void arrive(std::uint32_t page) noexcept;
  /// promoting | near -> far; returns the slot that it gave up.
  std::uint32_t leave(std::uint32_t page) noexcept;
};

}  // namespace sluice::runtime
