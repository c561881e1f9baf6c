#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sluice/admission.hpp"
#include "sluice/engine.hpp"
#include "tools/cli/bench/serve_load.hpp"

namespace sluice::tools {

/// Queries, keys and values of any forward, in device memory: random numbers of bf16, other ones for every layer.
class RandomRows {
 public:
  RandomRows(Device& device, const AttentionShape& shape, std::uint32_t rows);
  /// [rows, heads, head_dim]; another `salt` has other numbers.
  [[nodiscard]] TensorView rows(std::uint64_t salt, std::uint32_t rows, std::uint32_t heads) const;
  [[nodiscard]] MutableTensorView out(std::uint32_t rows) const;

 private:
  AttentionShape shape_;
  std::uint64_t elements_;
  std::unique_ptr<Buffer> pool_, out_;
};

/// What serving a load came to.
struct ServeResult {
  double seconds = 0.0;               ///< from the first request until the last has ended
  std::uint64_t prompt_tokens = 0;    ///< that requests came with
  std::uint64_t answer_tokens = 0;    ///< that they were given
  std::uint64_t computed_tokens = 0;  ///< of prompts, those that came again behind a preemption included
  std::uint64_t preempted = 0;        ///< times that a request lost its memory
  std::uint64_t forwards = 0;
  std::uint64_t largest_batch = 0;  ///< requests that ran at once
  std::vector<double> first_ms;     ///< from a request's arrival to its first token
  std::vector<double> between_ms;   ///< from a token of a request to its next
};

/// A server without a network or a model: attention alone, of an engine that an Admission decides for.
class ServeLoop {
 public:
  /// `native`: the stream as the engine takes it.
  ServeLoop(const EngineOptions& engine, const AdmissionOptions& admission, const PolicySpec& policy,
            std::shared_ptr<Device> device, const RandomRows& rows, void* stream);
  /// Requests come at `rate` a second, all at once if that is 0; returns when all have ended.
  /// @throws Interrupted
  [[nodiscard]] ServeResult run(std::span<const LoadRequest> load, double rate);

 private:
  struct Request;
  struct Run;
  void turn(Run& run);
  void begin(Run& run, const AdmissionChanges& changes);
  void forward(Run& run, const std::vector<TurnItem>& items);

  sluice::Engine engine_;
  Admission admission_;
  PolicySpec policy_;
  bool on_cpu_;
  const RandomRows& rows_;
  void* stream_;
  std::uint64_t salt_ = 0;
};

}  // namespace sluice::tools
