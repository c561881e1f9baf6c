#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "cpu/backend.hpp"
#include "cpu/host_pool.hpp"
#include "runtime/sequence.hpp"
#include "runtime/transfer_engine.hpp"
#include "sluice/device.hpp"

namespace sluice::runtime {

/// What the device needs to rank pages: a digest per frame of the host pool, and per layer a table of frames. Digests
/// are built by the CPU from the host copies and travel over the link through two pinned halves, each used again when
/// its copies have landed, so that a step with a newly filled page waits for nothing.
class PageIndex {
 public:
  PageIndex(Device& device, cpu::Backend& host, const cpu::HostPool& pool, TransferEngine& link);

  /// Allocates what tables need, and the digests' memory if they are wanted; each at most once, however often it is
  /// called.
  void reserve(bool digests);

  /// Queues frames of the layer's pages [indexed_pages, pages), and digests of `kind`, if there is one, of
  /// [digested_pages, pages), and makes `reader` wait for them. The caller sets both once a step has seen them arrive;
  /// until then they are sent again.
  /// @throws Error{Errc::timeout} if the link does not move, Error{Errc::out_of_capacity}
  void update(LayerState& layer, std::optional<DigestKind> kind, std::uint32_t pages, Stream& reader, Deadline deadline);

  /// Device memory, [frames, 2, head_dim].
  [[nodiscard]] std::byte* digests() const noexcept { return digests_->data(); }
  /// Frames of one KV head's pages, in device memory.
  [[nodiscard]] static const std::uint32_t* frames(const LayerState& layer, std::uint32_t kv_head) noexcept;

 private:
  struct Half {
    std::unique_ptr<Event> landed;
    bool used = false;
  };
  static constexpr std::uint64_t kHalfBytes = 1 * MiB;

  /// A larger table, filled to its end before anything reads it: an entry that a failed copy left out would send a
  /// kernel anywhere.
  void grow_table(LayerState& layer, std::uint32_t pages, Deadline deadline);
  void send_frames(const LayerState& layer, std::uint32_t begin, std::uint32_t end, Stream* reader, Deadline deadline);
  void send_digests(const LayerState& layer, DigestKind kind, std::uint32_t begin, std::uint32_t end, Stream& reader,
                    Deadline deadline);
  /// A half whose copies have landed.
  [[nodiscard]] std::byte* take_half(Deadline deadline);
  /// Makes `reader` wait for the copies and fail with them; without one, waits itself.
  /// @throws Error{Errc::device} if it waited and they failed.
  void send(std::span<const Copy> copies, Stream* reader, Deadline deadline);

  Device& device_;
  cpu::Backend& host_;
  const cpu::HostPool& pool_;
  TransferEngine& link_;
  std::unique_ptr<Buffer> digests_;  ///< device, [frames, 2, head_dim]; null until a policy ranks pages
  std::unique_ptr<Buffer> pinned_;   ///< two halves
  std::array<Half, 2> halves_;
  std::size_t half_ = 0;
  std::vector<DigestTask> tasks_;
  std::vector<Copy> copies_;
};

}  // namespace sluice::runtime
