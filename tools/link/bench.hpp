#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gpu/device/cuda_device.hpp"
#include "gpu/device/handles.hpp"
#include "gpu/device/transfer_paths.hpp"
#include "tools/link/memory_traffic.hpp"

namespace sluice::tools {

/// One batch to measure: `blocks` scattered blocks of `block_bytes` each.
struct TransferCase {
  gpu::PathChoice choice{};
  bool to_device = true;
  std::uint64_t block_bytes = 0;
  std::uint32_t blocks = 0;
  [[nodiscard]] std::uint64_t bytes() const noexcept { return block_bytes * blocks; }
};

struct TransferTiming {
  double host_us = 0.0;      ///< the enqueuing thread's time
  double device_us = 0.0;    ///< from before the enqueuing until the last byte landed
  TransferPath path{};       ///< taken
  bool beside_load = false;  ///< all the time, in every sample; false without a load
};

/// How many samples a figure is worth.
struct TransferEffort {
  int samples = 5;          ///< at most
  double enough_us = 1e12;  ///< of transfers sampled: what takes long varies little
};

/// Measures batches between two buffers of random data, one on each side, with every block's place drawn so that no
/// two of a batch are neighbours. Times are CUDA's own, medians over samples.
/// Thread safety: one thread; but for a load that it is told of, the device should be idle.
class TransferBench {
 public:
  /// `host`: pinned by the device, of any content; empty: allocated here, `bytes` on either side.
  TransferBench(gpu::CudaDevice& device, std::uint64_t bytes, std::span<std::byte> host = {});

  /// Blocks of this size that fit twice, so that they can be scattered.
  [[nodiscard]] std::uint32_t most_blocks(std::uint64_t block_bytes) const noexcept;
  /// Runs the case once and compares every byte.  @throws Error{Errc::device} naming the case if one is wrong.
  void verify(const TransferCase& what);
  /// Ungated: the stream starts while the batch is still being enqueued, as in real use.
  [[nodiscard]] TransferTiming landed(const TransferCase& what, int samples);
  /// The same of several cases, by turns, so that what drifts meanwhile drifts for all of them.
  [[nodiscard]] std::vector<TransferTiming> landed(std::span<const TransferCase> rivals, const TransferEffort& effort);
  /// From now on `landed` is measured beside this load, which outlives its use here; null: beside nothing.
  void run_beside(MemoryTraffic* load) noexcept { load_ = load; }
  /// Device time alone: the stream waits at a flag until everything is enqueued. None where the path cannot be
  /// enqueued ahead, because the queue is too short or the calling thread copies.
  [[nodiscard]] std::optional<double> gated_us(const TransferCase& what, int samples);
  /// The case and its mirror image at once, from the start of the first to the end of the last; gated if possible.
  [[nodiscard]] double both_us(const TransferCase& what, int samples);

 private:
  struct Lap {
    gpu::EventHandle begin;
    gpu::EventHandle end;
  };
  [[nodiscard]] static Lap make_lap();
  [[nodiscard]] bool gateable(const TransferCase& what) const noexcept;
  void place(const TransferCase& what, std::uint32_t variant, std::vector<Copy>& batch) const;
  void fill();
  void check_bytes(const TransferCase& what);
  void finish();
  [[nodiscard]] TransferTiming sample(const TransferCase& what, std::uint32_t variant);
  [[nodiscard]] double between_us(cudaEvent_t from, cudaEvent_t to) const;

  gpu::CudaDevice& device_;
  std::uint64_t bytes_;
  std::unique_ptr<Buffer> owned_host_;
  std::span<std::byte> host_;
  std::unique_ptr<Buffer> near_;
  std::unique_ptr<Buffer> gate_memory_;
  Flag* gate_ = nullptr;
  std::uint64_t gate_value_ = 0;
  std::unique_ptr<gpu::QueueStream> stream_;
  std::unique_ptr<gpu::QueueStream> reverse_;
  cudaStream_t raw_ = nullptr;          ///< of stream_
  cudaStream_t raw_reverse_ = nullptr;  ///< of reverse_
  Lap lap_;
  Lap reverse_lap_;
  std::vector<Copy> batch_;
  std::vector<Copy> reverse_batch_;
  MemoryTraffic* load_ = nullptr;
};

/// Median; 0 for none.
[[nodiscard]] double median(std::vector<double> samples);

}  // namespace sluice::tools
