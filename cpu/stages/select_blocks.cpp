// Choices of blocks: what chunks' newest queries attend, of which FlexPrefill and MInference choose. What costs are the
// products of the representative queries with all keys, twice: once for every row's maximum and sum, once for the
// attention itself, of which only a block exists at a time.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/stages/block_choice.hpp"
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

/// Keys that one thread takes at a time: the same for any number of threads, so that sums are too.
constexpr std::uint32_t kRangeKeys = 8 * kPrefillBlock;

/// One task on its way to a choice.
struct Chunk {
  Chunk(const SelectBlocksTask& from, const PrefillSpec& spec, std::uint32_t query_heads)
      : task(&from),
        grid(from.first, from.count, spec),
        heads(query_heads),
        rows(std::min(representative_rows(spec.mode), from.count)),
        keys(from.first + from.count),
        ranges(static_cast<std::uint32_t>(div_up(keys, kRangeKeys))),
        column_stride(div_up(keys, kPrefillKeys) * kPrefillKeys) {}

  [[nodiscard]] std::uint32_t representative() const noexcept { return keys - rows; }  ///< position of their first
  [[nodiscard]] std::uint32_t states() const noexcept { return heads * kPrefillBlock; }
  /// All ranges but the last have as many.
  [[nodiscard]] static constexpr std::uint64_t diagonals() noexcept { return representative_diagonals(kRangeKeys); }

  const SelectBlocksTask* task;
  ChunkGrid grid;
  std::uint32_t heads;
  std::uint32_t rows;  ///< representative
  std::uint32_t keys;
  std::uint32_t ranges;
  std::uint64_t column_stride;
  std::vector<const std::byte*> pages;
  std::vector<float> q;                   ///< [heads, kPrefillBlock, head_dim] the representative rows
  std::vector<float> top;                 ///< [ranges, heads, kPrefillBlock]; of all keys in the first
  std::vector<float> mass;                ///< likewise, then 1 / mass
  std::vector<float> key_means;           ///< [key blocks, head_dim]
  std::vector<float> columns;             ///< [heads, column_stride]
  std::vector<float> diagonals_by_range;  ///< [ranges, heads, diagonals()]
};

/// One unit of parallel work.
struct Piece {
  Chunk* chunk = nullptr;
  std::uint32_t index = 0;  ///< range or head
};

/// One call. Lent, for its bodies refer to it.
class BlockSelection {
 public:
  BlockSelection(const Workers& workers, const Kernels& kernels, const PrefillSpec& spec, const PrefillShape& strides,
                 const AttentionShape& shape)
      : workers_(workers), kernels_(kernels), spec_(spec), strides_(strides), shape_(shape) {}

  void run(std::span<const SelectBlocksTask> tasks) {
    tasks_.assign(tasks.begin(), tasks.end());
    for (const SelectBlocksTask& task : tasks_) {
      if (task.count == 0) continue;
      Chunk chunk(task, spec_, shape_.group());
      if (chunk.grid.everything() && spec_.mode != PrefillMode::streaming && spec_.mode != PrefillMode::minference) {
        keep_everything(chunk);
      } else {
        chunks_.push_back(std::move(chunk));
      }
    }
    const PromptLook needed = looks_at(spec_);
    if (needed != PromptLook::nothing) {
      for (Chunk& chunk : chunks_) prepare(chunk);
      for_all(&Chunk::ranges, [this](Chunk& chunk, std::uint32_t range) { weigh(chunk, range); });
    }
    if (needed == PromptLook::attention) {
      for (Chunk& chunk : chunks_) join_masses(chunk);
      for_all(&Chunk::ranges, [this](Chunk& chunk, std::uint32_t range) { attend(chunk, range); });
    }
    for_all(&Chunk::heads, [this](Chunk& chunk, std::uint32_t head) { choose(chunk, head); });
  }

 private:
  template <class Body>
  void for_all(std::uint32_t Chunk::*count, const Body& body) {
    pieces_.clear();
    for (Chunk& chunk : chunks_) {
      for (std::uint32_t i = 0; i < chunk.*count; ++i) pieces_.push_back({.chunk = &chunk, .index = i});
    }
    workers_.parallel_for(static_cast<std::uint32_t>(pieces_.size()),
                          [this, body](std::uint32_t i) { body(*pieces_[i].chunk, pieces_[i].index); });
  }

  void keep_everything(const Chunk& chunk) const {
    BlockSet all{.has = std::vector<std::uint8_t>(chunk.grid.blocks, 1), .count = chunk.grid.blocks};
    for (std::uint32_t head = 0; head < chunk.heads; ++head) {
      write_lines(all, all, chunk.grid, bits_of(chunk, head));
      report(chunk, head, {.columns = all.count, .diagonals = all.count});
    }
  }

  void prepare(Chunk& chunk) const {
    const std::uint32_t dim = shape_.head_dim;
    const KvView& kv = chunk.task->kv;
    chunk.pages.resize(div_up(chunk.keys, kv.layout.page_tokens));
    for (std::size_t i = 0; i < chunk.pages.size(); ++i) chunk.pages[i] = kv.page(i);
    chunk.q.resize(std::size_t{chunk.states()} * dim);
    chunk.top.resize(std::size_t{chunk.ranges} * chunk.states());
    chunk.mass.resize(chunk.top.size());
    chunk.key_means.resize(std::size_t{chunk.grid.blocks} * dim);
    chunk.columns.resize(chunk.heads * chunk.column_stride);
    chunk.diagonals_by_range.resize(chunk.ranges * chunk.heads * Chunk::diagonals());
    for (std::uint32_t head = 0; head < chunk.heads; ++head) {
      load_queries(
          {.q = chunk.task->q, .begin = chunk.task->count - chunk.rows, .count = chunk.rows, .head = head, .heads = 1},
          strides_, kernels_, shape_, chunk.q.data() + std::size_t{head} * kPrefillBlock * dim);
    }
  }

  [[nodiscard]] RepresentativeRows range_rows(Chunk& chunk, std::uint32_t range) const {
    thread_local Scratch scratch;
    const std::uint32_t begin = range * kRangeKeys;
    return {.q = chunk.q.data(),
            .pages = chunk.pages.data(),
            .page_tokens = chunk.task->kv.layout.page_tokens,
            .key_begin = begin,
            .key_end = std::min(begin + kRangeKeys, chunk.keys),
            .first = chunk.representative(),
            .rows = chunk.rows,
            .heads = chunk.heads,
            .head_dim = shape_.head_dim,
            .top = chunk.top.data(),
            .mass = chunk.mass.data(),
            .key_means = chunk.key_means.data() + std::size_t{begin / kPrefillBlock} * shape_.head_dim,
            .columns = chunk.columns.data() + begin,
            .column_stride = chunk.column_stride,
            .diagonals = chunk.diagonals_by_range.data() + range * chunk.heads * Chunk::diagonals(),
            .scratch = scratch.floats(representative_scratch_floats(shape_.head_dim))};
  }

  void weigh(Chunk& chunk, std::uint32_t range) const {
    RepresentativeRows rows = range_rows(chunk, range);
    rows.top += std::size_t{range} * chunk.states();
    rows.mass += std::size_t{range} * chunk.states();
    kernels_for(kernels_, chunk.task->kv.layout.dtype).representative_masses(rows);
  }

  /// The maximum of every row over all ranges, and its share of the mean over the rows: rows without a number count
  /// not.
  static void join_masses(Chunk& chunk) {
    for (std::uint32_t head = 0; head < chunk.heads; ++head) {
      std::uint32_t present = 0;
      for (std::uint32_t row = head * kPrefillBlock; row < head * kPrefillBlock + chunk.rows; ++row) {
        float top = chunk.top[row];
        double mass = 0.0;
        for (std::size_t i = row; i < chunk.top.size(); i += chunk.states()) top = std::max(top, chunk.top[i]);
        for (std::size_t i = row; i < chunk.top.size(); i += chunk.states()) {
          mass += static_cast<double>(chunk.mass[i]) *
                  std::exp(static_cast<double>(chunk.top[i]) - static_cast<double>(top));
        }
        chunk.top[row] = top;
        chunk.mass[row] = mass > 0.0 ? static_cast<float>(1.0 / mass) : 0.f;
        present += mass > 0.0 ? 1u : 0u;
      }
      for (std::uint32_t r = 0; r < chunk.rows && present != 0; ++r) {
        chunk.mass[head * kPrefillBlock + r] /= static_cast<float>(present);
      }
    }
  }

  void attend(Chunk& chunk, std::uint32_t range) const {
    kernels_for(kernels_, chunk.task->kv.layout.dtype).representative_sums(range_rows(chunk, range));
  }

  /// Attention by distance, from the pieces of the ranges.
  static std::vector<float> diagonals_of(const Chunk& chunk, std::uint32_t head) {
    std::vector<float> lines(chunk.keys);
    const std::int64_t origin = std::int64_t{chunk.representative()} + kPrefillBlock - 1;
    for (std::uint32_t range = 0; range < chunk.ranges; ++range) {
      const std::uint32_t begin = range * kRangeKeys;
      const std::uint64_t count = representative_diagonals(std::min(kRangeKeys, chunk.keys - begin));
      const float* const from =
          chunk.diagonals_by_range.data() + range * chunk.heads * Chunk::diagonals() + head * count;
      for (std::uint64_t c = 0; c < count; ++c) {
        const std::int64_t distance = origin - begin - static_cast<std::int64_t>(c);
        if (distance >= 0 && distance < std::int64_t{chunk.keys}) lines[static_cast<std::size_t>(distance)] += from[c];
      }
    }
    return lines;
  }

  /// Scores of a mean query, scaled, with the mean keys of blocks 0 .. blocks - 1, softened.
  [[nodiscard]] std::vector<double> pooled(const Chunk& chunk, const std::vector<double>& query,
                                           std::uint32_t blocks) const {
    std::vector<double> scores(blocks);
    const float* key = chunk.key_means.data();
    for (double& score : scores) {
      for (const double x : query) score += x * static_cast<double>(*key++);
    }
    soften(scores);
    return scores;
  }

  /// Mean of some tokens' queries, scaled.
  [[nodiscard]] std::vector<double> mean_query(const Chunk& chunk, std::uint32_t head, std::uint32_t begin,
                                               std::uint32_t count) const {
    thread_local Scratch scratch;
    const std::uint32_t dim = shape_.head_dim;
    float* const q = scratch.floats(std::uint64_t{count} * dim);
    load_queries({.q = chunk.task->q, .begin = begin, .count = count, .head = head, .heads = 1}, strides_, kernels_,
                 shape_, q);
    std::vector<double> mean(dim);
    for (std::uint32_t t = 0; t < count; ++t) {
      for (std::uint32_t c = 0; c < dim; ++c) mean[c] += static_cast<double>(q[std::size_t{t} * dim + c]);
    }
    for (double& x : mean) x /= count;
    return mean;
  }

  [[nodiscard]] HeadLook look(const Chunk& chunk, std::uint32_t head) const {
    HeadLook found{.grid = chunk.grid,
                   .columns = {chunk.columns.data() + head * chunk.column_stride, chunk.keys},
                   .diagonals = diagonals_of(chunk, head),
                   .column_sums = {},
                   .diagonal_sums = {},
                   .pooled = {},
                   .pooled_row = [&chunk, head, this](std::uint32_t row) { return pooled_row(chunk, head, row); }};
    found.column_sums = block_sums(found.columns);
    found.diagonal_sums = block_sums(found.diagonals);
    found.pooled = [&chunk, head, this] {
      const std::vector<double> query = mean_query(chunk, head, chunk.task->count - chunk.rows, chunk.rows);
      return pooled(chunk, query, chunk.grid.blocks);
    };
    return found;
  }

  void choose(const Chunk& chunk, std::uint32_t head) const {
    std::uint32_t* const bits = bits_of(chunk, head);
    if (spec_.mode == PrefillMode::streaming) {
      return report(chunk, head, choose_streaming(chunk.grid, spec_.streaming, bits));
    }
    if (looks_at(spec_) == PromptLook::nothing) {
      return report(chunk, head, choose_streaming(chunk.grid, spec_.minference.a_shape, bits));
    }
    const HeadLook from = look(chunk, head);
    report(chunk, head,
           spec_.mode == PrefillMode::minference ? choose_minference(from, spec_.minference, bits)
                                                 : choose_flexprefill(from, spec_.flex, bits));
  }

  /// Pooled attention of a query block of the chunk: [key blocks that it sees].
  [[nodiscard]] std::vector<double> pooled_row(const Chunk& chunk, std::uint32_t head, std::uint32_t row) const {
    const SelectBlocksTask& task = *chunk.task;
    const std::uint32_t block = chunk.grid.top + row;
    const std::uint32_t begin = std::max(task.first, block * kPrefillBlock) - task.first;
    const std::uint32_t end = std::min(chunk.keys, (block + 1) * kPrefillBlock) - task.first;
    return pooled(chunk, mean_query(chunk, head, begin, end - begin), block + 1);
  }

  static std::uint32_t* bits_of(const Chunk& chunk, std::uint32_t head) noexcept {
    return chunk.task->blocks + std::size_t{head} * chunk.grid.rows * chunk.grid.words;
  }

  static void report(const Chunk& chunk, std::uint32_t head, PrefillChoice choice) noexcept {
    const ChunkGrid& grid = chunk.grid;
    const std::uint32_t* const bits = bits_of(chunk, head);
    for (std::size_t i = 0; i < std::size_t{grid.rows} * grid.words; ++i) {
      choice.kept += static_cast<std::uint64_t>(std::popcount(bits[i]));
    }
    choice.causal = std::uint64_t{grid.rows} * (grid.top + 1) + std::uint64_t{grid.rows} * (grid.rows - 1) / 2;
    chunk.task->choices[head] = choice;
  }

  const Workers& workers_;
  const Kernels& kernels_;
  PrefillSpec spec_;
  PrefillShape strides_;
  AttentionShape shape_;
  std::vector<SelectBlocksTask> tasks_;
  std::vector<Chunk> chunks_;  ///< point to `tasks_`
  std::vector<Piece> pieces_;  ///< point to `chunks_`
};

}  // namespace

void select_blocks(const Host& host, std::span<const SelectBlocksTask> tasks, const PrefillSpec& spec,
                   const PrefillShape& strides, const AttentionShape& shape) {
  if (tasks.empty()) return;
  check_tensor_type("select_blocks", strides.q_dtype);
  for (const SelectBlocksTask& task : tasks) check("select_blocks", shape, task.kv.layout);
  if (spec.mode == PrefillMode::full)
    throw Error(Errc::invalid_argument, "select_blocks: the mode is full, which chooses nothing; name another one");
  if (shape.softcap != 0.f)
    throw Error(Errc::unsupported, "select_blocks: scores are summed without a soft-cap; prefill densely");
  Lent<BlockSelection>(host.workers, host.workers, host.kernels, spec, strides, shape)->run(tasks);
}

}  // namespace sluice::cpu
