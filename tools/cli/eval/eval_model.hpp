#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sluice/device.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/eval/passages.hpp"
#include "tools/cli/eval/report.hpp"
#include "tools/cli/eval/tasks.hpp"
#include "tools/cli/prefill_flags.hpp"
#include "tools/cli/text/output.hpp"
#include "tools/cli/text/progress_bar.hpp"

namespace sluice::tools {

struct EvalOptions {
  std::string model;
  std::string tasks = "niah,multikey,kv";
  std::string lengths = "2048,8192";
  std::string policies = "presets";
  TaskEvalOptions task;
  PrefillFlags prefill;
  PassageFlags passages;
  std::string haystack;
  std::string near = "5%";
  std::string far;
  std::string far_shape;
  std::string prompts;
  std::string needles;
  std::string needle_tokens = "128K";
  std::uint32_t needle_steps = 8;
  std::vector<double> sinks;
  std::string plot;
  EngineFlags engine;
  DeviceFlags device;
  OutputOptions output;
};

/// What is asked of a model, and of which policies.
struct EvalPlan {
  NamedPolicies policies;
  std::vector<PrefillSpec> prefills;
  std::vector<Cell> cells;
  std::vector<std::uint32_t> passages;  ///< lengths
  std::shared_ptr<Device> device;
};

/// The model's tasks and passages, into a report of `plan.policies`, which must outlive it. `flags` get what the model
/// decides. Interrupted, the report has what is finished.
std::unique_ptr<EvalReport> evaluate_model(const EvalOptions& options, EngineFlags& flags, const EvalPlan& plan,
                                           ProgressBar& bar);

}  // namespace sluice::tools
