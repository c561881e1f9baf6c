#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sluice/admission.hpp"
#include "sluice/engine.hpp"
#include "tools/cli/bench/serve_forwards.hpp"
#include "tools/cli/bench/serve_limits.hpp"
#include "tools/cli/bench/serve_load.hpp"

namespace sluice::tools {

/// A server without a network: an engine that an Admission decides for, and a model around its attention, if there is
/// one. What is attended are the rows, whatever the model makes of them.
class ServeLoop {
 public:
  /// All must outlive it. Graphs of forwards that decode are made here.
  /// @throws as use_graphs and ServeForwards::prepare
  ServeLoop(const EngineOptions& engine, const AdmissionOptions& admission, const PolicySpec& policy,
            const ServeParts& parts);
  /// Requests come at `rate` a second, all at once if that is 0; returns when all have ended, or the limits say so.
  /// @throws Interrupted; Error{Errc::out_of_capacity} if there is room for none of the requests though they were
  /// alone, unless there are limits to hold
  [[nodiscard]] ServeResult run(std::span<const LoadRequest> load, double rate, const ServeLimits& limits = {});
  [[nodiscard]] const sluice::Engine& engine() const noexcept { return engine_; }
  [[nodiscard]] const ServeForwards& forwards() const noexcept { return forwards_; }

 private:
  struct Request;
  struct Run;
  void submit(Run& run);
  [[nodiscard]] bool over(Run& run) const;
  void turn(Run& run);
  void begin(Run& run, const AdmissionChanges& changes);
  void forward(Run& run, const std::vector<TurnItem>& items);
  void count(Run& run, const std::vector<TurnItem>& items, Clock::time_point start);
  void leave(Run& run);

  sluice::Engine engine_;
  Admission admission_;
  PolicySpec policy_;
  bool on_cpu_;
  ServeForwards forwards_;  ///< of the engine
};

}  // namespace sluice::tools
