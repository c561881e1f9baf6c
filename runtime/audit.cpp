#include "runtime/audit.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu/lent.hpp"
#include "runtime/host_kv.hpp"

namespace sluice::runtime {
namespace {

double norm(const float* values, std::uint32_t count) {
  double sum = 0.0;
  for (std::uint32_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]) * values[i];
  return std::sqrt(sum);
}

}  // namespace

void Auditor::run(std::uint32_t layer, std::span<const HeadWork* const> heads, const StepBuffers& buffers) {
  if (heads.empty()) return;
  exact_.resize(std::max(exact_.size(), heads.size()));
  for (const HeadWork* work : heads) {
    AuditBook& book = work->sequence->audit;
    book.report.layers = shape_.layers;
    book.report.q_heads = shape_.q_heads;
    book.report.heads.resize(std::size_t{shape_.layers} * shape_.q_heads);
    book.values.resize(std::size_t{shape_.layers} * shape_.kv_heads);
  }
  attend_exactly(layer, heads, buffers);
  for (std::size_t i = 0; i < heads.size(); ++i) compare(layer, *heads[i], exact_[i], buffers);
}

void Auditor::attend_exactly(std::uint32_t layer, std::span<const HeadWork* const> heads, const StepBuffers& buffers) {
  const std::uint32_t group = shape_.group();
  std::vector<AttendTask> tasks;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const HeadWork& work = *heads[i];
    Exact& exact = exact_[i];
    exact.tokens = work.tokens;
    exact.group = group;
    exact.head_dim = shape_.head_dim;
    exact.order.resize(work.tokens);
    std::iota(exact.order.begin(), exact.order.end(), 0u);
    exact.scores.resize(std::size_t{work.tokens} * group);
    exact.out.resize(std::size_t{group} * shape_.head_dim);
    exact.lse.resize(group);
    tasks.push_back({.q = buffers.q(work.row, work.kv_head * group),
                     .kv = far_view(pool_, work.pages()),
                     .runs = {},
                     .tokens = exact.order,
                     .members = {},
                     .scores = {},
                     .seen = exact.scores.data(),
                     .out = {.out = exact.out.data(), .lse = exact.lse.data()}});
  }
  host_.attend(tasks, shape_, nullptr);
  const cpu::Lent<std::vector<const HeadWork*>> lent(workers_, heads.begin(), heads.end());
  const auto count = static_cast<std::uint32_t>(heads.size());
  workers_.parallel_for(count, [this, layer, works = lent->data()](std::uint32_t i) {
    Exact& exact = exact_[i];
    mark_attended(*works[i], exact);
    exact.largest_value = largest_value(layer, *works[i]);
  });
}

void Auditor::mark_attended(const HeadWork& work, Exact& exact) const {
  const std::uint32_t all = ~0u >> (32 - shape_.group());
  exact.heads.resize(work.tokens);
  for (std::uint32_t t = 0; t < work.tokens; ++t) exact.heads[t] = work.near.contains(t) ? all : 0;
  const std::uint32_t searching = all & ~work.bypass.heads;
  for (const SelectionRow* row : {&work.placement.far, &work.placement.fetch}) {
    for (const PageRun& run : row->runs) {
      const std::uint32_t first = run.page * layout_.page_tokens;
      for (std::uint32_t t = first + run.begin; t < first + run.end; ++t) exact.heads[t] |= searching;
    }
    for (std::size_t i = 0; i < row->tokens.size(); ++i) {
      exact.heads[row->tokens[i]] |= row->members.empty() ? searching : row->members[i];
    }
  }
}

void Auditor::compare(std::uint32_t layer, const HeadWork& work, Exact& exact, const StepBuffers& buffers) {
  const std::uint32_t first = work.kv_head * shape_.group();
  Sequence& sequence = *work.sequence;
  const bool corrected =
      sequence.spec.uses(Source::lsh) && sequence.spec.budget.kind == BudgetKind::sampled;
  exact.attended_out = buffers.merged_out(work.row, first);
  exact.attended_lse = buffers.merged_lse(work.row, first);
  exact.estimated = corrected ? ~0u : work.bypass.heads;
  for (std::uint32_t h = 0; h < shape_.group(); ++h) {
    const HeadFinding found = find(exact, h, sequence.audit.watched);
    add(found, sequence.audit.report.heads[std::size_t{layer} * shape_.q_heads + first + h]);
    sequence.stats.coverage.add(found.coverage);
    sequence.stats.overlap.add(found.overlap);
    if (found.watched) sequence.stats.watched.add(found.watched_kept);
  }
}

double Auditor::largest_value(std::uint32_t layer, const HeadWork& work) {
  AuditBook::Values& values = work.sequence->audit.values[std::size_t{layer} * shape_.kv_heads + work.kv_head];
  HostKv reader(host_, shape_, pool_, work.pages());
  constexpr std::uint32_t kBlock = 64;
  std::vector<float> rows(std::size_t{kBlock} * shape_.head_dim);
  while (values.seen < work.tokens) {
    const std::uint32_t count = std::min(kBlock, work.tokens - values.seen);
    reader.values(values.seen, count, rows.data());
    for (std::uint32_t i = 0; i < count; ++i) {
      values.largest = std::max(values.largest, norm(&rows[std::size_t{i} * shape_.head_dim], shape_.head_dim));
    }
    values.seen += count;
  }
  return values.largest;
}

}  // namespace sluice::runtime
