#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu/device/handles.hpp"
#include "gpu/device/memory_map.hpp"
#include "gpu/device/param_ring.hpp"
#include "gpu/device/path_chooser.hpp"
#include "sluice/cuda.hpp"

namespace sluice::gpu {

/// How one batch is to travel.
struct PathChoice {
  TransferPath path = TransferPath::automatic;
  TransferLoad load{};              ///< by which `automatic` chooses, and gather_blocks of 0
  std::uint32_t gather_blocks = 0;  ///< thread blocks of the gather kernel; 0: the profile's
};

/// Copies batches of blocks on one stream. Adjacent blocks are merged first; a batch that is one block then, and
/// memory that only the driver may touch, always take the copy engine.
/// Thread safety: the stream's.
class Transfer {
 public:
  /// All of them outlive the transfer.
  Transfer(cudaStream_t stream, ParamRing& ring);

  /// What an early look at the sources has to respect.
  enum class Order : std::uint8_t {
    strict,  ///< earlier work of the stream may still write the sources
    free,    ///< whatever the sources hold now is what is to be copied
  };
  /// Enqueues a batch.
  /// @throws Error{Errc::device} or Error{Errc::timeout} if the batch could be enqueued only in part or not at all.
  void send(std::span<const Copy> batch, const PathChoice& choice, Order order, const MemoryMap& memory,
            const PathChooser& chooser);
  /// Where the last batch went.
  [[nodiscard]] TransferPath last_path() const noexcept { return last_path_; }
  /// Whether any block of the last batch was written to the host.
  [[nodiscard]] bool wrote_host() const noexcept { return wrote_host_; }

 private:
  static constexpr std::size_t kSegments = 3;
  static constexpr std::uint64_t kSegmentBytes = 1 * MiB;
  /// Pinned memory that is filled while its sisters travel, and device memory where they land if their blocks go to
  /// different places.
  struct Segment {
    PinnedMemory host;
    DeviceMemory device;
    EventHandle passed;
  };

  void plan(std::span<const Copy> batch, const MemoryMap& memory);
  [[nodiscard]] TransferPath decide(const PathChoice& choice, Order order, const PathChooser& chooser) const;
  void send_copies() const;
  void send_batch();
  void send_gather(std::uint32_t gather_blocks);
  void launch(std::span<const Copy> blocks, std::uint64_t piece_bytes, std::uint32_t gather_blocks);
  void send_staged(std::uint32_t gather_blocks);
  void flush(Segment& segment, std::span<const Copy> parts, std::uint64_t bytes, std::uint32_t gather_blocks);

  cudaStream_t stream_;
  ParamRing& ring_;
  std::array<Segment, kSegments> segments_;
  std::size_t next_segment_ = 0;

  // The batch at hand. Vectors keep their memory from batch to batch.
  std::vector<Copy> blocks_;  ///< merged, none empty
  std::uint64_t bytes_ = 0;
  bool reachable_ = true;  ///< by kernels
  bool to_device_ = true;  ///< host to device, all of them
  bool wrote_host_ = false;
  std::vector<void*> targets_;
  std::vector<const void*> sources_;
  std::vector<std::size_t> sizes_;
  std::vector<Copy> parts_;
  TransferPath last_path_ = TransferPath::automatic;
};

}  // namespace sluice::gpu
