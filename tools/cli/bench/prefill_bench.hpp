#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/device.hpp"
#include "sluice/engine_options.hpp"
#include "sluice/prefill.hpp"
#include "sluice/shape.hpp"
#include "tools/cli/bench/prefill_batch.hpp"
#include "tools/cli/bench/prefill_check.hpp"
#include "tools/cli/bench/prefill_layer.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/text/output.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

struct BenchPrefillOptions {
  std::string shape_name = "llama-3.1-8b";
  AttentionShape shape{.layers = 1, .q_heads = 0, .kv_heads = 0, .head_dim = 0};  ///< zeros: from shape_name
  std::string lengths;                                                            ///< empty: the device's
  std::string rows = "1";    ///< prompts that are attended together
  std::uint32_t ragged = 0;  ///< tokens of the shortest of them; 0: all are of one length
  std::string structures = "vertical_slash,query_aware,uniform";
  std::string gammas = "0.9,0.95";
  std::string others;  ///< prefill modes that choose otherwise than FlexPrefill
  FlexPrefillSpec flex;
  std::uint32_t chunk = 8192;
  std::uint32_t clusters = 0;  ///< tokens of a cluster; 0: none are made
  std::uint32_t page_tokens = EngineOptions{}.page_tokens;
  DType dtype = EngineOptions{}.kv_dtype;
  std::uint32_t threads = 0;
  std::uint32_t repeat = 0;  ///< 0: the device's
  std::uint64_t seed = 0;
  DeviceFlags device;
  OutputOptions output;
};

/// The items of a list that may be empty.
[[nodiscard]] std::vector<std::string> listed(const std::string& text, const char* option);

/// Attention of one layer of prompts, dense and by choice: a table with a row for every structure, length, chunk and
/// method. Every result is checked before it is timed.
class PrefillBench {
 public:
  /// `options` must outlive it.
  /// @throws Error{Errc::invalid_argument} naming the flag that is wrong
  explicit PrefillBench(const BenchPrefillOptions& options);

  /// @throws Interrupted between measurements; the rows that are finished stay
  void run(ProgressBar& bar);

  [[nodiscard]] Table take() { return std::move(table_); }
  /// What k-means of the prompts' keys takes; no rows unless it is asked for.
  [[nodiscard]] Table take_clusters() { return std::move(clusters_); }
  [[nodiscard]] const DeviceInfo& device() const noexcept { return device_->info(); }
  [[nodiscard]] std::uint32_t samples() const noexcept { return samples_; }
  [[nodiscard]] const std::vector<std::uint32_t>& lengths() const noexcept { return lengths_; }
  [[nodiscard]] const std::vector<std::uint32_t>& rows() const noexcept { return rows_; }

 private:
  /// Prompts of one structure that are attended together, in device memory.
  struct Prompts {
    PromptStructure structure{};
    std::uint32_t length = 0;  ///< of the longest
    std::vector<std::unique_ptr<PrefillLayer>> layers{};
    std::vector<std::unique_ptr<PrefillCheck>> checks{};  ///< likewise
    std::string name{};                                   ///< for errors
    [[nodiscard]] std::uint64_t tokens() const noexcept;
    /// Pairs of a query and a key that it sees, of one query head.
    [[nodiscard]] std::uint64_t pairs() const noexcept;
    /// Makes sure that the batch's last attention is what it should be. @throws as PrefillCheck::require
    void require(const PrefillBatch& batch, const std::string& what) const;
  };
  /// Dense attention of a pass: what choices are held against.
  struct Dense {
    double ms = 0.0;
    std::vector<std::vector<std::uint32_t>> compared;  ///< [prompts]
    std::vector<float> lse;                            ///< [prompts, tokens, q_heads]
    std::vector<float> rows;                           ///< outputs of the tokens `compared`
    std::vector<Json> cells;
  };

  void make_table();
  void run(PromptStructure structure, std::uint32_t length, std::uint32_t rows, const std::string& name);
  void run(const Prompts& prompts, std::uint32_t chunk);
  void run_clusters(const Prompts& prompts);
  /// The row of `auto`, put together from those of dense attention and of a choice in every chunk: averages over the
  /// layers of a model, where every chunk has its share of the measured times by its work.
  [[nodiscard]] std::vector<Json> automatic(const PrefillBatch& batch, const std::vector<Json>& dense,
                                            const std::vector<Json>& chosen) const;
  /// A row's cells for what the batch plans.
  [[nodiscard]] std::vector<Json> measure(const Prompts& prompts, PrefillBatch& batch, const std::string& name,
                                          const PrefillSpec& spec, const Dense& dense) const;
  /// Rate for so many (query, key) pairs in every query head.
  [[nodiscard]] double teraflops(std::uint64_t pairs, double ms) const;
  void add_row(const Prompts& prompts, std::uint32_t chunk, const std::string& method, const std::vector<Json>& cells);

  const BenchPrefillOptions& options_;
  cpu::Topology topology_;
  std::shared_ptr<const cpu::Workers> workers_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::uint32_t> lengths_;
  std::vector<std::uint32_t> rows_;
  std::uint32_t samples_ = 0;
  std::vector<PrefillSpec> specs_;
  std::vector<PromptStructure> structures_;
  Table table_;
  Table clusters_;
};

}  // namespace sluice::tools
