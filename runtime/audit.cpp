#include "runtime/audit.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cpu/lent.hpp"
#include "runtime/host_kv.hpp"

namespace sluice::runtime {
namespace {

/// Outputs pass through bf16 on a device; an error below this share of the largest value is rounding.
constexpr double kRounding = 1e-2;
/// Watched tokens count in steps that want them.
constexpr double kWanted = 0.01;

double norm(const float* values, std::uint32_t count) {
  double sum = 0.0;
  for (std::uint32_t i = 0; i < count; ++i) sum += static_cast<double>(values[i]) * values[i];
  return std::sqrt(sum);
}

/// Running mean: `count` samples, this one included.
void average(double& mean, double sample, std::uint64_t count) {
  mean += (sample - mean) / static_cast<double>(count);
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
    exact.tokens.resize(work.tokens);
    std::iota(exact.tokens.begin(), exact.tokens.end(), 0u);
    exact.scores.resize(std::size_t{work.tokens} * group);
    exact.out.resize(std::size_t{group} * shape_.head_dim);
    exact.lse.resize(group);
    tasks.push_back({.q = buffers.q(work.row, work.kv_head * group),
                     .kv = far_view(pool_, work.pages()),
                     .runs = {},
                     .tokens = exact.tokens,
                     .members = {},
                     .scores = {},
                     .seen = exact.scores.data(),
                     .out = {.out = exact.out.data(), .lse = exact.lse.data()}});
  }
  host_.attend(tasks, shape_, nullptr);
  const cpu::Lent<std::vector<const HeadWork*>> lent(workers_, heads.begin(), heads.end());
  const auto count = static_cast<std::uint32_t>(heads.size());
  workers_.parallel_for(count, [this, layer, group, works = lent->data()](std::uint32_t i) {
    Exact& exact = exact_[i];
    mark_attended(*works[i], exact);
    exact.overlap.resize(group);
    for (std::uint32_t h = 0; h < group; ++h) exact.overlap[h] = overlap(exact, h);
    exact.largest = largest_value(layer, *works[i]);
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

void Auditor::compare(std::uint32_t layer, const HeadWork& work, const Exact& exact, const StepBuffers& buffers) {
  const std::uint32_t group = shape_.group();
  const double largest = exact.largest;
  Sequence& sequence = *work.sequence;
  for (std::uint32_t h = 0; h < group; ++h) {
    const std::uint32_t head = work.kv_head * group + h;
    const auto weight = [&](std::uint32_t t) {
      return std::exp(static_cast<double>(exact.scores[std::size_t{t} * group + h]) - exact.lse[h]);
    };
    const auto attended = [&] {
      double sum = 0.0;
      for (std::uint32_t t = 0; t < work.tokens; ++t) sum += (exact.heads[t] >> h & 1u) != 0 ? weight(t) : 0.0;
      return sum;
    };
    // What the merged output says of itself is the stronger witness, where it is a plain softmax over a subset.
    const bool estimated =
        (work.bypass.heads >> h & 1u) != 0 ||
        (sequence.spec.uses(Source::lsh) && sequence.spec.budget.kind == BudgetKind::sampled);
    const double coverage =
        estimated ? attended() : std::exp(static_cast<double>(*buffers.merged_lse(work.row, head)) - exact.lse[h]);

    std::vector<float> difference(shape_.head_dim);
    const float* out = buffers.merged_out(work.row, head);
    const float* want = exact.out.data() + std::size_t{h} * shape_.head_dim;
    for (std::uint32_t c = 0; c < shape_.head_dim; ++c) difference[c] = out[c] - want[c];
    const double error = norm(difference.data(), shape_.head_dim);
    const double size = norm(want, shape_.head_dim);
    const double bound = 2.0 * std::max(0.0, 1.0 - coverage) * largest;
    const double hits = exact.overlap[h];

    HeadAudit& audit = sequence.audit.report.heads[std::size_t{layer} * shape_.q_heads + head];
    ++audit.steps;
    average(audit.coverage, coverage, audit.steps);
    audit.coverage_min = std::min(audit.coverage_min, coverage);
    average(audit.overlap, hits, audit.steps);
    average(audit.error, error, audit.steps);
    average(audit.relative_error, size > 0.0 ? error / size : error, audit.steps);
    average(audit.error_bound, bound, audit.steps);
    if (!(error <= bound + kRounding * largest)) ++audit.bound_broken;
    sequence.stats.coverage.add(coverage);
    sequence.stats.overlap.add(hits);

    double mass = 0.0;
    double kept = 0.0;
    for (const std::uint32_t t : sequence.audit.watched) {
      if (t >= work.tokens) continue;
      mass += weight(t);
      if ((exact.heads[t] >> h & 1u) != 0) kept += weight(t);
    }
    if (mass < kWanted) continue;
    ++audit.watched_steps;
    average(audit.watched_mass, mass, audit.watched_steps);
    average(audit.watched_kept, kept / mass, audit.watched_steps);
    sequence.stats.watched.add(kept / mass);
  }
}

double Auditor::overlap(const Exact& exact, std::uint32_t h) {
  const std::uint32_t group = shape_.group();
  const auto n = static_cast<std::uint32_t>(exact.tokens.size());
  std::vector<float> row(n);
  for (std::uint32_t t = 0; t < n; ++t) row[t] = exact.scores[std::size_t{t} * group + h];
  std::vector<std::uint32_t> best(std::min(AuditReport::top_k, n));
  const TopKTask task{.values = row, .k = AuditReport::top_k, .out = best.data()};
  host_.top_k({&task, 1}, nullptr);
  std::size_t hits = 0;
  for (const std::uint32_t t : best) hits += exact.heads[t] >> h & 1u;
  return best.empty() ? 1.0 : static_cast<double>(hits) / static_cast<double>(best.size());
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
