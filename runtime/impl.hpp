#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/host_pool.hpp"
#include "cpu/topology.hpp"
#include "cpu/workers.hpp"
#include "runtime/pipeline.hpp"
#include "runtime/prompt.hpp"
#include "sluice/error.hpp"
#include "sluice/runtime.hpp"

namespace sluice {

/// What runtime.cpp and runtime_prompt.cpp share.

inline void require(bool condition, const std::string& message) {
  if (!condition) throw Error(Errc::invalid_argument, message);
}

template <class View>
void require_tensor(const View& view, const char* name, std::uint32_t tokens, std::uint32_t heads, std::uint32_t head_dim) {
  const auto text = [](std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    return "[" + std::to_string(a) + ", " + std::to_string(b) + ", " + std::to_string(c) + "]";
  };
  require(view.tokens == tokens && view.heads == heads && view.head_dim == head_dim,
          std::string(name) + " is " + text(view.tokens, view.heads, view.head_dim) + "; this call needs " +
              text(tokens, heads, head_dim));
  require(view.data != nullptr, std::string(name) + ".data is null");
}

struct Runtime::Impl {
  Impl(const RuntimeOptions& wanted, std::shared_ptr<Device> given);
  ~Impl();

  [[nodiscard]] runtime::Sequence& find(SequenceId id) const;
  /// One that may go on.  @throws Error{Errc::device} if an ordered prompt of it failed.
  [[nodiscard]] runtime::Sequence& find_whole(SequenceId id) const;
  void require_order(const runtime::Sequence& sequence, std::uint32_t layer, std::uint32_t fresh) const;
  void require_whole() const;
  /// Checks one chunk's arguments. `q` is null for a prefix that is imported.
  [[nodiscard]] runtime::PromptChunk checked_chunk(SequenceId id, LayerId layer, const TensorView* q, const TensorView& k,
                                                   const TensorView& v) const;
  /// Runs chunks of one layer, of different sequences.
  void add_prompts(LayerId layer, std::span<const runtime::PromptChunk> chunks, bool ordered);
  /// Runs a call; a timeout leaves work in flight, after which only the destructor is safe.
  template <class Call>
  void guarded(Call&& call);

  RuntimeOptions options;
  cpu::Topology topology;
  std::shared_ptr<const cpu::Workers> workers;
  cpu::Backend host;
  std::shared_ptr<Device> device;
  cpu::HostPool pool;
  std::uint32_t near_slots;
  std::uint32_t chunk_pages;   ///< of an area for prompt chunks, see runtime::PromptMemory
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
void Runtime::Impl::guarded(Call&& call) {
  require_whole();
  try {
    call();
  } catch (const Error& error) {
    // A worker lost on a stream's thread shows as a failure of the device, but its body is in flight as well.
    broken = error.code() == Errc::timeout || workers->lost();
    if (broken && error.code() != Errc::timeout) throw Error(Errc::timeout, error.what());
    throw;
  }
}

}  // namespace sluice
