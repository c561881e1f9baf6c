#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/page.hpp"
#include "sluice/units.hpp"

namespace sluice::cpu {
class HostPool;
}

namespace sluice::runtime {

/// One page on its way from its host frame to a slot of device memory.
struct PageMove {
  PageRef page;
  std::uint32_t slot = 0;  ///< index into the destination that the batch names
};

/// A batch of page moves in flight. The generations travel with it, so that a page that was freed and used
/// again meanwhile is recognised when the batch lands.
struct Transfer {
  std::vector<PageMove> moves;
  std::unique_ptr<Event> landed;
};

/// Queues copies on the link's stream. Neighbouring pages that stay neighbours travel as one copy.
/// Thread safety: one thread.
class TransferEngine {
 public:
  TransferEngine(Device& device, const cpu::HostPool& pool);

  /// Host frames -> slots of `destination` (page-sized), for attention that waits for them. Returns at once.
  /// @throws Error{Errc::device} for a stale page; nothing is queued then.
  void fetch(std::span<const PageMove> moves, std::byte* destination);
  /// Like fetch, beside the device's other work.
  void fetch_ahead(std::span<const PageMove> moves, std::byte* destination);
  /// Like fetch_ahead; the returned transfer tells when and whether the pages landed.
  [[nodiscard]] Transfer promote(std::vector<PageMove> moves, std::byte* destination);
  /// Any copies, either direction, in order after what was queued before and beside the device's other work.
  void copy(std::span<const Copy> copies);
  /// Names the stream whose verbs read what the link writes.
  void follow(Stream& device) noexcept { followed_ = &device; }
  /// Later copies wait for what the followed stream has queued so far: a slot that is given to another page may still
  /// be read.
  void wait_for_device();

  [[nodiscard]] Stream& stream() noexcept { return *stream_; }
  /// Destroys the stream, and with it what a call that timed out left queued. Nothing may be queued after it.
  void stop() noexcept { stream_.reset(); }
  [[nodiscard]] std::uint64_t page_bytes() const noexcept;

 private:
  /// Into `scratch_`.
  void collect(std::span<const PageMove> moves, std::byte* destination);

  Device& device_;
  const cpu::HostPool& pool_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> passed_;
  Stream* followed_ = nullptr;
  std::vector<Copy> scratch_;
};

}  // namespace sluice::runtime
