#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sluice/admission.hpp"
#include "sluice/engine.hpp"
#include "tools/cli/bench/serve_buckets.hpp"
#include "tools/cli/bench/serve_rows.hpp"
#include "tools/llama/graph.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/runner.hpp"

namespace sluice::tools {

/// Makes a graph of what `enqueue` puts on a stream, as `capture` does.
using Capturer = std::function<std::unique_ptr<CapturedWork>(void* stream, const std::function<void()>& enqueue)>;

/// What requests are served by.
struct ServeParts {
  std::shared_ptr<Device> device;
  Stream& stream;      ///< of that device
  ServeRows& rows;     ///< of the engine's largest forward
  const Model* model;  ///< on that device; null: forwards are attention alone
  Graphs graphs = Graphs::automatic;
  Capturer
      capturer{};  ///< for tests, whatever the device; of attention alone. Empty: `capture`, where there are graphs
};

/// What one request has of a forward.
struct ServeItem {
  SequenceId sequence{};
  TurnItem turn;
};

/// Forwards of an engine, one after the other, and of a model around its attention, if there is one. Those that decode
/// and read no prompt are graphs where there are some: one for each size that they are padded to, made by `prepare`.
class ServeForwards {
 public:
  /// All must outlive it.
  /// @throws as use_graphs
  ServeForwards(sluice::Engine& engine, const ServeParts& parts);

  /// Makes the graphs, so that no request waits for one: two forwards of each size, of a sequence of this policy that
  /// is ended again. None may live. Nothing without graphs.
  /// @throws Error  if a forward cannot be enqueued, or with Graphs::on one of attention alone not captured
  void prepare(const PolicySpec& policy);
  /// Those that decode come first. Waits until it has run.
  void run(std::span<const ServeItem> items);
  /// Those so far that were a graph.
  [[nodiscard]] std::uint64_t replays() const noexcept { return replays_ + work_.replays; }
  /// Why the first size has no graph of which none could be made, of attention alone. Empty: each has one.
  [[nodiscard]] const std::string& refusal() const noexcept { return refusal_; }

 private:
  void reserve();
  /// Where a forward is not one of the graphs': for its rows and tokens alone.
  [[nodiscard]] Bucket bucket_of(std::span<const ServeItem> items) const;
  /// What it is padded to, if it is to be a graph.
  [[nodiscard]] std::optional<DecodeSize> graph_of(const Bucket& bucket) const;
  /// Whether a forward of attention alone is to be captured before it runs.
  enum class Capture : std::uint8_t { no, yes };
  /// What it was planned in. @param size  of its graph; none: it is enqueued
  Bucket run(std::span<const ServeItem> items, const Bucket& bucket, const std::optional<DecodeSize>& size,
             Capture captures);
  void attend_alone(const Bucket& bucket, const std::optional<DecodeSize>& size, Capture captures);
  void make_graph(const DecodeSize& size, const std::function<void()>& enqueue);
  void run_model(std::span<const ServeItem> items, const Bucket& bucket, const std::optional<DecodeSize>& size);

  ServeParts parts_;
  sluice::Engine& engine_;
  void* stream_;  ///< as the engine takes it
  bool graphs_;
  std::optional<DecodeSizes> sizes_;                              ///< once there are graphs
  std::map<DecodeSize, std::unique_ptr<CapturedWork>> captured_;  ///< of attention alone
  std::string refusal_;
  std::uint64_t replays_ = 0;                                     ///< of these
  Activations work_;                                              ///< has those of a model
  std::vector<Likeliest> chosen_;
};

}  // namespace sluice::tools
