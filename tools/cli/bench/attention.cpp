// `sluice bench cpu --sections attention`: steps over one layer, each policy beside dense attention and exact top-k.
#include <algorithm>
#include <cmath>
#include <optional>

#include "sluice/error.hpp"
#include "tools/cli/bench/attention_check.hpp"
#include "tools/cli/bench/batch_rows.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/layer.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {
namespace {

/// Everything seen of one method (dense, or a policy) at one length; one sample per step.
struct Samples {
  std::vector<double> total, forecast, select, score, attend, observe;  ///< microseconds
  double expanded = 0.0;  ///< per query head, share of n; summed over steps, as the rest
  double scored = 0.0;    ///< per KV head
  double attended = 0.0;  ///< per KV head
  double overlap = 0.0;   ///< with exact top-k, per query head
  double coverage = 0.0;  ///< per query head
  double error = 0.0;     ///< per query head
  double bypassed = 0.0;  ///< share of the query heads
  std::uint32_t steps = 0;
};

bool attends(const SelectionRow& row, std::size_t token, std::uint32_t head) {
  return row.members.empty() || (row.members[token] >> head & 1u) != 0;
}

/// Share of the tokens that each query head attends in `exact` which it also attends in `row`; mean over the group.
double overlap(const SelectionRow& exact, const SelectionRow& row, std::uint32_t group) {
  double sum = 0.0;
  for (std::uint32_t head = 0; head < group; ++head) {
    std::size_t wanted = 0;
    std::size_t found = 0;
    std::size_t at = 0;
    for (std::size_t i = 0; i < exact.tokens.size(); ++i) {
      if (!attends(exact, i, head)) continue;
      ++wanted;
      while (at < row.tokens.size() && row.tokens[at] < exact.tokens[i]) ++at;
      found += at < row.tokens.size() && row.tokens[at] == exact.tokens[i] && attends(row, at, head) ? 1 : 0;
    }
    sum += wanted == 0 ? 1.0 : static_cast<double>(found) / static_cast<double>(wanted);
  }
  return sum / group;
}

class AttentionBench {
 public:
  AttentionBench(const BenchCpuOptions& options, BenchMachine& machine, const std::vector<PolicySpec>& specs)
      : options_(options), machine_(machine), specs_(specs) {}

  /// Fills `dense_` and `policies_` for so many sequences, of which the longest has `length` tokens.
  void run(std::uint32_t length, std::uint32_t rows, ProgressBar& bar) {
    std::vector<std::unique_ptr<SyntheticLayer>> layers;
    for (const std::uint32_t tokens : row_lengths(rows, length, options_.ragged)) {
      layers.push_back(std::make_unique<SyntheticLayer>(sequence(tokens, options_.seed + layers.size()),
                                                        machine_.topology, machine_.builders));
    }
    batch_.clear();
    for (const auto& layer : layers) batch_.push_back(layer.get());
    check_attention(batch_, machine_, specs_);
    dense_ = {};
    policies_.assign(specs_.size(), {});
    for (std::uint32_t pass = 0; pass < options_.repeat; ++pass) {
      run_pass();
      bar.update(pass + 1, options_.repeat, std::to_string(length) + " tokens x " + std::to_string(rows));
    }
  }

  [[nodiscard]] const Samples& dense() const noexcept { return dense_; }
  [[nodiscard]] const std::vector<Samples>& policies() const noexcept { return policies_; }

 private:
  [[nodiscard]] SyntheticOptions sequence(std::uint32_t tokens, std::uint64_t seed) const {
    const PageLayout layout{
        .page_tokens = options_.page_tokens, .head_dim = options_.shape.head_dim, .dtype = options_.dtype};
    SyntheticOptions synthetic{.shape = options_.shape, .layout = layout, .tokens = tokens, .steps = options_.steps};
    synthetic.group_correlation = options_.group_correlation;
    synthetic.pattern = parse_pattern(options_.pattern);
    synthetic.sinks = options_.sinks;
    synthetic.seed = seed;
    for (const PolicySpec& spec : specs_) {
      if (spec.uses(Source::history)) {
        synthetic.prompt_queries = std::max(synthetic.prompt_queries, spec.history.init_queries);
      }
    }
    synthetic.prompt_queries = std::min(synthetic.prompt_queries, tokens);
    return synthetic;
  }

  void run_pass() {
    std::vector<std::unique_ptr<PolicyLayer>> runs;
    // The oracle to compare selections with runs untimed, whether or not it is on the list.
    PolicyLayer oracle(oracle_spec(), batch_, machine_.host);
    oracle.begin();
    for (const PolicySpec& spec : specs_) {
      runs.push_back(std::make_unique<PolicyLayer>(spec, batch_, machine_.host));
      runs.back()->begin();
    }
    DenseLayer dense(batch_, machine_.host);
    StepOutput want;
    StepOutput got;
    for (std::uint32_t step = 0; step < options_.steps; ++step) {
      stop_if_interrupted();
      evictor_.evict();
      const auto start = Clock::now();
      dense.attend(step, want);
      dense_.total.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
      oracle.step(step, got);
      for (std::size_t p = 0; p < runs.size(); ++p) {
        evictor_.evict();
        add_times(runs[p]->step(step, got), policies_[p]);
        add_quality(*runs[p], oracle, want, got, tokens_at(step), policies_[p]);
      }
    }
  }

  /// Of all sequences together.
  [[nodiscard]] double tokens_at(std::uint32_t step) const {
    double tokens = 0.0;
    for (const SyntheticLayer* each : batch_) tokens += each->options().tokens + step + 1;
    return tokens;
  }

  [[nodiscard]] PolicySpec oracle_spec() const {
    PolicySpec spec = parse_policy("topk");
    if (!specs_.empty() && specs_.front().sources != 0) spec.budget = specs_.front().budget;
    return spec;
  }

  static void add_times(const PhaseTimes& times, Samples& samples) {
    samples.total.push_back(times.total());
    samples.forecast.push_back(times.forecast);
    samples.select.push_back(times.select);
    samples.score.push_back(times.score);
    samples.attend.push_back(times.attend);
    samples.observe.push_back(times.observe);
  }

  /// Shares of the `tokens` of all sequences; what is of heads is a mean over those of all sequences.
  void add_quality(const PolicyLayer& run, const PolicyLayer& oracle, const StepOutput& want, const StepOutput& got,
                   double tokens, Samples& samples) const {
    const AttentionShape& shape = options_.shape;
    const scheduler::SelectCounters counters = run.counters();
    const double q_heads = static_cast<double>(want.lse.size());
    samples.expanded += static_cast<double>(counters.expanded_per_head) / (tokens * shape.q_heads);
    samples.scored += static_cast<double>(counters.scored) / (tokens * shape.kv_heads);
    for (std::size_t head = 0; head < run.rows().size(); ++head) {
      samples.attended += static_cast<double>(run.rows()[head].attended()) / (tokens * shape.kv_heads);
      samples.overlap +=
          overlap(oracle.rows()[head], run.rows()[head], shape.group()) / static_cast<double>(run.rows().size());
    }
    for (std::size_t head = 0; head < want.lse.size(); ++head) {
      const std::size_t at = head * shape.head_dim;
      samples.coverage += std::exp(static_cast<double>(got.lse[head]) - want.lse[head]) / q_heads;
      samples.error += relative_error({&got.out[at], shape.head_dim}, {&want.out[at], shape.head_dim}) / q_heads;
    }
    samples.bypassed += static_cast<double>(run.bypassed_heads()) / q_heads;
    ++samples.steps;
  }

  const BenchCpuOptions& options_;
  BenchMachine& machine_;
  const std::vector<PolicySpec>& specs_;
  CacheEvictor evictor_;
  LayerBatch batch_;
  Samples dense_;
  std::vector<Samples> policies_;
};

std::vector<PolicySpec> specs_of(const BenchCpuOptions& options) {
  std::vector<PolicySpec> specs;
  for (std::string item : split_policies(options.policies)) {
    const auto set = [&](const std::string& option) {
      item += (item.find(':') == std::string::npos ? ':' : ',') + option;
    };
    const PolicySpec plain = parse_policy(item);
    if (options.alpha > 0.0 && plain.uses(Source::history)) set("alpha=" + shortest(options.alpha));
    if (!options.budget.empty() && (plain.uses(Source::history) || plain.uses(Source::exact)))
      set("budget=" + options.budget);
    specs.push_back(parse_policy(item));
  }
  if (specs.empty())
    throw Error(Errc::invalid_argument, "--policies: the list is empty; name at least one, e.g. topk,lfps");
  return specs;
}

Table empty_table() {
  using Show = Column::Show;
  return {.key = "attention",
          .title =
              "Attention of one decode step over one layer (median time; ratios to dense and top-k of the same rows "
              "in this run)",
          .columns = {{"length_tokens", "length"},
                      {"rows", "rows"},
                      {"method", "method"},
                      {"time_us", "time us"},
                      {"speedup_over_dense", "x dense", 2},
                      {"speedup_over_topk", "x topk", 2},
                      {"forecast_us", "forecast us"},
                      {"select_us", "select us"},
                      {"score_us", "of it scoring"},
                      {"attend_us", "attend us"},
                      {"observe_us", "observe us"},
                      {"expanded_share", "EXP/n head", 2, Show::percent},
                      {"scored_share", "scored/n", 2, Show::percent},
                      {"attended_share", "attended/n", 2, Show::percent},
                      {"topk_overlap", "overlap", 3},
                      {"coverage_mean", "coverage", 4},
                      {"output_error", "error", 4},
                      {"bypassed_share", "bypassed", 1, Show::percent}}};
}

void add_rows(std::uint32_t length, std::uint32_t rows, const AttentionBench& bench,
              const std::vector<std::string>& names, const std::vector<PolicySpec>& specs, Table& table) {
  const double dense = percentile(bench.dense().total, 0.5);
  std::optional<double> topk;
  for (std::size_t p = 0; p < specs.size(); ++p) {
    if (specs[p].uses(Source::exact)) topk = percentile(bench.policies()[p].total, 0.5);
  }
  const auto over_topk = [&](double time) { return topk ? Json(*topk / time) : Json(); };
  table.rows.push_back({length, rows, "dense", dense, 1.0, over_topk(dense), nullptr, nullptr, nullptr, dense, nullptr,
                        nullptr, nullptr, 1.0, nullptr, 1.0, 0.0, 0.0});
  for (std::size_t p = 0; p < specs.size(); ++p) {
    const Samples& s = bench.policies()[p];
    const double time = percentile(s.total, 0.5);
    const auto median = [](const std::vector<double>& samples) { return Json(percentile(samples, 0.5)); };
    const auto mean = [&](double sum) { return Json(sum / s.steps); };
    table.rows.push_back({length, rows, names[p], time, dense / time, over_topk(time), median(s.forecast),
                          median(s.select), median(s.score), median(s.attend), median(s.observe), mean(s.expanded),
                          mean(s.scored), mean(s.attended), mean(s.overlap), mean(s.coverage), mean(s.error),
                          mean(s.bypassed)});
  }
}

}  // namespace

Table bench_attention(const BenchCpuOptions& options, BenchMachine& machine, ProgressBar& bar) {
  const std::vector<PolicySpec> specs = specs_of(options);
  const std::vector<std::string> names = split_policies(options.policies);
  Table table = empty_table();
  AttentionBench bench(options, machine, specs);
  try {
    for (const std::uint32_t length : parse_counts(options.lengths, "--length")) {
      for (const std::uint32_t rows : parse_counts(options.rows, "--rows")) {
        bench.run(length, rows, bar);
        add_rows(length, rows, bench, names, specs, table);
      }
    }
  } catch (const Interrupted&) {  // The lengths that are finished are a result.
  }
  return table;
}

}  // namespace sluice::tools
