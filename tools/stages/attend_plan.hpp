#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu/kernels/attend/attend.hpp"
#include "sluice/step/attend_tasks.hpp"
#include "sluice/units.hpp"

namespace sluice::tools {

/// How the tasks of one `attend` become slices, or shares of all units where slices would leave blocks idle: a pure
/// function of the tasks and of how many blocks the device runs at once, so the same call is cut, and rounded, the same
/// way every time. Reused, it does not allocate.
class AttendPlan {
 public:
  /// One task's row lists, as ranges of the plan's arrays; see gpu::AttendJob.
  struct Task {
    const AttendTask* task = nullptr;
    std::size_t pages = 0;  ///< first index
    std::size_t pieces = 0;
    std::size_t tokens = 0;
    std::uint32_t page_count = 0;
    std::uint32_t piece_count = 0;
    std::uint32_t token_count = 0;
    std::uint32_t octet_shift = 0;
    std::uint32_t slices = 1;  ///< per block of heads; at most, where blocks have shares
    std::uint64_t bytes = 0;   ///< in pinned memory, at most: lists, scores, and a job per block of heads
  };

  /// Plans those of `tasks` whose pages have the variant's dtype. `blocks`: thread blocks that run at once.
  /// @throws Error{Errc::invalid_argument} for a page that has no frame, Error{Errc::out_of_capacity} for a task whose
  ///         lists do not fit `limit_bytes`.
  void build(std::span<const AttendTask> tasks, const AttentionShape& shape, const gpu::AttendVariant& variant,
             std::uint32_t blocks, std::uint64_t limit_bytes);

  [[nodiscard]] std::span<const Task> tasks() const noexcept { return tasks_; }
  /// Tasks fall into groups of about equal size, each of which fills the device, if their lists do not fit
  /// `limit_bytes` together: where each group ends.
  [[nodiscard]] std::span<const std::size_t> group_ends() const noexcept { return group_ends_; }
  /// Of each group: units of a block, see AttendArgs::share; 0: its blocks have slices.
  [[nodiscard]] std::span<const std::uint32_t> group_shares() const noexcept { return group_shares_; }
  /// Blocks of heads that each task is attended in.
  [[nodiscard]] std::uint32_t head_blocks() const noexcept { return head_blocks_; }
  /// The job of a task, for all heads; what depends on the heads and on memory is left out.
  [[nodiscard]] gpu::AttendJob job(const Task& task) const noexcept;
  /// Writes the row lists of a task.
  void write_words(const Task& task, std::uint32_t* words) const noexcept;

 private:
  [[nodiscard]] Task list(const AttendTask& task);
  [[nodiscard]] std::uint64_t task_bytes(const Task& task) const noexcept;
  void choose_groups(std::uint64_t limit_bytes);
  /// Whether the lists of so many units of the task surely fit shared memory, whichever units they are.
  [[nodiscard]] bool fit(const Task& task, std::uint64_t units) const noexcept;
  /// Whether the lists of every slice fit shared memory.
  [[nodiscard]] bool fit(const Task& task) const noexcept;
  void choose_slices(std::span<Task> tasks, std::uint32_t blocks) const;
  /// After that: what blocks share all units in if it is clearly the faster way, else 0.
  [[nodiscard]] std::uint32_t choose_share(std::span<Task> tasks, std::uint32_t blocks) const;

  gpu::AttendVariant variant_;
  std::uint32_t head_blocks_ = 1;
  std::vector<std::size_t> group_ends_;
  std::vector<std::uint32_t> group_shares_;
  std::vector<Task> tasks_;
  std::vector<std::uint32_t> pages_;
  std::vector<std::uint32_t> pieces_;  ///< pairs
  std::vector<std::uint32_t> tokens_;
};

}  // namespace sluice::tools
