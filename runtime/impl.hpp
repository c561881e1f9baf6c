#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/host_pool.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "runtime/call.hpp"
#include "runtime/pipeline.hpp"
#include "runtime/prompt.hpp"
#include "sluice/error.hpp"
#include "sluice/runtime.hpp"

namespace sluice {

/// Kept by workers of which one is lost.
struct Runtime::Impl final : cpu::Kept {
  /// `before_body` as in cpu::WorkersOptions.
  Impl(const RuntimeOptions& wanted, std::shared_ptr<Device> given,
       const std::function<void(std::uint32_t thread)>& before_body = {});
  ~Impl() override;

  [[nodiscard]] SequenceId begin(const PolicySpec& policy, const PrefillSpec& prefill_spec);
  void step(const StepArgs& args);
  void prefill(std::span<const PrefillArgs> batch);
  void import_prefix(const ImportArgs& args);
  void end(SequenceId id);

  [[nodiscard]] runtime::Sequence& find(SequenceId id) const;
  /// One that may go on.  @throws Error{Errc::device} if something queued for it failed.
  [[nodiscard]] runtime::Sequence& find_whole(SequenceId id) const;
  void require_order(const runtime::Sequence& sequence, std::uint32_t layer, std::uint32_t fresh) const;
  void require_whole() const;
  [[noreturn]] void lose(std::span<runtime::Sequence* const> concerned);
  /// Threads that did not return in time may use what is here.
  [[nodiscard]] bool lost() const noexcept { return workers->lost() || device->lost(); }
  /// Destroys the streams, and with them what a call that timed out left queued, and ends background work. Only the
  /// destructor may follow. False if background work goes on.
  bool stop() noexcept;
  /// Checks one chunk's arguments. `q` is null for a prefix that is imported.
  [[nodiscard]] runtime::PromptChunk checked_chunk(SequenceId id, LayerId layer, const TensorView* q,
                                                   const TensorView& k, const TensorView& v) const;
  /// Runs chunks of one layer, of different sequences.
  void add_prompts(LayerId layer, std::span<const runtime::PromptChunk> chunks, bool ordered);
  /// Runs a call about `concerned`; a timeout leaves work in flight, after which only the destructor is safe. A call
  /// that finds no memory half-way may have left anything: its sequences are lost, and named.
  template <class Call>
  void guarded(std::span<runtime::Sequence* const> concerned, Call&& call);

  RuntimeOptions options;
  cpu::Topology topology;
  std::uint32_t numa_node;  ///< of the pool and the workers
  std::shared_ptr<const cpu::Workers> workers;
  cpu::Backend host;
  bool own_device;  ///< the embedded one, on `workers`
  std::shared_ptr<Device> device;
  cpu::HostPool pool;
  std::uint32_t near_slots;
  std::uint32_t chunk_pages;  ///< of an area for prompt chunks, see runtime::PromptMemory
  std::uint32_t window_pages;
  std::unique_ptr<Buffer> memory;  ///< near slots, then staging
  // Before everything with a thread or a stream: background work and queued verbs refer to sequences.
  std::map<SequenceId, std::unique_ptr<runtime::Sequence>> sequences;
  runtime::TransferEngine link;
  runtime::Residency residency;
  CostRates rates;
  runtime::Pipeline pipeline;
  runtime::Prompt prompt;

  std::uint64_t last_id = 0;
  Stats ended;
  bool broken = false;
};

template <class Call>
void Runtime::Impl::guarded(std::span<runtime::Sequence* const> concerned, Call&& call) {
  require_whole();
  try {
    call();
  } catch (const Error& error) {
    // A worker lost on a stream's thread shows as a failure of the device, but its body is in flight as well.
    broken = error.code() == Errc::timeout || lost();
    if (broken && error.code() != Errc::timeout) throw Error(Errc::timeout, error.what());
    throw;
  } catch (const std::bad_alloc&) {
    lose(concerned);
  }
}

}  // namespace sluice
