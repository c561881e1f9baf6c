#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/stages/row_list.hpp"
#include "cpu/stages/rows.hpp"
#include "cpu/stages/shapes.hpp"
#include "cpu/stages/sharing.hpp"
#include "cpu/stages/stages.hpp"

namespace sluice::cpu {
namespace {

/// A task's runs or tokens, or part of them, that one thread attends.
struct Unit {
  enum class Kind : std::uint8_t { runs, tokens };
  std::uint32_t task = 0;
  Kind kind = Kind::runs;
  std::uint32_t begin = 0;  ///< first run or token
  std::uint32_t end = 0;
  std::uint32_t rows = 0;
};

/// Tokens per unit of a task: how a task is cut depends on the task alone, so results do not depend on the
/// number of threads. At least 96 rows, which amortise start and merge and still leave every core of a large machine
/// a part of a decode step's far tokens; at most 4096, so that only tasks beyond 2^18 tokens have more than 64 units.
std::uint32_t unit_rows(std::uint64_t tokens) noexcept {
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(div_up(tokens, 64), 96, 4096));
}

std::uint64_t tokens_of(const AttendTask& task) noexcept {
  std::uint64_t sum = task.tokens.size();
  for (const PageRun& run : task.runs) sum += run.tokens();
  return sum;
}

void cut_runs(std::span<const PageRun> runs, std::uint32_t task, std::uint32_t limit, std::vector<Unit>& units) {
  Unit unit{.task = task, .kind = Unit::Kind::runs};
  for (std::uint32_t i = 0; i < runs.size(); ++i) {
    unit.rows += runs[i].tokens();
    unit.end = i + 1;
    if (unit.rows < limit && unit.end < runs.size()) continue;
    if (unit.rows != 0) units.push_back(unit);
    unit = {.task = task, .kind = Unit::Kind::runs, .begin = unit.end};
  }
}

void cut_tokens(std::uint32_t tokens, std::uint32_t task, std::uint32_t limit, std::vector<Unit>& units) {
  for (std::uint32_t begin = 0; begin < tokens; begin += limit) {
    const std::uint32_t end = std::min(begin + limit, tokens);
    units.push_back({.task = task, .kind = Unit::Kind::tokens, .begin = begin, .end = end, .rows = end - begin});
  }
}

/// The units of all tasks in order; returns the bytes that they read.
std::uint64_t cut(const std::vector<AttendTask>& tasks, std::vector<Unit>& units) {
  units.clear();
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < tasks.size(); ++i) {
    const std::uint64_t tokens = tokens_of(tasks[i]);
    cut_runs(tasks[i].runs, i, unit_rows(tokens), units);
    cut_tokens(static_cast<std::uint32_t>(tasks[i].tokens.size()), i, unit_rows(tokens), units);
    bytes += tokens * tasks[i].kv.layout.token_bytes();
  }
  return bytes;
}

void attend_unit(const Kernels& kernels, const AttendTask& task, const AttentionShape& shape, const Unit& unit,
                 const Partial& out) {
  thread_local std::vector<const std::byte*> rows;
  thread_local std::vector<const float*> scales;
  if (rows.size() < unit.rows) rows.resize(unit.rows);
  if (task.kv.layout.scaled() && scales.size() < unit.rows) scales.resize(unit.rows);
  AttendRows args{.q = task.q,
                  .scale = shape.score_scale(),
                  .softcap = shape.softcap,
                  .k = rows.data(),
                  .v_offset = task.kv.layout.values_offset(),
                  .scales = scales.data(),
                  .count = unit.rows,
                  .group = shape.group(),
                  .head_dim = shape.head_dim,
                  .out = out.out,
                  .lse = out.lse};
  const auto list = [&](const auto& some) {
    list_rows(task.kv, some, rows.data());
    if (task.kv.layout.scaled()) list_scales(task.kv, some, scales.data());
  };
  if (unit.kind == Unit::Kind::runs) {
    list(task.runs.subspan(unit.begin, unit.end - unit.begin));
  } else {
    list(task.tokens.subspan(unit.begin, unit.end - unit.begin));
    if (!task.members.empty()) args.members = task.members.data() + unit.begin;
    if (!task.scores.empty()) args.scores = task.scores.data() + std::size_t{unit.begin} * shape.group();
  }
  kernels_for(kernels, task.kv.layout.dtype).attend(args);
}

/// Units [begin, end) of one task.
struct Share {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

std::vector<Share> shares_of(const std::vector<Unit>& units, std::size_t tasks) {
  std::vector<Share> shares(tasks);
  for (std::uint32_t i = 0; i < units.size(); ++i) {
    Share& share = shares[units[i].task];
    if (share.end == 0) share.begin = i;
    share.end = i + 1;
  }
  return shares;
}

/// Where unit i's partial lies in scratch memory.
Partial partial_at(float* scratch, std::size_t i, const AttentionShape& shape) noexcept {
  const std::size_t out = std::size_t{shape.group()} * shape.head_dim;
  float* const begin = scratch + i * (out + shape.group());
  return {.out = begin, .lse = begin + out};
}

/// One call. A task's first unit goes straight to its output. Who finishes its last unit merges the others
/// in their order.
struct AttendCall {
  std::vector<AttendTask> tasks;
  AttentionShape shape;
  std::vector<Unit> units;
  std::vector<Share> shares;                     ///< [tasks]
  std::vector<std::atomic<std::uint32_t>> left;  ///< [tasks] units that are not finished
  Scratch memory;
  float* scratch = nullptr;

  void run(const Kernels& kernels, std::uint32_t i) {
    const std::uint32_t index = units[i].task;
    const AttendTask& task = tasks[index];
    const Share& share = shares[index];
    attend_unit(kernels, task, shape, units[i], i == share.begin ? task.out : partial_at(scratch, i, shape));
    if (left[index].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (std::uint32_t unit = share.begin + 1; unit < share.end; ++unit) {
      merge_into(task.out, partial_at(scratch, unit, shape), shape.group(), shape.head_dim);
    }
  }
};

void clear(const Partial& partial, const AttentionShape& shape) noexcept {
  std::fill_n(partial.out, std::size_t{shape.group()} * shape.head_dim, 0.f);
  std::fill_n(partial.lse, shape.group(), kEmptyLse);
}

}  // namespace

void attend(const Host& host, std::span<const AttendTask> tasks, const AttentionShape& shape) {
  if (tasks.empty()) return;
  for (const AttendTask& task : tasks) check("attend", shape, task.kv.layout);
  const auto call = Lent<AttendCall>::reused(host.workers);
  call->tasks.assign(tasks.begin(), tasks.end());
  call->shape = shape;
  const std::uint64_t bytes = cut(call->tasks, call->units);
  call->scratch = call->memory.floats(call->units.size() * shape.group() * (shape.head_dim + std::uint64_t{1}));
  call->shares = shares_of(call->units, tasks.size());
  call->left = std::vector<std::atomic<std::uint32_t>>(tasks.size());
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const Share& share = call->shares[i];
    call->left[i].store(share.end - share.begin, std::memory_order_relaxed);
    if (share.begin == share.end) clear(tasks[i].out, shape);
  }
  for_each_unit(host.workers, call->units.size(), bytes,
                [all = call.get(), &kernels = host.kernels](std::uint32_t i) { all->run(kernels, i); });
}

}  // namespace sluice::cpu
