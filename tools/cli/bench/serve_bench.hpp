#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sluice/admission.hpp"
#include "tools/cli/bench/serve_loop.hpp"
#include "tools/cli/device_flags.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/text/output.hpp"
#include "tools/cli/text/report.hpp"

namespace sluice::tools {

struct BenchServeOptions {
  std::string shape_name = "llama-3.1-8b";
  AttentionShape shape{.layers = 4, .q_heads = 0, .kv_heads = 0, .head_dim = 0};  ///< zeros: from shape_name
  std::string model;                                                              ///< a directory, or
  std::string random_weights;  ///< a known shape; neither: attention alone
  std::string structure = "vertical_slash";
  std::string policies = "sluice";
  std::string rates = "1,4";
  LoadOptions load;
  ServeLimits limits;
  bool bisect = false;
  std::uint32_t batch = 8;
  std::uint32_t prefills = 4;
  double slowdown = 0.0;
  std::uint64_t kv_bytes = 0;  ///< device memory for keys, values and what goes with them; 0: what --near-size says
  std::uint64_t watermark_pages = 0, near_pages = 0, near_pages_per_sequence = 0;
  Graphs graphs = Graphs::automatic;
  EngineFlags engine;
  DeviceFlags device;
  OutputOptions output;
};

/// Who serves: a policy, in a placement of its own if its name says so, as `stream/psa` does; or dense attention with
/// all keys and values in device memory.
struct ServeMethod {
  std::string name;
  bool dense = false;
  std::optional<PlacementMode> placement{};  ///< none: --placement
  PolicySpec policy;
};
/// @throws Error{Errc::invalid_argument} if the list is empty, for what is no policy or placement, and for `dense`
///         without --kv-size
[[nodiscard]] std::vector<ServeMethod> parse_serve_methods(const BenchServeOptions& options);

/// Serves one load by one method after the other, at one rate after the other.
class ServeBench {
 public:
  /// `model`: on the device; null: attention alone. `load`: for the highest rate.
  ServeBench(const BenchServeOptions& options, const AttentionShape& shape, const Model* model,
             std::shared_ptr<Device> device, std::vector<LoadRequest> load);

  /// @throws Error{Errc::out_of_capacity} if a method has no room in --kv-size; as use_graphs; nothing is built
  void check(const std::vector<ServeMethod>& methods) const;
  /// What follows is of this method.
  void take_method(const ServeMethod& method);
  /// A row; whether the limits were held.
  bool run(double rate);
  /// A row of the second table: the largest rate that held them, of what was run.
  void close_method();
  [[nodiscard]] std::vector<Table> tables() const {
    return options_.limits.judge() ? std::vector{table_, held_} : std::vector{table_};
  }

 private:
  [[nodiscard]] EngineOptions engine_options(const ServeMethod& method) const;
  void fit_device_memory(const ServeMethod& method, EngineOptions& sizes) const;
  void warm_up();

  const BenchServeOptions& options_;
  AttentionShape shape_;
  const Model* model_;
  std::shared_ptr<Device> device_;
  std::vector<LoadRequest> load_;
  std::uint32_t longest_;  ///< tokens of a request, its answer included
  std::unique_ptr<Stream> stream_;
  ServeRows rows_;
  std::string method_;
  std::unique_ptr<ServeLoop> loop_;
  std::uint64_t room_tokens_ = 0;        ///< of all that run
  std::vector<std::vector<Json>> kept_;  ///< of this method: rate, tokens/s, p99 between tokens, where limits were held
  Table table_, held_;
};

}  // namespace sluice::tools
