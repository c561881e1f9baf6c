#include <algorithm>
#include <bit>
#include <vector>

#include "cpu/stages/prompt_rows.hpp"
#include "cpu/stages/rows.hpp"
#include "cpu/stages/shapes.hpp"
#include "cpu/stages/sharing.hpp"
#include "cpu/stages/stages.hpp"
#include "cpu/threads/lent.hpp"
#include "sluice/error.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::cpu {
namespace {

/// Query rows that share one widening of the keys: a multiple of the product's 6 rows and of most groups.
constexpr std::uint32_t kBlockRows = 240;
/// A chunk too short to give every thread a few such blocks is cut finer, down to this.
constexpr std::uint32_t kLeastRows = 48;

/// Some consecutive tokens of one task: all heads of its group, or with a choice of blocks one head, whose choice is
/// its own, in one block of queries.
struct Block {
  const PrefillTask* task = nullptr;
  std::uint32_t begin = 0;  ///< token of the chunk
  std::uint32_t count = 0;
  std::uint32_t head = 0;
  std::uint32_t heads = 0;
  const std::uint32_t* bits = nullptr;
  std::uint64_t work = 0;  ///< (row, key) pairs, roughly

  [[nodiscard]] std::uint32_t first() const noexcept { return task->first + begin; }
  [[nodiscard]] std::uint32_t rows() const noexcept { return count * heads; }
  /// One behind the last key that any row may attend.
  [[nodiscard]] std::uint32_t key_end() const noexcept { return std::min(task->key_end, first() + count); }
  /// Begin of the page of the first key that any row may attend.
  [[nodiscard]] std::uint32_t key_begin() const noexcept {
    if (task->reach == 0 || first() + 1 <= task->reach) return task->key_begin;
    const std::uint32_t seen = first() + 1 - task->reach;
    return std::max(task->key_begin, seen / task->kv.layout.page_tokens * task->kv.layout.page_tokens);
  }
};

std::uint32_t block_tokens(std::span<const PrefillTask> tasks, std::uint32_t group, std::uint32_t threads) {
  std::uint64_t rows = 0;
  for (const PrefillTask& task : tasks) rows += std::uint64_t{task.count} * group;
  const auto wanted = std::clamp<std::uint64_t>(rows / (std::uint64_t{4} * threads), kLeastRows, kBlockRows);
  return std::max(1u, static_cast<std::uint32_t>(wanted) / group);
}

void add_dense_blocks(const PrefillTask& task, std::uint32_t group, std::uint32_t tokens, std::vector<Block>& blocks) {
  for (std::uint32_t begin = 0; begin < task.count; begin += tokens) {
    Block block{.task = &task, .begin = begin, .count = std::min(tokens, task.count - begin), .heads = group};
    block.work = std::uint64_t{block.rows()} * (std::max(block.key_end(), block.key_begin()) - block.key_begin());
    blocks.push_back(block);
  }
}

void add_chosen_blocks(const PrefillTask& task, std::uint32_t group, std::vector<Block>& blocks) {
  const std::uint32_t words = prefill_mask_words(task.first + task.count);
  const std::uint32_t* bits = task.blocks;
  for (std::uint32_t head = 0; head < group; ++head) {
    for (std::uint32_t begin = 0; begin < task.count; bits += words) {
      const std::uint32_t end =
          std::min(task.count, (((task.first + begin) / kPrefillBlock + 1) * kPrefillBlock) - task.first);
      Block block{.task = &task, .begin = begin, .count = end - begin, .head = head, .heads = 1, .bits = bits};
      for (std::uint32_t i = 0; i < words; ++i) block.work += std::popcount(bits[i]) * kPrefillBlock * block.count;
      blocks.push_back(block);
      begin = end;
    }
  }
}

class BlockRun {
 public:
  BlockRun(const Kernels& kernels, const AttentionShape& shape, const PrefillShape& strides)
      : kernels_(kernels), shape_(shape), strides_(strides) {}

  void operator()(const Block& block) const {
    thread_local Scratch own_scratch;
    thread_local std::vector<const std::byte*> pages;
    const PrefillTask& task = *block.task;
    const std::uint32_t rows = block.rows();
    const std::uint64_t matrix = std::uint64_t{rows} * shape_.head_dim;
    float* const q = own_scratch.floats(2 * matrix + prefill_scratch_floats(rows, shape_.head_dim) + rows);
    float* const scratch = q + 2 * matrix;
    const Partial result{.out = q + matrix, .lse = scratch + prefill_scratch_floats(rows, shape_.head_dim)};
    const PageLayout& layout = task.kv.layout;
    const std::uint32_t key_begin = block.key_begin();
    const std::uint32_t key_end = std::max(block.key_end(), key_begin);
    const std::uint32_t first_page = (key_begin - task.key_begin) / layout.page_tokens;
    pages.resize(div_up(key_end - key_begin, layout.page_tokens));
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = task.kv.page(first_page + i);
    load_queries({.q = task.q, .begin = block.begin, .count = block.count, .head = block.head, .heads = block.heads},
                 strides_, kernels_, shape_, q);
    kernels_for(kernels_, layout.dtype)
        .prefill({.q = q,
                  .softcap = shape_.softcap,
                  .reach = task.reach,
                  .pages = pages.data(),
                  .v_offset = layout.values_offset(),
                  .blocks = block.bits,
                  .page_tokens = layout.page_tokens,
                  .key_begin = key_begin,
                  .key_end = key_end,
                  .first = block.first(),
                  .rows = rows,
                  .group = block.heads,
                  .head_dim = shape_.head_dim,
                  .out = result.out,
                  .lse = result.lse,
                  .scratch = scratch});
    store(block, result);
  }

 private:
  void store(const Block& block, const Partial& result) const {
    const PrefillTask& task = *block.task;
    for (std::uint32_t row = 0; row < block.rows(); ++row) {
      const std::uint32_t token = block.begin + row / block.heads;
      const std::uint32_t head = block.head + row % block.heads;
      const std::uint64_t at = std::uint64_t{token} * shape_.group() + head;
      Partial part{.out = result.out + std::uint64_t{row} * shape_.head_dim, .lse = result.lse + row};
      if (task.so_far != nullptr) part = add_window(task, at, part);
      if (task.so_far == nullptr && task.lse != nullptr) task.lse[at] = *part.lse;
      if (task.so_far != nullptr && !task.last_window) continue;
      const std::uint64_t to = token * strides_.out_token_stride + head * strides_.out_head_stride;
      kernels_for(kernels_, strides_.out_dtype)
          .narrow(part.out, task.out + to * bytes_of(strides_.out_dtype), shape_.out_dim());
    }
  }

  /// Row `at` of all windows up to this one.
  [[nodiscard]] Partial add_window(const PrefillTask& task, std::uint64_t at, const Partial& part) const {
    const Partial whole{.out = task.so_far + at * shape_.head_dim, .lse = task.lse + at};
    if (task.first_window) {
      std::copy_n(part.out, shape_.head_dim, whole.out);
      *whole.lse = *part.lse;
    } else {
      merge_into(whole, part, 1, shape_.head_dim);
    }
    return whole;
  }

  const Kernels& kernels_;
  AttentionShape shape_;
  PrefillShape strides_;
};

struct PrefillCall {
  PrefillCall(std::span<const PrefillTask> of, const BlockRun& how) : tasks(of.begin(), of.end()), run(how) {}

  std::vector<PrefillTask> tasks;
  std::vector<Block> blocks;  ///< point to `tasks`
  BlockRun run;
};

void check_windows(const PrefillTask& task) {
  if (task.so_far != nullptr && task.lse == nullptr)
    throw Error(Errc::invalid_argument, "prefill: a task with so_far has no lse; windows need both to be merged");
}

}  // namespace

void prefill(const Host& host, std::span<const PrefillTask> tasks, const PrefillShape& strides,
             const AttentionShape& shape) {
  if (tasks.empty()) return;
  check_tensor_type("prefill", strides.q_dtype);
  check_tensor_type("prefill", strides.out_dtype);
  for (const PrefillTask& task : tasks) {
    check("prefill", shape, task.kv.layout);
    check_windows(task);
  }
  const std::uint32_t tokens = block_tokens(tasks, shape.group(), host.workers.threads());
  const Lent<PrefillCall> call(host.workers, tasks, BlockRun(host.kernels, shape, strides));
  std::vector<Block>& blocks = call->blocks;
  for (const PrefillTask& task : call->tasks) {
    if (task.blocks != nullptr) {
      add_chosen_blocks(task, shape.group(), blocks);
    } else {
      add_dense_blocks(task, shape.group(), tokens, blocks);
    }
  }
  // The longest blocks go first, so that no thread ends with one of them.
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.work > b.work; });
  host.workers.parallel_for(static_cast<std::uint32_t>(blocks.size()),
                            [all = call.get()](std::uint32_t i) { all->run(all->blocks[i]); });
}

}  // namespace sluice::cpu
