#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/verbs.hpp"

namespace sluice::cpu {
namespace {

/// Query rows that share one widening of the keys: a multiple of the product's 6 rows and of most groups.
constexpr std::uint32_t kBlockRows = 240;
/// A chunk too short to give every thread a few such blocks is cut finer, down to this.
constexpr std::uint32_t kLeastRows = 48;

/// Some consecutive tokens of one task, all heads of its group.
struct Block {
  const PrefillTask* task = nullptr;
  std::uint32_t begin = 0;  ///< token of the chunk
  std::uint32_t count = 0;
};

std::uint32_t block_tokens(std::span<const PrefillTask> tasks, std::uint32_t group, std::uint32_t threads) {
  std::uint64_t rows = 0;
  for (const PrefillTask& task : tasks) rows += std::uint64_t{task.count} * group;
  const auto wanted = std::clamp<std::uint64_t>(rows / (std::uint64_t{4} * threads), kLeastRows, kBlockRows);
  return std::max(1u, static_cast<std::uint32_t>(wanted) / group);
}

class BlockRun {
 public:
  BlockRun(const Kernels& kernels, const AttentionShape& shape, const PrefillShape& strides)
      : kernels_(kernels), shape_(shape), strides_(strides) {}

  void operator()(const Block& block) const {
    thread_local Scratch own_scratch;
    thread_local std::vector<const std::byte*> pages;
    const std::uint32_t rows = block.count * shape_.group();
    const std::uint64_t matrix = std::uint64_t{rows} * shape_.head_dim;
    float* const q = own_scratch.floats(2 * matrix + prefill_scratch_floats(rows, shape_.head_dim));
    const PageLayout& layout = block.task->kv.layout;
    const std::uint32_t first = block.task->first + block.begin;
    pages.resize(div_up(first + block.count, layout.page_tokens));
    for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = block.task->kv.page(i);
    load_queries(block, q);
    kernels_for(kernels_, layout.dtype)
        .prefill({.q = q,
                  .pages = pages.data(),
                  .page_tokens = layout.page_tokens,
                  .first = first,
                  .rows = rows,
                  .group = shape_.group(),
                  .head_dim = shape_.head_dim,
                  .out = q + matrix,
                  .scratch = q + 2 * matrix});
    store_outputs(block, q + matrix);
  }

 private:
  void load_queries(const Block& block, float* q) const {
    const float scale = 1.f / std::sqrt(static_cast<float>(shape_.head_dim));
    for (std::uint32_t t = 0; t < block.count; ++t) {
      for (std::uint32_t h = 0; h < shape_.group(); ++h, q += shape_.head_dim) {
        const std::uint64_t at = (block.begin + std::uint64_t{t}) * strides_.q_token_stride + h * strides_.q_head_stride;
        kernels_for(kernels_, strides_.q_dtype).widen(block.task->q + at * bytes_of(strides_.q_dtype), q, shape_.head_dim);
        for (std::uint32_t c = 0; c < shape_.head_dim; ++c) q[c] *= scale;
      }
    }
  }

  void store_outputs(const Block& block, const float* out) const {
    for (std::uint32_t t = 0; t < block.count; ++t) {
      for (std::uint32_t h = 0; h < shape_.group(); ++h, out += shape_.head_dim) {
        const std::uint64_t at = (block.begin + std::uint64_t{t}) * strides_.out_token_stride + h * strides_.out_head_stride;
        kernels_for(kernels_, strides_.out_dtype)
            .narrow(out, block.task->out + at * bytes_of(strides_.out_dtype), shape_.head_dim);
      }
    }
  }

  const Kernels& kernels_;
  const AttentionShape& shape_;
  const PrefillShape& strides_;
};

}  // namespace

void Backend::prefill(std::span<const PrefillTask> tasks, const PrefillShape& strides, const AttentionShape& shape, Stream*) {
  if (tasks.empty()) return;
  for (const PrefillTask& task : tasks) check("prefill", shape, task.kv.layout);
  const std::uint32_t tokens = block_tokens(tasks, shape.group(), workers_.threads());
  std::vector<Block> blocks;
  for (const PrefillTask& task : tasks) {
    for (std::uint32_t begin = 0; begin < task.count; begin += tokens) {
      blocks.push_back({.task = &task, .begin = begin, .count = std::min(tokens, task.count - begin)});
    }
  }
  // Later tokens see more keys; the longest blocks go first, so that no thread ends with one of them.
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
    return a.task->first + a.begin > b.task->first + b.begin;
  });
  const BlockRun run(kernels_, shape, strides);
  workers_.parallel_for(static_cast<std::uint32_t>(blocks.size()), [&](std::uint32_t i) { run(blocks[i]); });
}

}  // namespace sluice::cpu
