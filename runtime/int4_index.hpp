#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/host_pool.hpp"
#include "runtime/sequence.hpp"
#include "runtime/transfer_engine.hpp"
#include "sluice/device.hpp"
#include "sluice/int4.hpp"

namespace sluice::runtime {

/// 4-bit copies of the keys of full pages, a copy per frame of the host pool: made by the CPU in pinned memory, mirrored
/// to the device if that estimates, too. The open page has none. A copy is made once, since full pages do not change,
/// and sent from where it lies, so that a step with a newly filled page waits for nothing.
class Int4Index {
 public:
  Int4Index(Device& device, cpu::Backend& host, const cpu::HostPool& pool, TransferEngine& link);

  /// Allocates the copies' memory, and the device's if `mirrored`; each at most once, however often it is called.
  void reserve(bool mirrored);

  /// Makes the copies of the layer's pages [copied_pages, pages).
  void update(LayerState& layer, std::uint32_t pages);
  /// Queues the copies of the pages [mirrored_pages, pages), which have been made, and makes `reader` wait for them. The
  /// caller sets mirrored_pages once a step has seen them arrive; until then they are sent again.
  /// @throws Error{Errc::timeout} if the link does not move.
  void mirror(const LayerState& layer, std::uint32_t pages, Stream& reader, Deadline deadline);

  [[nodiscard]] std::byte* host() const noexcept { return copies_->data(); }
  [[nodiscard]] std::byte* device() const noexcept { return mirror_->data(); }

 private:
  /// An event that nobody waits for any more.
  [[nodiscard]] Event& take_event(Deadline deadline);

  Device& device_;
  cpu::Backend& host_;
  const cpu::HostPool& pool_;
  TransferEngine& link_;
  Int4Layout layout_;
  std::unique_ptr<Buffer> copies_;  ///< pinned, [frames]; null until a policy estimates
  std::unique_ptr<Buffer> mirror_;  ///< device, [frames]; null until a device estimates
  std::array<std::unique_ptr<Event>, 4> landed_;
  std::size_t event_ = 0;
  std::vector<QuantizeTask> tasks_;
  std::vector<Copy> sent_;
};

}  // namespace sluice::runtime
