#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "sluice/decode.hpp"
#include "sluice/device.hpp"
#include "sluice/policy.hpp"
#include "sluice/tensor.hpp"
#include "sluice/units.hpp"

namespace sluice {

/// Everything that is fixed when an Engine is built.
struct EngineOptions {
  AttentionShape shape;            ///< required
  std::uint32_t page_tokens = 16;  ///< power of two in [8, 256]
  DType kv_dtype = DType::bf16;
  std::uint64_t host_bytes =
      1 * GiB;                     ///< for keys and values; a block of a token page of all layers and KV heads at least
  std::uint64_t near_bytes = 0;    ///< device memory for near pages; what is left of a block is not used
  std::uint32_t rows = 1;          ///< of a forward, padding included
  std::uint32_t sequences = 16;    ///< that live at once
  std::uint32_t max_tokens = 0;    ///< of one sequence; 0: what host_bytes hold
  std::uint32_t max_picks = 2048;  ///< tokens that a query head may choose
  std::uint32_t max_window = 512;  ///< sinks and recent tokens of a policy, together
  std::uint32_t import_rows = 512;  ///< tokens of one import
  std::uint32_t threads = 0;        ///< that answer the far part; 0: the cores of this process, less one
  bool pin_threads = true;
  std::chrono::milliseconds answer_timeout{1'000};  ///< a layer waits no longer for the far part, by the device's clock
  std::chrono::milliseconds timeout{30'000};        ///< every wait of a call; [1 ms, 1 h]
  /// Called before each part of an answer, on the thread that gives it. For tests that stall threads; may be empty.
  std::function<void()> before_answer{};
};

/// What an engine has done so far.
struct EngineStats {
  std::uint64_t asked = 0;      ///< layers whose far part the CPU was asked for
  std::uint64_t unplanned = 0;  ///< replays without a plan of their own
  std::uint64_t near_tokens =
      0;                         ///< attended in device memory, by all rows, layers and KV heads of forwards that ended
  std::uint64_t far_tokens = 0;  ///< and in place, by the CPU
  std::uint64_t waited_ns = 0;   ///< that the device waited for the CPU's answers
  std::uint64_t answer_ns = 0;   ///< from when a thread saw a question until it was answered
};

/// One forward that was planned.
struct Batch {
  std::uint64_t forward = 0;
};

/// Decode attention for a batch of sequences whose keys and values lie in host memory, driven by the device: `plan`
/// once per forward, `attend` per layer on the caller's stream. Neither the number nor the length of the sequences
/// changes what `attend` launches, so that a forward, `attend` for every layer in order, can be captured in a CUDA
/// graph once and replayed after every `plan`. The far part is answered by threads that watch for the device's
/// questions while a planned forward is under way, and sleep otherwise.
///
/// Serves policies of the form `exact | int4 | top_k=COUNT | near=0,sinks=S,recent=R`. What is attended depends on
/// policy and sequence alone, neither on batch mates nor on what is near.
///
/// Thread safety: calls on one Engine must not overlap; none may be made on the caller's stream while it is captured
/// but `attend`. Errors: Error, and nothing was changed unless the function says otherwise.
class Engine {
 public:
  /// @throws Error{Errc::invalid_argument}, Error{Errc::out_of_capacity}, Error{Errc::unsupported} with the reason if
  /// the
  ///         device cannot serve the shape or has no decode verbs. `device` null: an embedded host device.
  explicit Engine(const EngineOptions& options, std::shared_ptr<Device> device = nullptr);
  /// What was enqueued on streams of the caller must have run.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// @throws Error{Errc::unsupported} naming what the policy wants; Error{Errc::out_of_capacity} if as many live as
  /// may.
  [[nodiscard]] SequenceId begin(const PolicySpec& policy);
  /// Appends tokens whose attention was computed elsewhere, one layer after the other in order, on one stream as in
  /// `plan`; the last layer's call returns when they are in. k, v [tokens, kv_heads, head_dim] in device memory, after
  /// RoPE, at most import_rows tokens. One that does not get to its last layer is begun again with layer 0, or ends
  /// with the sequence; until then no forward can be planned.
  void import_prefix(SequenceId sequence, LayerId layer, const TensorView& k, const TensorView& v, void* stream);
  /// Plans one new token for each of the sequences, which are all different: row i of the forward is sequence i's, rows
  /// beyond them are padding. Enqueues on `stream`, which is not being captured: a cudaStream_t with the CUDA device;
  /// a Stream* with a host device, or null: at once.
  /// @throws Error{Errc::invalid_argument} if the forward before was not finished; Error{Errc::out_of_capacity}
  [[nodiscard]] Batch plan(std::span<const SequenceId> sequences, void* stream);
  /// One layer of the planned forward: enqueues and returns. q [rows, q_heads, head_dim], k and v [rows, kv_heads,
  /// head_dim], out as q, all of EngineOptions::rows rows, in device memory; they are touched on `stream` only. `lse`
  /// [rows, q_heads] may be null. Layers in order. Rows of padding get 0. While `stream` is captured nothing runs; a
  /// replay is the forward that was planned last, and one without a plan of its own gets NaN and changes nothing. After
  /// Error{Errc::device} the forward can only be cancelled.
  void attend(LayerId layer, const TensorView& q, const TensorView& k, const TensorView& v,
              const MutableTensorView& out, void* stream, float* lse = nullptr);
  /// Waits until the forward has run; then its sequences have their new tokens.
  /// @throws Error{Errc::device} if the far part was not answered in time: outputs are NaN from that layer on, no
  /// sequence
  ///         has its new token, and the forward can be planned again. Error{Errc::timeout} if it does not end: was
  ///         every layer enqueued, or the graph replayed? It can be waited for again, or cancelled.
  void finish(const Batch& batch);
  /// Takes a plan back, behind what its stream has; no sequence has its new token. A forward of it that comes later,
  /// such as a replay, has no plan. Errors as in `finish`.
  void cancel(const Batch& batch);
  /// @throws Error{Errc::invalid_argument} if a forward with the sequence is under way.
  void end(SequenceId sequence);

  /// That all layers have.
  [[nodiscard]] std::uint32_t tokens(SequenceId sequence) const;
  /// May be called at any time, also while forwards run.
  [[nodiscard]] EngineStats stats() const noexcept;
  [[nodiscard]] const EngineOptions& options() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
