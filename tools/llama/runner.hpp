#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/engine.hpp"
#include "tools/llama/model.hpp"

namespace sluice::tools {

/// Whether forwards that decode are replayed from graphs of a GPU.
enum class Graphs : std::uint8_t {
  automatic,  ///< where that works
  on,         ///< where it does not, that is an error
  off,
};

[[nodiscard]] const char* to_string(Graphs graphs) noexcept;
/// @throws Error{Errc::invalid_argument} that names the option and lists what it may be.
[[nodiscard]] Graphs parse_graphs(std::string_view text, std::string_view option);

/// Whether forwards on this device, null: the CPU, are replayed, with attention of an engine of that handover. Those
/// that are audited or traced never are.
/// @throws Error{Errc::unsupported} for Graphs::on where they cannot, saying why.
[[nodiscard]] bool use_graphs(Graphs graphs, const Device* device, Handover asked);
/// The same of a model and an engine.
[[nodiscard]] bool use_graphs(Graphs graphs, const Model& model, const sluice::Engine& engine);

class Logits;

/// Runs forwards of a model whose attention an engine plans, one after the other: it has their stream, their buffers,
/// and the graphs that refer to both. Sessions of an engine may share one. Model and engine must be on the same device
/// and outlive it. Held by shared_ptr. Thread safety: none.
class Runner : public std::enable_shared_from_this<Runner> {
 public:
  /// @throws as `use_graphs`
  Runner(const Model& model, sluice::Engine& engine, std::shared_ptr<Device> device, Graphs graphs = Graphs::automatic);

  [[nodiscard]] const Model& model() const noexcept { return model_; }
  [[nodiscard]] sluice::Engine& engine() const noexcept { return engine_; }
  [[nodiscard]] Device* device() const noexcept { return device_.get(); }
  [[nodiscard]] Stream* queue() const noexcept { return queue_.get(); }  ///< of a GPU; else everything is done at once
  [[nodiscard]] void* stream() const noexcept { return stream_; }        ///< the same, for the engine
  [[nodiscard]] bool graphs() const noexcept { return graphs_; }
  /// Forwards so far that were a graph.
  [[nodiscard]] std::uint64_t replays() const noexcept { return work_.replays; }
  /// What so many tokens are decoded in. On a GPU one of 1, 2, 4, ... rows or as many as there may be, for few graphs;
  /// what is left over is padding.
  [[nodiscard]] Bucket decoding(std::uint32_t tokens) const noexcept;

  /// Queues a forward of prompts; the last `chosen` rows get logits.
  void read(std::span<const PlacedToken> tokens, const Attend& attend, std::uint32_t chosen);
  /// Queues one of `bucket`, which decodes: all its rows get logits. Rows behind the tokens are padding.
  void decode(std::span<const PlacedToken> tokens, const Attend& attend, const Bucket& bucket);
  /// Waits for what was queued, and gives the logits of the first `rows` rows that have some.
  [[nodiscard]] std::vector<std::shared_ptr<Logits>> take(std::uint32_t rows);

 private:
  friend class Logits;
  void vacate();

  const Model& model_;
  sluice::Engine& engine_;
  std::shared_ptr<Device> device_;
  std::unique_ptr<Stream> queue_;
  void* stream_ = nullptr;
  bool graphs_;
  Activations work_;
  std::vector<PlacedToken> padded_;
  std::vector<std::weak_ptr<Logits>> left_;  ///< those in the buffers
};

/// Logits after one token. They stay in a Runner's buffers until they are asked for, or until these have the next
/// forward's. Thread safety: the runner's.
class Logits {
 public:
  explicit Logits(std::vector<float> values) : values_(std::move(values)), best_(likeliest(values_)) {}
  /// Row `row` of those that were chosen last.
  Logits(std::shared_ptr<Runner> from, std::uint32_t row, Likeliest best)
      : from_(std::move(from)), row_(row), best_(best) {}

  [[nodiscard]] const Likeliest& best() const noexcept { return best_; }
  /// [vocab_size]  @throws as Model::chosen_logits
  [[nodiscard]] std::span<const float> values();

 private:
  std::shared_ptr<Runner> from_;  ///< null: they are here
  std::uint32_t row_ = 0;
  std::vector<float> values_;
  Likeliest best_;
};

}  // namespace sluice::tools
