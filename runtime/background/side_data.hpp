#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "sluice/device.hpp"
#include "sluice/step/forward_verbs.hpp"

namespace sluice::runtime {

/// Makes digests, means of values and copies in codes of pages that no forward has brought: on the device, from host
/// memory, with what its forwards make them by. On a stream of its own; what it made is there for all streams once
/// `wait` returns.
class SideData {
 public:
  /// `memory`, `device` and `verbs` outlive it.
  SideData(const ForwardMemory& memory, Device& device, ForwardVerbs& verbs, std::chrono::milliseconds timeout);

  /// Enqueues those of a plane for the first `tokens` tokens of these blocks, once what was enqueued before is done.
  /// `first`: the block whose mean key, see CodeLayout, the copies are made with; kNone: 0.
  /// @throws Error{Errc::timeout}, Error{Errc::device}
  void make(std::uint32_t plane, std::span<const std::uint32_t> blocks, std::uint32_t tokens, std::uint32_t first);
  /// @throws as `make`
  void wait();
  /// Whether nothing of it runs any more, without waiting.
  [[nodiscard]] bool idle() noexcept;

 private:
  const ForwardMemory& memory_;
  ForwardVerbs& verbs_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<Buffer> key_mean_;  ///< [head_dim] float32, pinned: as long as the stream may read it
  std::unique_ptr<Buffer> pages_;     ///< [max_pages] FarPage, pinned: likewise
  std::unique_ptr<Stream> stream_;  ///< last: it stops before anything above goes
};

}  // namespace sluice::runtime
