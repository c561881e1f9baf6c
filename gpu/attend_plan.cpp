#include "gpu/attend_plan.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::gpu {
namespace {

/// Where a slice's octets and tokens lie in its task's lists.
struct Cut {
  std::uint32_t octet_begin = 0;
  std::uint32_t octet_end = 0;
  std::uint32_t token_begin = 0;
  std::uint32_t token_end = 0;
};

Cut cut(const AttendPlan::Task& task, std::uint32_t index) noexcept {
  const std::uint64_t units = task.units();
  const auto begin = static_cast<std::uint32_t>(units * index / task.slices);
  const auto end = static_cast<std::uint32_t>(units * (index + 1) / task.slices);
  const std::uint32_t tokens_from = task.octet_units();
  const auto token = [&](std::uint32_t unit) {
    return unit <= tokens_from ? 0u : std::min(16 * (unit - tokens_from), task.token_count);
  };
  return {.octet_begin = std::min(2 * begin, task.octets()),
          .octet_end = std::min(2 * end, task.octets()),
          .token_begin = token(begin),
          .token_end = token(end)};
}

/// Units of a task that fit a slice's row lists in shared memory, whichever units they are.
std::uint32_t largest_slice(const AttendPlan::Task& task) noexcept {
  const std::uint32_t words = task.token_count != 0   ? (task.task->members.empty() ? 16 : 32)
                              : task.piece_count != 0 ? 4
                                                      : 2;
  return (kAttend.stage_words - 8) / words;  // Less what the ends of lists and pages round up.
}

/// The K row of each token; the tokens are ascending, so the page is looked up once per page.
/// Returns the largest number that came up, which fits 32 bits if all did.
std::uint64_t list_tokens(const AttendTask& task, std::vector<std::uint32_t>& rows) {
  const std::uint32_t page_tokens = task.kv.layout.page_tokens;
  std::uint64_t largest = 0;
  std::uint64_t page_begin = 0;
  std::uint64_t page_end = 0;
  std::uint64_t page_row = 0;
  for (const std::uint32_t token : task.tokens) {
    if (token < page_begin || token >= page_end) {
      const std::uint32_t page = token / page_tokens;
      page_begin = std::uint64_t{page} * page_tokens;
      page_end = page_begin + page_tokens;
      page_row = std::uint64_t{task.kv.frames[page]} * 2 * page_tokens;
      largest = std::max(largest, page_row);
    }
    rows.push_back(static_cast<std::uint32_t>(page_row + token - page_begin));
  }
  return largest;
}

}  // namespace

AttendPlan::Task AttendPlan::list(const AttendTask& task) {
  const std::uint32_t page_tokens = task.kv.layout.page_tokens;
  const std::uint32_t octets = page_tokens / 8;
  const bool one_word = std::has_single_bit(octets);  // Otherwise a page is listed octet by octet.
  Task listed{.task = &task,
              .pages = pages_.size(),
              .pieces = pieces_.size(),
              .tokens = tokens_.size(),
              .octet_shift = one_word ? static_cast<std::uint32_t>(std::countr_zero(octets)) : 0};
  std::uint64_t largest = 0;
  for (const PageRun& run : task.runs) {
    const std::uint64_t row = std::uint64_t{task.kv.frames[run.page]} * 2 * page_tokens;
    largest = std::max(largest, row);
    if (run.begin == 0 && run.end == page_tokens) {
      for (std::uint32_t i = 0; i < (one_word ? 1 : octets); ++i) {
        pages_.push_back(static_cast<std::uint32_t>(row + 8 * i));
      }
      continue;
    }
    for (std::uint32_t begin = run.begin; begin < run.end; begin += 8) {
      pieces_.push_back(static_cast<std::uint32_t>(row + begin));
      pieces_.push_back(std::min(8u, run.end - begin));
    }
  }
  largest = std::max(largest, list_tokens(task, tokens_));
  if (largest + 2 * page_tokens > 0xffff'ffffu) {
    throw Error(Errc::invalid_argument,
                "attend: a selected page has no frame, or lies more than 2^32 rows behind the base of its memory; "
                "select only pages that are in this memory, and pass its parts with bases of their own");
  }
  listed.page_count = static_cast<std::uint32_t>(pages_.size() - listed.pages);
  listed.piece_count = static_cast<std::uint32_t>((pieces_.size() - listed.pieces) / 2);
  listed.token_count = static_cast<std::uint32_t>(tokens_.size() - listed.tokens);
  return listed;
}

std::uint64_t AttendPlan::list_bytes(const Task& task) const noexcept {
  const std::uint64_t token_words = std::uint64_t{task.token_count} * (task.task->members.empty() ? 1 : 2);
  const std::uint64_t words = task.page_count + 2 * std::uint64_t{task.piece_count} + token_words;
  return 4 * (words * head_blocks_ + task.task->scores.size());
}

void AttendPlan::choose_groups(std::uint64_t limit_bytes) {
  std::uint64_t total = 0;
  for (const Task& task : tasks_) total += list_bytes(task);
  const std::uint64_t limit = limit_bytes - limit_bytes / 8;  // Less what the slices' headers take.
  const std::uint64_t groups =
      std::max({std::uint64_t{1}, div_up(total, limit), div_up(tasks_.size() * head_blocks_, kAttend.max_slices)});
  const std::uint64_t share_bytes = std::max<std::uint64_t>(1, div_up(total, groups));
  const std::uint64_t share_tasks = div_up(tasks_.size(), groups);
  group_ends_.clear();
  std::size_t begin = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < tasks_.size(); ++i) {
    const std::uint64_t more = list_bytes(tasks_[i]);
    if (i != begin && (bytes + more > limit || (groups > 1 && bytes >= share_bytes) || i - begin >= share_tasks * 2)) {
      group_ends_.push_back(i);
      begin = i;
      bytes = 0;
    }
    bytes += more;
  }
  group_ends_.push_back(tasks_.size());
}

bool AttendPlan::fit(const Task& task) const noexcept {
  if (task.units() / task.slices < largest_slice(task)) return true;
  for (std::uint32_t i = 0; i < task.slices; ++i) {
    if (slice(task, i).words() > kAttend.stage_words) return false;
  }
  return true;
}

void AttendPlan::choose_slices(std::span<Task> tasks, std::uint32_t blocks) const {
  std::uint64_t units = 0;
  std::uint32_t longest = 0;
  for (const Task& task : tasks) {
    units += std::uint64_t{task.units()} * head_blocks_;
    longest = std::max(longest, task.units());
  }
  // One wave of equal slices if there are fewer tasks than blocks, several to even out the rest otherwise.
  const std::uint64_t target = tasks.size() * head_blocks_ <= blocks ? blocks : std::uint64_t{kAttend.waves} * blocks;
  const auto count = [&](std::uint64_t each) {
    std::uint64_t slices = 0;
    for (const Task& task : tasks) slices += std::max<std::uint64_t>(1, div_up(task.units(), each)) * head_blocks_;
    return slices;
  };
  std::uint64_t each = std::max<std::uint64_t>(kAttend.min_slice_units, div_up(units, target));
  while (each < longest && count(each) > target) each += div_up(each, 64);
  for (Task& task : tasks) {
    task.slices = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, div_up(task.units(), each)));
    while (!fit(task)) task.slices += static_cast<std::uint32_t>(div_up(task.slices, 8));
  }
}

void AttendPlan::build(std::span<const AttendTask> tasks, const AttentionShape& shape, const AttendVariant& variant,
                       std::uint32_t blocks, std::uint64_t limit_bytes) {
  tasks_.clear();
  pages_.clear();
  pieces_.clear();
  tokens_.clear();
  head_blocks_ = static_cast<std::uint32_t>(div_up(shape.group(), variant.heads()));
  for (const AttendTask& task : tasks) {
    if (task.kv.layout.dtype == variant.dtype) tasks_.push_back(list(task));
  }
  choose_groups(limit_bytes);
  for (std::size_t begin = 0; const std::size_t end : group_ends_) {
    choose_slices(std::span(tasks_).subspan(begin, end - begin), blocks);
    begin = end;
  }
  for (Task& task : tasks_) {
    for (std::uint32_t i = 0; i < task.slices; ++i) {
      task.bytes += head_blocks_ * (sizeof(AttendSlice) + div_up(slice(task, i).words(), 4) * 16);
    }
    task.bytes += div_up(task.task->scores.size(), 4) * 16;
    if (task.bytes > limit_bytes || task.slices * variant.head_tiles > kAttend.max_slices ||
        task.slices * head_blocks_ > kAttend.max_slices) {
      throw Error(Errc::out_of_capacity, "attend: the row lists of one task take " + std::to_string(task.bytes) +
                                             " bytes of at most " + std::to_string(limit_bytes) +
                                             "; select whole pages as runs, or attend in several tasks and merge");
    }
  }
}

AttendSlice AttendPlan::slice(const Task& task, std::uint32_t index) const noexcept {
  const Cut part = cut(task, index);
  AttendSlice slice;
  slice.base = task.task->kv.base;
  slice.page_tokens = task.task->kv.layout.page_tokens;
  slice.octet_shift = task.octet_shift;
  slice.has_members = task.task->members.empty() ? 0 : 1;
  slice.index = index;
  slice.slices = task.slices;
  const std::uint32_t page_end = std::min(part.octet_end, task.page_octets());
  if (part.octet_begin < page_end) {
    const std::uint32_t first = part.octet_begin >> task.octet_shift;
    slice.octet_skip = part.octet_begin - (first << task.octet_shift);
    slice.page_octets = page_end - part.octet_begin;
    slice.pages = static_cast<std::uint32_t>(div_up(page_end, 1u << task.octet_shift)) - first;
  }
  slice.pieces = part.octet_end - part.octet_begin - slice.page_octets;
  slice.tokens = part.token_end - part.token_begin;
  return slice;
}

std::uint32_t AttendPlan::first_token(const Task& task, std::uint32_t index) noexcept {
  return cut(task, index).token_begin;
}

void AttendPlan::write_words(const Task& task, const AttendSlice& slice, std::uint32_t* words) const noexcept {
  const Cut part = cut(task, slice.index);
  const auto page = static_cast<std::ptrdiff_t>(task.pages + (part.octet_begin >> task.octet_shift));
  words = std::copy_n(pages_.begin() + (slice.pages != 0 ? page : 0), slice.pages, words);
  const std::uint32_t piece = std::max(part.octet_begin, task.page_octets()) - task.page_octets();
  words = std::copy_n(pieces_.begin() + static_cast<std::ptrdiff_t>(task.pieces + 2 * (slice.pieces != 0 ? piece : 0)),
                      2 * slice.pieces, words);
  words =
      std::copy_n(tokens_.begin() + static_cast<std::ptrdiff_t>(task.tokens + part.token_begin), slice.tokens, words);
  if (slice.has_members != 0) std::copy_n(task.task->members.begin() + part.token_begin, slice.tokens, words);
}

}  // namespace sluice::gpu
