#include <algorithm>
#include <random>

#include "cpu/threads/rates.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

/// K and V that are read: well beyond any cache, short enough to measure often.
constexpr std::uint64_t kBytes = 512 * MiB;
constexpr std::uint32_t kSamples = 7;

struct Pattern {
  const char* name;
  std::vector<PageRun> runs;
  std::vector<std::uint32_t> tokens;
  [[nodiscard]] std::uint64_t attended() const noexcept {
    std::uint64_t sum = tokens.size();
    for (const PageRun& run : runs) sum += run.tokens();
    return sum;
  }
};

std::vector<Pattern> patterns(std::uint32_t tokens, std::uint32_t page_tokens, std::uint64_t seed) {
  Pattern whole{.name = "whole pages", .runs = {}, .tokens = {}};
  Pattern some{.name = "a quarter of the pages", .runs = {}, .tokens = {}};
  Pattern rows{.name = "scattered rows, 2%", .runs = {}, .tokens = {}};
  std::mt19937_64 random(seed);
  for (std::uint32_t page = 0; page < tokens / page_tokens; ++page) {
    const PageRun run{.page = page, .begin = 0, .end = static_cast<std::uint16_t>(page_tokens)};
    whole.runs.push_back(run);
    if (random() % 4 == 0) some.runs.push_back(run);
  }
  for (std::uint32_t token = 0; token < tokens; ++token) {
    if (random() % 50 == 0) rows.tokens.push_back(token);
  }
  return {std::move(whole), std::move(some), std::move(rows)};
}

double median_seconds(const Pattern& pattern, const SyntheticLayer& layer, const cpu::Host& host,
                      CacheEvictor& evictor) {
  const SyntheticOptions& options = layer.options();
  std::vector<float> out(std::size_t{options.shape.q_heads} * options.shape.head_dim);
  std::vector<float> lse(options.shape.q_heads);
  std::vector<AttendTask> tasks(options.shape.kv_heads);
  for (std::uint32_t head = 0; head < tasks.size(); ++head) {
    const std::size_t row = std::size_t{head} * options.shape.group();
    tasks[head].q = layer.query(head, 0);
    tasks[head].kv = layer.view(head);
    tasks[head].runs = pattern.runs;
    tasks[head].tokens = pattern.tokens;
    tasks[head].out = {.out = &out[row * options.shape.head_dim], .lse = &lse[row]};
  }
  std::vector<double> samples;
  for (std::uint32_t i = 0; i < kSamples; ++i) {
    evictor.evict();
    const auto start = Clock::now();
    cpu::attend(host, tasks, options.shape);
    samples.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return percentile(samples, 0.5);
}

}  // namespace

Table bench_kernels(const BenchCpuOptions& options, BenchMachine& machine) {
  const PageLayout layout{
      .page_tokens = options.page_tokens, .head_dim = options.shape.head_dim, .dtype = options.dtype};
  const std::uint64_t token_bytes = 2 * layout.row_bytes() + layout.scale_bytes();
  const std::uint64_t tokens =
      kBytes / (token_bytes * options.shape.kv_heads) / layout.page_tokens * layout.page_tokens;
  const SyntheticLayer layer({.shape = options.shape,
                              .layout = layout,
                              .tokens = static_cast<std::uint32_t>(tokens),
                              .steps = 1,
                              .prompt_queries = 1,
                              .seed = options.seed},
                             machine.topology, machine.builders);
  using Show = Column::Show;
  Table table{.key = "kernels",
              .title = "CPU attention kernels against the read rate of the same threads (median)",
              .columns = {{"pattern", "pattern"},
                          {"threads", "threads"},
                          {"group", "group"},
                          {"head_dim", "head dim"},
                          {"time_us", "time us"},
                          {"gbps", "GB/s", 1},
                          {"read_gbps", "read GB/s", 1},
                          {"share_of_read", "of read rate", 0, Show::percent}}};
  CacheEvictor evictor;
  for (const Pattern& pattern : patterns(static_cast<std::uint32_t>(tokens), layout.page_tokens, options.seed)) {
    // Next to each other in time: a shared machine's rate drifts.
    const double read_gbps = cpu::measure_read_gbps(machine.workers, kBytes);
    const double seconds = median_seconds(pattern, layer, machine.host, evictor);
    const double bytes = static_cast<double>(pattern.attended() * token_bytes * options.shape.kv_heads);
    const double gbps = bytes / seconds / 1e9;
    table.rows.push_back({pattern.name, machine.workers.threads(), options.shape.group(), options.shape.head_dim,
                          1e6 * seconds, gbps, read_gbps, gbps / read_gbps});
  }
  return table;
}

}  // namespace sluice::tools
