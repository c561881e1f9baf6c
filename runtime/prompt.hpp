#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/host_pool.hpp"
#include "runtime/sequence.hpp"
#include "runtime/transfer_engine.hpp"
#include "sluice/options.hpp"
#include "sluice/runtime.hpp"

namespace sluice::runtime {

/// The prompt phase: K and V of a chunk are laid out as pages in the device's staging memory, flushed to the
/// host pool over the link, and attended densely from there.
class Prompt {
 public:
  /// `staging` [staging_pages, page] is device memory that no step uses at the same time.
  Prompt(const RuntimeOptions& options, Device& device, cpu::HostPool& pool, TransferEngine& link, Stream& device_stream,
         std::byte* staging, std::uint32_t staging_pages);

  /// Puts rows of k and v after the layer's tokens and waits until they are in the host pool.
  /// Does not raise `tokens`: a call that fails later may be repeated.
  void append(Sequence& sequence, LayerState& layer, const TensorView& k, const TensorView& v);
  /// Dense causal attention of the chunk that `append` just put there. Waits for `out`.
  void attend(LayerState& layer, const TensorView& q, const MutableTensorView& out);
  /// Keeps what the policy will want of the chunk's last queries, newest last.
  void remember(Sequence& sequence, LayerState& layer, const TensorView& last_q);

 private:
  void flush(LayerState& layer, const TensorView& k, const TensorView& v, std::uint32_t done, std::uint32_t count);
  void await(Event& event, const char* what);

  const RuntimeOptions& options_;
  AttentionShape shape_;
  PageLayout layout_;
  Device& device_;
  cpu::HostPool& pool_;
  TransferEngine& link_;
  Stream& device_stream_;
  std::byte* staging_;
  std::uint32_t staging_pages_;
  std::unique_ptr<Buffer> last_q_;  ///< pinned; grows to the most queries that a policy wanted
  std::unique_ptr<Event> appended_;
  std::unique_ptr<Event> flushed_;
  std::unique_ptr<Event> attended_;
  std::vector<AppendTask> append_tasks_;
  std::vector<PrefillTask> prefill_tasks_;
  std::vector<Copy> copies_;
};

}  // namespace sluice::runtime
