#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "runtime/far/far_choice.hpp"
#include "runtime/far/shares.hpp"
#include "sluice/step/forward_memory.hpp"
#include "sluice/step/partial.hpp"

namespace sluice::runtime {

/// Some far rows of one row and KV head, which one thread attends.
struct FarPart {
  std::uint32_t list = 0;  ///< row * kv_heads + KV head
  std::uint32_t part = 0;
  std::uint32_t parts = 0;  ///< of the list; 0: there is none
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// The lists of a question, cut into parts that threads attend in place, each from when it is known what is on it,
/// whatever others are still chosen for. Parts are merged as a binary tree of neighbours, at each node by the thread
/// that comes second, so that the last one has little left to merge. How a list is cut, and with it the tree, depends
/// on its length alone: answers depend on neither the threads nor when a list was opened. Thread safety: any, each list
/// and part by who may say so.
class FarParts {
 public:
  /// `memory` is copied; what it points to must outlive this, and so must `choice`. `threads` attend.
  FarParts(const ForwardMemory& memory, FarChoice& choice, std::uint32_t threads);

  /// The list is as long as ForwardMemory::far_counts says. While the question stands and is not closed.
  void open(std::uint64_t asked, std::uint32_t list) noexcept;
  /// As ListShares.
  [[nodiscard]] std::uint64_t opened() const noexcept { return shares_.opened(); }
  [[nodiscard]] bool close() noexcept { return shares_.close(); }
  [[nodiscard]] bool finish() noexcept { return shares_.finish(); }
  /// The next part of that list, which is the caller's then.
  [[nodiscard]] FarPart claim(const FarQuestion& question, std::uint32_t list) noexcept;
  /// Where one of `threads` threads begins to look for parts: those that begin apart do not stand in each other's way.
  [[nodiscard]] static std::uint32_t first_list(const FarQuestion& question, std::uint32_t thread,
                                                std::uint32_t threads) noexcept {
    return thread >= threads ? 0 : static_cast<std::uint32_t>(std::uint64_t{thread} * question.lists / threads);
  }
  /// By thread `thread`, which claimed it and finishes it then.
  void attend(const FarQuestion& question, const FarPart& part, std::uint32_t thread);
  /// Of host memory that the threads work in.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return partials_.size() * sizeof(float); }

 private:
  /// As ForwardMemory::far_counts has it.
  [[nodiscard]] std::uint32_t count_of(std::uint32_t list) const noexcept;
  /// Of a thread: where the rows of a part lie, as many as the largest has.
  struct Rows {
    std::vector<const std::byte*> keys;
    std::vector<const float*> scales;  ///< empty if rows have none
  };
  void attend_rows(const ForwardMemory& memory, const FarQuestion& question, const FarPart& part, Rows& rows,
                   const ChosenList* chosen);
  /// Merges what has ended and can be. Whether that was all of the list.
  [[nodiscard]] bool merge(const ForwardMemory& memory, const FarPart& part) noexcept;
  /// Where the result of a part goes: of the first to its list's place, the others' wait to be merged. `memory`: as the
  /// list's rows see it.
  [[nodiscard]] Partial place_of(const ForwardMemory& memory, std::uint32_t list, std::uint32_t part) noexcept;

  const std::vector<ForwardMemory> memory_;  ///< as teams of 1, 2, ... drafts see it
  FarChoice& choice_;
  const cpu::Kernels& kernels_;
  ListShares shares_;
  const std::uint32_t most_parts_;
  /// [decode_rows, kv_heads, most_parts] whether one side of the merge that takes this part in has ended, and not both
  std::vector<std::atomic<std::uint32_t>> met_;
  std::vector<float> partials_;  ///< [decode_rows, kv_heads, most_parts, group, head_dim + 1]
  std::vector<Rows> rows_;       ///< [threads]
};

}  // namespace sluice::runtime
