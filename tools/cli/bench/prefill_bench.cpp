#include "tools/cli/bench/prefill_bench.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/device/host_device.hpp"
#include "scheduler/prefill_auto.hpp"
#include "sluice/audit.hpp"
#include "sluice/error.hpp"
#include "sluice/step/forward_verbs.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tools/cli/bench/batch_rows.hpp"
#include "tools/cli/bench/bench.hpp"
#include "tools/cli/bench/prefill_automatic.hpp"
#include "tools/cli/bench/prefill_clusters.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {
namespace {

/// Rows whose outputs are held against dense attention's.
constexpr std::uint32_t kComparedRows = 1024;

std::vector<std::uint32_t> compared_rows(std::uint32_t tokens) {
  const std::uint32_t count = std::min(tokens, kComparedRows);
  std::vector<std::uint32_t> rows;
  for (std::uint64_t i = 0; i < count; ++i) rows.push_back(static_cast<std::uint32_t>((i + 1) * tokens / count - 1));
  return rows;
}

ShareHistogram coverage_of(const std::vector<float>& lse, const std::vector<float>& all) {
  ShareHistogram coverage;
  for (std::size_t i = 0; i < lse.size(); ++i) coverage.add(std::min(1.0, std::exp(double{lse[i]} - all[i])));
  return coverage;
}

}  // namespace

std::vector<std::string> listed(const std::string& text, const char* option) {
  return text.empty() ? std::vector<std::string>() : split_list(text, option);
}

PrefillBench::PrefillBench(const BenchPrefillOptions& options)
    : options_(options),
      workers_(std::make_shared<const cpu::Workers>(topology_, cpu::WorkersOptions{.threads = options.threads})),
      device_(make_device(options.device)) {
  if (!device_) device_ = std::make_shared<cpu::HostDevice>(workers_);
  stream_ = device_->create_stream("device");
  const bool host = !device_->info().own_processor;
  lengths_ = parse_counts(!options.lengths.empty() ? options.lengths
                          : host                   ? "2K,8K"
                                                   : "4K,16K,64K,128K,256K",
                          "--length");
  rows_ = parse_counts(options.rows, "--rows");
  samples_ = options.repeat != 0 ? options.repeat : host ? 3 : 5;
  for (const std::string& gamma : listed(options.gammas, "--gammas")) {
    PrefillSpec spec{.mode = PrefillMode::flexprefill, .flex = options.flex};
    spec.flex.gamma = parse_gamma(gamma, "--gammas");
    validate(spec);
    specs_.push_back(spec);
  }
  for (const std::string& text : listed(options.others, "--others")) {
    specs_.push_back(parse_prefill(text, options.flex));
    if (const PrefillMode mode = specs_.back().mode; mode != PrefillMode::streaming && mode != PrefillMode::minference)
      throw Error(Errc::invalid_argument,
                  "--others: '" + text + "' is measured without being named; name streaming or minference");
  }
  for (const std::string& name : split_list(options.structures, "--structures"))
    structures_.push_back(parse_prompt_structure(name, "--structures"));
  if (structures_.empty()) {
    throw Error(Errc::invalid_argument, "--structures: the list is empty; name at least one, e.g. vertical_slash");
  }
  make_table();
}

std::uint64_t PrefillBench::Prompts::tokens() const noexcept {
  std::uint64_t sum = 0;
  for (const auto& layer : layers) sum += layer->options().tokens;
  return sum;
}

std::uint64_t PrefillBench::Prompts::pairs() const noexcept {
  std::uint64_t sum = 0;
  for (const auto& layer : layers) sum += std::uint64_t{layer->options().tokens} * (layer->options().tokens + 1) / 2;
  return sum;
}

void PrefillBench::Prompts::require(const PrefillBatch& batch, const std::string& what) const {
  for (std::size_t i = 0; i < checks.size(); ++i) {
    checks[i]->require(*batch.prompts()[i], what + ", " + name + ", prompt " + std::to_string(i));
  }
}

void PrefillBench::run(ProgressBar& bar) {
  std::size_t done = 0;
  for (const PromptStructure structure : structures_) {
    for (const std::uint32_t length : lengths_) {
      for (const std::uint32_t rows : rows_) {
        const std::string name = std::string(to_string(structure)) + ", " + std::to_string(length) + " tokens" +
                                 (rows == 1 ? "" : " x " + std::to_string(rows));
        stop_if_interrupted();
        bar.update(done++, structures_.size() * lengths_.size() * rows_.size(), name);
        run(structure, length, rows, name);
      }
    }
  }
}

void PrefillBench::make_table() {
  using Show = Column::Show;
  table_ = {.key = "prefill",
            .title =
                "Attention of one layer of prompts (median; rows: prompts whose chunks are attended in one call; "
                "ratios to dense of the same rows in the same run; TFLOP/s of what is computed; coverage: softmax mass "
                "that was attended, over rows and heads; error: L2, "
                "relative to dense)",
            .columns = {{"structure", "structure"},
                        {"length_tokens", "length"},
                        {"rows", "rows"},
                        {"chunk_tokens", "chunk"},
                        {"method", "method"},
                        {"total_ms", "ms", 3},
                        {"select_ms", "choice ms", 3},
                        {"attend_ms", "attention ms", 3},
                        {"tflops", "TFLOP/s", 2},
                        {"speedup_over_dense", "x dense", 2},
                        {"blocks_share", "blocks", 1, Show::percent},
                        {"coverage_mean", "coverage", 4},
                        {"coverage_p5", "p5", 3},
                        {"output_error", "error", 4},
                        {"query_aware_share", "query-aware", 1, Show::percent}}};
  clusters_ = {.key = "clusters",
               .title =
                   "K-means of the keys of one layer of prompts, all KV heads (median; as `tactic | int4` has it once "
                   "behind a prompt; of dense: its time, as a share of that of dense attention)",
               .columns = {{"structure", "structure"},
                           {"length_tokens", "length"},
                           {"rows", "rows"},
                           {"clusters", "clusters of a head"},
                           {"iterations", "iterations, most"},
                           {"cluster_ms", "k-means ms", 3},
                           {"dense_ms", "dense ms", 3},
                           {"of_dense_share", "of dense", 1, Show::percent}}};
}

void PrefillBench::run(PromptStructure structure, std::uint32_t length, std::uint32_t rows, const std::string& name) {
  Prompts prompts{.structure = structure, .length = length, .name = name};
  std::vector<PrefillLayerOptions> wanted;
  for (const std::uint32_t tokens : row_lengths(rows, length, options_.ragged)) {
    wanted.push_back(
        {.shape = options_.shape,
         .layout = {.page_tokens = options_.page_tokens, .head_dim = options_.shape.head_dim, .dtype = options_.dtype},
         .tokens = tokens,
         .structure = structure,
         .seed = options_.seed + wanted.size()});
  }
  for (const std::string& reason : stages_of(*device_)->unsupported_reasons(options_.shape, wanted.front().layout)) {
    throw Error(Errc::unsupported, "bench prefill: " + reason);
  }
  const PrefillPages pages(wanted, *device_);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    prompts.layers.push_back(
        std::make_unique<PrefillLayer>(wanted[i], pages.base(), pages.first(i), *device_, *stream_, *workers_));
    prompts.checks.push_back(std::make_unique<PrefillCheck>(*prompts.layers.back(), *device_, *stream_, *workers_));
  }
  run(prompts, length);
  if (options_.clusters != 0) run_clusters(prompts);
  if (options_.chunk < length) run(prompts, options_.chunk);
}

void PrefillBench::run(const Prompts& prompts, std::uint32_t chunk) {
  PrefillBatch batch(prompts.layers, chunk, *device_, *stream_);
  batch.attend();
  prompts.require(batch, "dense attention");
  Dense dense{.ms = 0.0, .compared = {}, .lse = batch.lse(), .rows = {}, .cells = {}};
  for (const auto& layer : prompts.layers) dense.compared.push_back(compared_rows(layer->options().tokens));
  dense.rows = batch.outputs(dense.compared);
  dense.ms = batch.time(samples_, [&] { batch.attend(); });
  const double rate = teraflops(prompts.pairs(), dense.ms);
  dense.cells = {dense.ms, nullptr, dense.ms, rate, 1.0, 1.0, 1.0, 1.0, 0.0, nullptr};
  add_row(prompts, chunk, "dense", dense.cells);
  for (const PrefillSpec& spec : specs_) {
    const std::string name = to_text(spec);
    batch.choose_everywhere();
    const std::vector<Json> cells = measure(prompts, batch, name, spec, dense);
    add_row(prompts, chunk, name, cells);
    if (spec.mode != PrefillMode::flexprefill) continue;
    add_row(prompts, chunk, to_text({.mode = PrefillMode::automatic, .flex = spec.flex}),
            automatic(batch, dense.cells, cells));
  }
}

void PrefillBench::run_clusters(const Prompts& prompts) {
  PrefillClusters clusters(prompts.layers, options_.clusters, *device_, *stream_);
  clusters.cluster();
  clusters.require();
  PrefillBatch batch(prompts.layers, prompts.length, *device_, *stream_);
  const double dense = batch.time(samples_, [&] { batch.attend(); });
  const double ms = batch.time(samples_, [&] { clusters.cluster(); });
  clusters_.rows.push_back({to_string(prompts.structure), prompts.length, prompts.layers.size(), clusters.clusters(),
                            ClusterOptions{}.iterations, ms, dense, ms / dense});
}

std::vector<Json> PrefillBench::automatic(const PrefillBatch& batch, const std::vector<Json>& dense,
                                          const std::vector<Json>& chosen) const {
  double all = 0.0, by_choice = 0.0, blocks = 0.0, attended = 0.0;
  for (const auto& prompt : batch.prompts()) {
    const std::vector<double> shares = automatic_shares(*prompt, options_.shape.q_heads, options_.shape.layers,
                                                        device_->forward_verbs()->prefill_costs());
    for (std::size_t c = 0; c < shares.size(); ++c) {
      const scheduler::ChunkWork work{.first = prompt->first(c), .count = prompt->keys(c) - prompt->first(c)};
      all += work.pairs();
      attended += shares[c] * work.pairs();
      blocks += work.key_blocks();
      by_choice += shares[c] * work.key_blocks();
    }
  }
  attended /= all;
  by_choice /= blocks;
  const auto mixed = [&](std::size_t cell) {
    return attended * chosen[cell].get<double>() + (1.0 - attended) * dense[cell].get<double>();
  };
  const double choice_ms = by_choice * chosen[1].get<double>();
  const double total_ms = choice_ms + mixed(2);
  return {total_ms, choice_ms, mixed(2), nullptr, dense[0].get<double>() / total_ms,
          mixed(5), mixed(6),  nullptr,  nullptr, chosen[9]};
}

std::vector<Json> PrefillBench::measure(const Prompts& prompts, PrefillBatch& batch, const std::string& name,
                                        const PrefillSpec& spec, const Dense& dense) const {
  batch.choose(spec);
  batch.attend();
  prompts.require(batch, name);
  const ShareHistogram coverage = coverage_of(batch.lse(), dense.lse);
  const double error = relative_error(batch.outputs(dense.compared), dense.rows);
  std::uint64_t kept = 0, causal = 0, query_aware = 0, heads = 0;
  for (const auto& prompt : batch.prompts()) {
    const std::vector<PrefillChoice> choices = prompt->choices();
    for (std::size_t i = 0; i < choices.size(); ++i) {
      const bool chosen = prompt->chooses(i / options_.shape.q_heads);
      kept += chosen ? choices[i].kept : choices[i].causal;
      causal += choices[i].causal;
      query_aware += chosen ? choices[i].query_aware : 0;
      heads += chosen ? 1 : 0;
    }
  }
  const double choice_ms = batch.time(samples_, [&] { batch.choose(spec); });
  const double attend_ms = batch.time(samples_, [&] { batch.attend(); });
  // Every row computes about half of the block on the diagonal, and all of the others that it keeps.
  const std::uint64_t diagonal = prompts.tokens() * (kPrefillBlock - 1) / 2;
  const std::uint64_t pairs = kept * kPrefillBlock * kPrefillBlock / options_.shape.q_heads - diagonal;
  return {choice_ms + attend_ms,
          choice_ms,
          attend_ms,
          teraflops(pairs, attend_ms),
          dense.ms / (choice_ms + attend_ms),
          static_cast<double>(kept) / static_cast<double>(causal),
          coverage.mean(),
          coverage.percentile(0.05),
          error,
          static_cast<double>(query_aware) / static_cast<double>(heads)};
}

double PrefillBench::teraflops(std::uint64_t pairs, double ms) const {
  return 4.0 * options_.shape.head_dim * options_.shape.q_heads * static_cast<double>(pairs) / ms * 1e-9;
}

void PrefillBench::add_row(const Prompts& prompts, std::uint32_t chunk, const std::string& method,
                           const std::vector<Json>& cells) {
  std::vector<Json> row = {to_string(prompts.structure), prompts.length, prompts.layers.size(), chunk, method};
  row.insert(row.end(), cells.begin(), cells.end());
  table_.rows.push_back(std::move(row));
}

}  // namespace sluice::tools
