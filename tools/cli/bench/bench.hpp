#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "cpu/stages/stages.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/engine.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "sluice/units.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/synthetic/synthetic.hpp"
#include "tools/cli/text/command.hpp"
#include "tools/cli/text/interrupt.hpp"
#include "tools/cli/text/progress_bar.hpp"

namespace sluice::tools {

struct BenchCpuOptions {
  std::string shape_name = "llama-3.1-8b";
  AttentionShape shape{.layers = 1, .q_heads = 0, .kv_heads = 0, .head_dim = 0};  ///< zeros: from shape_name
  std::string lengths = "131072";
  std::string rows = "1";    ///< sequences of a call
  std::uint32_t ragged = 0;  ///< tokens of a call's shortest sequence; 0: all are of one length
  std::string policies = "topk,lfps";
  double alpha = 0.0;  ///< 0: the policy's
  std::string budget;  ///< empty: the policy's
  double group_correlation = 0.5;
  std::string pattern = "structured";
  std::vector<double> sinks;  ///< see SyntheticOptions::sinks
  std::uint32_t page_tokens = EngineOptions{}.page_tokens;
  DType dtype = EngineOptions{}.kv_dtype;
  std::uint32_t threads = 1;
  std::uint32_t steps = 12;
  std::uint32_t repeat = 1;
  std::uint64_t seed = 0;
  std::string sections = "attention,kernels";
  OutputOptions output;
};

/// Machine and threads of one benchmark run.
struct BenchMachine {
  explicit BenchMachine(std::uint32_t threads)
      : workers(topology, {.threads = threads}),
        builders(std::make_shared<const cpu::Workers>(topology, cpu::WorkersOptions{})),
        host{.workers = workers} {}
  cpu::Topology topology;
  cpu::Workers workers;                          ///< the measured ones
  std::shared_ptr<const cpu::Workers> builders;  ///< all cores; make the data
  cpu::Host host;                                ///< of `workers`
};

/// Empties the caches of what was measured before, as the other layers of a model would.
class CacheEvictor {
 public:
  CacheEvictor();
  void evict();

 private:
  std::vector<std::uint64_t> data_;
};

/// `sluice bench gpu`.
void add_bench_gpu(CLI::App& bench, int& exit_code);
/// `sluice bench prefill`.
void add_bench_prefill(CLI::App& bench, int& exit_code);
/// `sluice bench decode`.
void add_bench_decode(CLI::App& bench, int& exit_code);
/// `sluice bench serve`.
void add_bench_serve(CLI::App& bench, int& exit_code);

/// @throws Error{Errc::invalid_argument} that lists the patterns.
[[nodiscard]] SyntheticPattern parse_pattern(const std::string& text);

/// |got - want| / |want| (L2), or |got| if `want` is 0.
[[nodiscard]] double relative_error(std::span<const float> got, std::span<const float> want);

/// Dense attention, and each policy against it: times by phase, ratios, and what the policy kept. Interrupted, it
/// returns the lengths that are finished.
/// @throws Error{Errc::device} if a result is wrong; nothing is timed then.
[[nodiscard]] Table bench_attention(const BenchCpuOptions& options, BenchMachine& machine, ProgressBar& bar);

/// The other kernels of a decode step on the GPU, as shares of the rate of a copy in its memory or over the link.
/// @throws as make_device
[[nodiscard]] Table bench_gpu_kernels(const DeviceFlags& flags, const AttentionShape& shape, std::uint32_t page_tokens);

/// Attention over whole pages and over scattered rows as a share of the same threads' read rate.
[[nodiscard]] Table bench_kernels(const BenchCpuOptions& options, BenchMachine& machine);

}  // namespace sluice::tools
