#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "sluice/audit.hpp"
#include "sluice/device.hpp"
#include "sluice/options.hpp"
#include "sluice/policy.hpp"
#include "sluice/prefill.hpp"
#include "sluice/stats.hpp"
#include "sluice/tensor.hpp"
#include "sluice/units.hpp"

namespace sluice {

/// One layer of one chunk of a prompt. Tensors are in device memory.
struct PrefillArgs {
  SequenceId sequence;
  LayerId layer;
  TensorView q;           ///< [tokens, q_heads, head_dim]
  TensorView k;           ///< [tokens, kv_heads, head_dim], after RoPE
  TensorView v;           ///< [tokens, kv_heads, head_dim]
  MutableTensorView out;  ///< [tokens, q_heads, head_dim]; must not alias q
  /// Return once everything is queued, as in StepArgs; q, k, v and out must stay until then. A failure of the device
  /// after that shows in a later call, whichever sequence that is about; the sequence that it concerns then refuses
  /// everything but to be ended. Ignored with the embedded host device.
  bool ordered = false;
  /// The prompt ends with this chunk: what the policy builds from it may begin, beside the layers that follow. Without
  /// it the first step builds it.
  bool last = false;
};

/// One layer of a prefix whose attention was computed elsewhere (a prefix cache). Device memory.
struct ImportArgs {
  SequenceId sequence;
  LayerId layer;
  TensorView k;       ///< [tokens, kv_heads, head_dim], after RoPE
  TensorView v;       ///< [tokens, kv_heads, head_dim]
  TensorView last_q;  ///< [m, q_heads, head_dim]: queries of the last m tokens, m <= tokens; feeds history
};

/// One layer of one decode step for a batch of sequences, one new token each. Device memory.
struct StepArgs {
  LayerId layer;
  std::span<const SequenceId> sequences;  ///< [batch], all different
  TensorView q;                           ///< [batch, q_heads, head_dim]
  TensorView k;                           ///< [batch, kv_heads, head_dim], after RoPE
  TensorView v;                           ///< [batch, kv_heads, head_dim]
  MutableTensorView out;                  ///< [batch, q_heads, head_dim]; must not alias q
  /// Return once everything is queued: `out` is ready for what is enqueued on Runtime::device_stream() afterwards, and
  /// must stay until then. A failure of the device after that is thrown by a later step or prefill, or by synchronize, and
  /// names the sequences that it cost: these refuse everything but to be ended, and a call about others may be repeated.
  /// Ignored with the embedded host device, with a trace and with an audit.
  bool ordered = false;
};

/// Facts that a user may want to print.
struct RuntimeInfo {
  std::string device;
  std::string isa;                 ///< CPU kernels in use
  std::uint32_t threads = 0;
  std::uint32_t numa_node = 0;     ///< of the host pool, and of the cores that workers take first
  std::uint32_t host_pages = 0;    ///< frames of the host pool
  std::uint32_t host_pages_free = 0;
  std::uint32_t near_slots = 0;
  std::uint32_t near_slots_free = 0;
  std::uint64_t page_bytes = 0;
  CostRates rates;
};

/// Long-context attention with the KV cache in host memory.
///
/// A sequence is begun, filled by `prefill` (or `import_prefix`) chunk by chunk and layer by layer, then decoded
/// by `step`, layer by layer, and ended. Layers of one chunk or step are given in ascending order, all of
/// them before the next chunk or step.
///
/// Thread safety: calls on one Runtime must not overlap; different Runtimes are independent.
/// Errors: every function throws Error and changes nothing, unless it says otherwise. After a failed
/// `step` or `prefill` the layer may be called again with the same arguments, or the sequence ended.
/// Exception: Error{Errc::timeout} means that work is still in flight. Then the runtime only refuses calls, and
/// the tensors of the call must stay until it is destroyed.
/// The same error says that a worker thread did not return from its work in time and names it. Destroying the runtime
/// then leaves the thread behind, with the memory of the runtime that it may use: that goes when the thread has come
/// back, or never. With the embedded host device such a thread may also use the tensors of the call that failed: they
/// must stay as long as the process.
class Runtime {
 public:
  struct Impl;

  /// With `device` null, the embedded host device: no GPU, near memory is ordinary memory.
  /// @throws Error{Errc::invalid_argument}, Error{Errc::out_of_capacity} if a pool cannot be reserved.
  explicit Runtime(const RuntimeOptions& options, std::shared_ptr<Device> device = nullptr);
  /// For the library's own tests, which build the inside themselves.
  explicit Runtime(std::unique_ptr<Impl> impl);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  /// Starts an empty sequence under a policy.
  /// @throws Error{Errc::unsupported} with reasons, Error{Errc::out_of_capacity} if what must be near does not fit.
  /// `prefill` says how the attention of its prompts is computed; decoding does not depend on it.
  [[nodiscard]] SequenceId begin(const PolicySpec& policy, const PrefillSpec& prefill = {});

  /// Appends a chunk to one layer and computes causal attention, dense or as the sequence's PrefillSpec says. Returns
  /// when `out` is ready and the chunk is in the host pool.
  /// @throws Error{Errc::out_of_capacity} if the host pool cannot hold the chunk; nothing was changed.
  void prefill(const PrefillArgs& args);
  /// The same for chunks of several sequences, each of its own length, behind prefixes of any length: one launch where
  /// the device can. All of one layer, sequences all different, `ordered` the same. Nothing was changed if it throws
  /// before the device was given work.
  void prefill(std::span<const PrefillArgs> batch);

  /// Appends a chunk to one layer without attending. Returns when the pages are in the host pool.
  void import_prefix(const ImportArgs& args);

  /// Appends one token per sequence to one layer and attends to what the policy keeps. Returns when
  /// `out` is ready. Selection for the next step and promotions go on in the background.
  void step(const StepArgs& args);

  /// The queue in which the device reads and writes the tensors of all calls: what a caller enqueues there before a
  /// call is seen by it, without waiting. With the CUDA device its native_handle() is a cudaStream_t.
  [[nodiscard]] Stream& device_stream() noexcept;

  /// Waits until all that ordered calls queued is done, prompts are in the host pool, and counters are complete.
  /// @throws what an ordered call would have thrown in the next one.
  void synchronize();

  /// Frees the sequence's pages, waiting for copies in flight (bounded by the timeout). Unknown ids throw not_found.
  /// @throws Error{Errc::device} if what it had queued failed, and no call has said so yet: it is gone all the same, and
  /// what its last ordered calls computed is not to be used.
  void end(SequenceId sequence);

  /// Tokens of a sequence that all layers have.
  [[nodiscard]] std::uint32_t tokens(SequenceId sequence) const;
  /// Counters of one live sequence.
  [[nodiscard]] Stats stats(SequenceId sequence) const;
  /// What audits of a live sequence found, per layer and query head; see RuntimeOptions::audit_every.
  [[nodiscard]] AuditReport audit(SequenceId sequence) const;
  /// Tokens whose attendance audits report apart, such as those that hold the answer to a question. Positions, which
  /// need not exist yet; replaces those of an earlier call. Costs nothing without audits.
  void watch(SequenceId sequence, std::span<const std::uint32_t> tokens);
  /// Counters of all sequences, ended ones included.
  [[nodiscard]] Stats stats() const;
  [[nodiscard]] RuntimeInfo info() const;
  [[nodiscard]] const RuntimeOptions& options() const noexcept;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
