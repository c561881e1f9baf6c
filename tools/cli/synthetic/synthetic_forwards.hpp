#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "sluice/engine.hpp"
#include "tools/cli/bench/device.hpp"
#include "tools/cli/synthetic/synthetic.hpp"

namespace sluice::tools {

struct SyntheticForwardsOptions {
  PolicySpec policy;
  std::uint32_t rows = 1;  ///< sequences
  /// Of them, [rows]: tokens of each, the first of the layer's; empty: all of these.
  std::vector<std::uint32_t> lengths{};
  std::uint32_t layers = 1;  ///< all alike
  DType kv_dtype = DType::bf16;
  double near_share = 0.0;
  PlacementMode placement = PlacementMode::hybrid;
  float fetch_share = 0.f;
  Handover handover = Handover::automatic;
  std::uint32_t threads = 0;
  std::uint32_t promotions = EngineOptions{}.promotions;
  std::uint32_t dense_tokens = EngineOptions{}.dense_tokens;
  bool audit = false;                                   ///< every token
  std::function<void(const ForwardTrace&)> on_trace{};  ///< of every step; empty: none is traced
};

/// One engine with as many sequences as it has rows, whose tokens are a synthetic layer's. Steps follow one
/// another: none comes twice, as its pages would lie near the second time.
class SyntheticForwards {
 public:
  /// `layer` and `steps` must outlive it.
  SyntheticForwards(const SyntheticForwardsOptions& options, const SyntheticLayer& layer, const DeviceSteps& steps,
                    std::shared_ptr<Device> device);

  /// Microseconds of a layer, of the next `count` steps: from the plan until the outputs are known to be there.
  /// `calling`, unless null, receives the part of it in which the calling thread works.
  std::vector<double> time(std::uint32_t count, bool graph = false, std::vector<double>* calling = nullptr);
  /// Of a layer of what was timed last: the verbs that it is enqueued as, and nodes of the graph, those counted in that
  /// begin and end a forward; 0 without a graph.
  [[nodiscard]] std::uint32_t verbs() const noexcept { return verbs_; }
  [[nodiscard]] double graph_nodes() const noexcept { return graph_nodes_; }
  /// Whether the next steps are audited, if it was made for audits; they are at first.
  void audit(bool on) noexcept { bucket_.audit = on; }
  /// Whether the next steps are traced, likewise.
  void trace(bool on) noexcept { bucket_.trace = on; }
  /// Output of the first layer and row, of the forward that was run last: [q_heads, head_dim].
  [[nodiscard]] std::vector<float> out() const;
  [[nodiscard]] const sluice::Engine& engine() const noexcept { return *engine_; }
  /// The first row's.
  [[nodiscard]] SequenceId sequence() const noexcept { return items_.front().sequence; }

 private:
  [[nodiscard]] EngineOptions sizes(const SyntheticForwardsOptions& options) const;
  [[nodiscard]] const Bucket& bucket() const noexcept { return bucket_; }
  void take_tensors();
  void import(SequenceId id, std::uint32_t tokens);
  [[nodiscard]] std::unique_ptr<Buffer> prompt_queries(std::uint32_t count) const;
  void put_step(std::uint32_t step);
  [[nodiscard]] std::uint32_t verbs_of(const Bucket& bucket) const;
  void attend();

  const SyntheticLayer& layer_;
  const DeviceSteps& steps_;
  AttentionShape shape_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> queue_;
  void* stream_ = nullptr;
  std::unique_ptr<sluice::Engine> engine_;
  Bucket bucket_;
  std::function<void(const ForwardTrace&)> on_trace_;
  std::uint32_t next_step_ = 0;
  std::uint32_t verbs_ = 0;
  double graph_nodes_ = 0.0;
  std::unique_ptr<Buffer> q_, k_, v_, out_;
  std::vector<PlanItem> items_;
};

}  // namespace sluice::tools
