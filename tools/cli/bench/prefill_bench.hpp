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
  std::string structures = "vertical_slash,query_aware,uniform";
  std::string gammas = "0.9,0.95";
  FlexPrefillSpec flex;
  std::uint32_t chunk = 8192;
  std::uint32_t page_tokens = EngineOptions{}.page_tokens;
  DType dtype = EngineOptions{}.kv_dtype;
  std::uint32_t threads = 0;
  std::uint32_t repeat = 0;  ///< 0: the device's
  std::uint64_t seed = 0;
  DeviceFlags device;
  OutputOptions output;
};

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
  [[nodiscard]] const DeviceInfo& device() const noexcept { return device_->info(); }
  [[nodiscard]] std::uint32_t samples() const noexcept { return samples_; }
  [[nodiscard]] const std::vector<std::uint32_t>& lengths() const noexcept { return lengths_; }

 private:
  /// One length and structure, in device memory.
  struct Prompt {
    const PrefillLayer& layer;
    const PrefillCheck& check;
    std::string name;  ///< for errors
  };
  /// Dense attention of a pass: what choices are held against.
  struct Dense {
    double ms = 0.0;
    std::vector<std::uint32_t> compared;
    std::vector<float> lse;   ///< [tokens, q_heads]
    std::vector<float> rows;  ///< outputs of the tokens `compared`
    std::vector<Json> cells;
  };

  void make_table();
  void run(PromptStructure structure, std::uint32_t length, const std::string& name);
  void run(const Prompt& prompt, std::uint32_t chunk);
  /// The row of `auto`, put together from those of dense attention and of a choice in every chunk: averages over the
  /// layers of a model, where every chunk has its share of the measured times by its work.
  [[nodiscard]] std::vector<Json> automatic(const PrefillPass& pass, const std::vector<Json>& dense,
                                            const std::vector<Json>& chosen) const;
  /// A row's cells for what the pass plans.
  [[nodiscard]] std::vector<Json> measure(const Prompt& prompt, PrefillPass& pass, const std::string& name,
                                          const FlexPrefillSpec& spec, const Dense& dense) const;
  /// Rate for so many (query, key) pairs in every query head.
  [[nodiscard]] double teraflops(std::uint64_t pairs, double ms) const;
  void add_row(const Prompt& prompt, std::uint32_t chunk, const std::string& method, const std::vector<Json>& cells);

  const BenchPrefillOptions& options_;
  cpu::Topology topology_;
  std::shared_ptr<const cpu::Workers> workers_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::uint32_t> lengths_;
  std::uint32_t samples_ = 0;
  std::vector<FlexPrefillSpec> specs_;
  std::vector<PromptStructure> structures_;
  Table table_;
};

}  // namespace sluice::tools
