#include "runtime/transfer_engine.hpp"

#include <utility>

#include "cpu/host_pool.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {

TransferEngine::TransferEngine(Device& device, const cpu::HostPool& pool)
    : device_(device), pool_(pool), stream_(device.create_stream("link")), passed_(device.create_event()) {}

void TransferEngine::fetch(std::span<const PageMove> moves, std::byte* destination) {
  collect(moves, destination);
  stream_->copy(scratch_);
}

void TransferEngine::fetch_ahead(std::span<const PageMove> moves, std::byte* destination) {
  collect(moves, destination);
  stream_->copy_in_background(scratch_);
}

void TransferEngine::collect(std::span<const PageMove> moves, std::byte* destination) {
  const std::uint64_t page_bytes = pool_.layout().page_bytes();
  scratch_.clear();
  std::uint32_t last = 0;
  for (const PageMove& move : moves) {
    if (!pool_.live(move.page)) {
      throw Error(Errc::device, "stale page: frame " + std::to_string(move.page.frame) + " generation " +
                                    std::to_string(move.page.generation) + " was freed before its copy was queued");
    }
    const Copy copy{.to = destination + move.slot * page_bytes, .from = pool_.frame(move.page.frame), .bytes = page_bytes};
    if (!scratch_.empty() && scratch_.back().to + scratch_.back().bytes == copy.to &&
        scratch_.back().from + scratch_.back().bytes == copy.from && pool_.pinned_together(last, move.page.frame)) {
      scratch_.back().bytes += page_bytes;
    } else {
      scratch_.push_back(copy);
    }
    last = move.page.frame;
  }
}

Transfer TransferEngine::promote(std::vector<PageMove> moves, std::byte* destination) {
  Transfer transfer{.moves = std::move(moves), .landed = device_.create_event()};
  fetch_ahead(transfer.moves, destination);
  stream_->record(*transfer.landed);
  return transfer;
}

void TransferEngine::copy(std::span<const Copy> copies) { stream_->copy_in_background(copies); }

void TransferEngine::wait_for_device() {
  if (followed_ == nullptr) return;
  followed_->record(*passed_);
  followed_->wait(*passed_);  // The event takes a failure of the device's stream; this gives it back to its next event.
  stream_->wait(*passed_);
}

std::uint64_t TransferEngine::page_bytes() const noexcept { return pool_.layout().page_bytes(); }

}  // namespace sluice::runtime
