#include "tools/stages/attend_plan.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::tools {

using namespace gpu;  // whose kernels are launched

namespace {

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
  pages_.reserve(pages_.size() + task.runs.size() * (one_word ? 1 : octets));
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

std::uint64_t AttendPlan::task_bytes(const Task& task) const noexcept {
  return head_blocks_ * sizeof(AttendJob) + div_up(job(task).words(), 4) * 16 +
         div_up(task.task->scores.size(), 4) * 16;
}

void AttendPlan::choose_groups(std::uint64_t limit_bytes) {
  std::uint64_t total = 0;
  for (const Task& task : tasks_) total += task.bytes;
  const std::uint64_t groups = std::max(
      {std::uint64_t{1}, div_up(total, limit_bytes), div_up(tasks_.size() * head_blocks_, kAttend.max_slices)});
  const std::uint64_t share_bytes = std::max<std::uint64_t>(1, div_up(total, groups));
  const std::uint64_t share_tasks = div_up(tasks_.size(), groups);
  group_ends_.clear();
  std::size_t begin = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < tasks_.size(); ++i) {
    const std::uint64_t more = tasks_[i].bytes;
    if (i != begin &&
        (bytes + more > limit_bytes || (groups > 1 && bytes >= share_bytes) || i - begin >= share_tasks * 2)) {
      group_ends_.push_back(i);
      begin = i;
      bytes = 0;
    }
    bytes += more;
  }
  group_ends_.push_back(tasks_.size());
}

bool AttendPlan::fit(const Task& task, std::uint64_t units) const noexcept {
  // A page that begins before them, and one that ends after them.
  const std::uint64_t pages = std::min<std::uint64_t>(task.page_count, (2 * units >> task.octet_shift) + 2);
  const std::uint64_t pieces = std::min<std::uint64_t>(task.piece_count, 2 * units);
  const std::uint64_t tokens = std::min<std::uint64_t>(task.token_count, 16 * units);
  return pages + 2 * pieces + (task.task->members.empty() ? 1 : 2) * tokens <= list_words(variant_);
}

bool AttendPlan::fit(const Task& task) const noexcept {
  const AttendJob whole = job(task);
  if (fit(task, div_up(whole.units(), task.slices))) return true;
  for (std::uint32_t i = 0; i < task.slices; ++i) {
    if (cut(whole, i).words() > list_words(variant_)) return false;
  }
  return true;
}

void AttendPlan::choose_slices(std::span<Task> tasks, std::uint32_t blocks) const {
  std::uint64_t units = 0;
  std::uint32_t longest = 0;
  for (const Task& task : tasks) {
    units += std::uint64_t{job(task).units()} * head_blocks_;
    longest = std::max(longest, job(task).units());
  }
  // One wave of equal slices if there are fewer tasks than blocks, several to even out the rest otherwise.
  const std::uint64_t target = tasks.size() * head_blocks_ <= blocks ? blocks : std::uint64_t{kAttend.waves} * blocks;
  const auto slices_of = [&](const Task& task, std::uint64_t each) {
    const std::uint32_t length = job(task).units();
    return length <= kAttend.whole_units ? 1 : div_up(length, each);
  };
  const auto count = [&](std::uint64_t each) {
    std::uint64_t slices = 0;
    for (const Task& task : tasks) slices += slices_of(task, each) * head_blocks_;
    return slices;
  };
  std::uint64_t each = std::max<std::uint64_t>(kAttend.min_slice_units, div_up(units, target));
  while (each < longest && count(each) > target) each += div_up(each, 64);
  for (Task& task : tasks) {
    task.slices = static_cast<std::uint32_t>(slices_of(task, each));
    while (!fit(task)) task.slices += static_cast<std::uint32_t>(div_up(task.slices, 8));
  }
}

std::uint32_t AttendPlan::choose_share(std::span<Task> tasks, std::uint32_t blocks) const {
  if (!variant_.ring || blocks + 2 * tasks.size() * head_blocks_ > kAttend.max_slices) return 0;
  std::uint64_t units = 0;
  std::uint64_t slices = 0;
  std::uint32_t longest_slice = 0;
  for (const Task& task : tasks) {
    const std::uint32_t length = std::max(1u, job(task).units());
    units += std::uint64_t{length + kAttend.next_job_units} * head_blocks_;
    slices += std::uint64_t{task.slices} * head_blocks_;
    longest_slice = std::max(longest_slice, static_cast<std::uint32_t>(div_up(length, task.slices)));
  }
  // More than what passes between two jobs, so that no block has nothing else.
  const auto share = static_cast<std::uint32_t>(
      std::max<std::uint64_t>(kAttend.next_job_units + 1, div_up(units - kAttend.next_job_units, blocks)));
  // While few blocks are idle, the others read as fast without them.
  const std::uint64_t in_slices = div_up(slices, blocks) * longest_slice;
  if (in_slices <= share + share / 16) return 0;
  if (!std::ranges::all_of(tasks, [&](const Task& task) { return fit(task, share); })) return 0;
  for (Task& task : tasks) task.slices = static_cast<std::uint32_t>(div_up(job(task).units(), share)) + 1;
  return share;
}

void AttendPlan::build(std::span<const AttendTask> tasks, const AttentionShape& shape, const AttendVariant& variant,
                       std::uint32_t blocks, std::uint64_t limit_bytes) {
  tasks_.clear();
  pages_.clear();
  pieces_.clear();
  tokens_.clear();
  variant_ = variant;
  head_blocks_ = static_cast<std::uint32_t>(div_up(shape.group(), variant.heads()));
  for (const AttendTask& task : tasks) {
    if (task.kv.layout.dtype != variant.dtype) continue;
    tasks_.push_back(list(task));
    Task& listed = tasks_.back();
    listed.bytes = task_bytes(listed);
  }
  choose_groups(limit_bytes);
  group_shares_.clear();
  for (std::size_t begin = 0; const std::size_t end : group_ends_) {
    const std::span<Task> group = std::span(tasks_).subspan(begin, end - begin);
    choose_slices(group, blocks);
    group_shares_.push_back(choose_share(group, blocks));
    begin = end;
  }
  const std::uint32_t most_slices = kAttend.max_slices / std::max(variant.head_tiles, head_blocks_);
  for (const Task& task : tasks_) {
    if (task.bytes > limit_bytes || task.slices > most_slices) {
      throw Error(Errc::out_of_capacity, "attend: the row lists of one task take " + std::to_string(task.bytes) +
                                             " bytes in " + std::to_string(task.slices) + " slices of at most " +
                                             std::to_string(limit_bytes) + " in " + std::to_string(most_slices) +
                                             "; select whole pages as runs, or attend in several tasks and merge");
    }
  }
}

AttendJob AttendPlan::job(const Task& task) const noexcept {
  AttendJob job;
  job.base = task.task->kv.base;
  job.page_tokens = task.task->kv.layout.page_tokens;
  job.octet_shift = task.octet_shift;
  job.pages = task.page_count;
  job.pieces = task.piece_count;
  job.tokens = task.token_count;
  job.has_members = task.task->members.empty() ? 0 : 1;
  job.slices = task.slices;
  return job;
}

void AttendPlan::write_words(const Task& task, std::uint32_t* words) const noexcept {
  const auto append = [&words](const std::vector<std::uint32_t>& from, std::size_t first, std::size_t count) {
    words = std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(first), count, words);
  };
  append(pages_, task.pages, task.page_count);
  append(pieces_, task.pieces, std::size_t{2} * task.piece_count);
  append(tokens_, task.tokens, task.token_count);
  std::copy(task.task->members.begin(), task.task->members.end(), words);
}

}  // namespace sluice::tools
