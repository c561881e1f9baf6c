#include "gpu/device/transfer_paths.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "gpu/device/cuda_error.hpp"
#include "gpu/kernels/transfer/gather.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kGatherThreads = 512;
constexpr std::uint32_t kWarpsPerBlock = kGatherThreads / 32;
/// A warp copies a piece, so one long block among short ones is cut, at lines of the cache.
constexpr std::uint64_t kLeastPiece = 16 * KiB;
/// Blocks of one batch for which memory is set aside at construction.
constexpr std::size_t kUsualBlocks = 8192;
constexpr std::chrono::milliseconds kStagingTimeout{30'000};

/// Blocks that continue each other on both sides are one. Not across two ranges of memory: a copy that spans two
/// registrations is refused.
bool continues(const Copy& last, const Copy& next, const MemoryRange& to, const MemoryRange& from) {
  return last.to + last.bytes == next.to && last.from + last.bytes == next.from &&
         to.holds(last.to, last.bytes + next.bytes) && from.holds(last.from, last.bytes + next.bytes);
}

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

void await(cudaEvent_t event) {
  const Deadline deadline = deadline_after(kStagingTimeout);
  for (;;) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady) check(status, "reuse a staging buffer");
    (void)cudaGetLastError();
    if (RunClock::now() > deadline)
      throw Error(Errc::timeout, "staged copy: the stream did not move for " + std::to_string(kStagingTimeout.count()) +
                                     " ms; look for a flag that never comes");
    std::this_thread::yield();
  }
}

}  // namespace

Transfer::Transfer(cudaStream_t stream, ParamRing& ring) : stream_(stream), ring_(ring) {
  for (Segment& segment : segments_) {
    segment.host = make_pinned_memory(kSegmentBytes, "pin memory for staged copies");
    segment.device = make_device_memory(kSegmentBytes, "allocate device memory for staged copies");
    segment.passed = make_event(cudaEventDisableTiming);
  }
  blocks_.reserve(kUsualBlocks);
  targets_.reserve(kUsualBlocks);
  sources_.reserve(kUsualBlocks);
  sizes_.reserve(kUsualBlocks);
  parts_.reserve(kUsualBlocks);
}

void Transfer::send(std::span<const Copy> batch, const PathChoice& choice, Order order, const MemoryMap& memory,
                    const PathChooser& chooser) {
  plan(batch, memory);
  if (blocks_.empty()) return;
  const std::uint32_t gather_blocks =
      choice.gather_blocks != 0 ? choice.gather_blocks : chooser.gather_blocks(choice.load);
  last_path_ = decide(choice, order, chooser);
  switch (last_path_) {
    case TransferPath::automatic:
    case TransferPath::copy_engine: return send_copies();
    case TransferPath::batch: return send_batch();
    case TransferPath::gather: return send_gather(gather_blocks);
    case TransferPath::staged: return send_staged(gather_blocks);
  }
}

void Transfer::plan(std::span<const Copy> batch, const MemoryMap& memory) {
  blocks_.clear();
  bytes_ = 0;
  reachable_ = true;
  to_device_ = true;
  wrote_host_ = false;
  MemoryMap::Reader reader(memory);
  for (const Copy& copy : batch) {
    if (copy.bytes == 0) continue;
    const MemoryRange to = reader.find(copy.to, copy.bytes);
    const MemoryRange from = reader.find(copy.from, copy.bytes);
    reachable_ = reachable_ && to.kind != MemoryKind::pageable && from.kind != MemoryKind::pageable;
    to_device_ = to_device_ && to.kind == MemoryKind::device && from.kind != MemoryKind::device;
    wrote_host_ = wrote_host_ || to.kind != MemoryKind::device;
    bytes_ += copy.bytes;
    if (!blocks_.empty() && continues(blocks_.back(), copy, to, from)) {
      blocks_.back().bytes += copy.bytes;
    } else {
      blocks_.push_back(copy);
    }
  }
}

TransferPath Transfer::decide(const PathChoice& choice, Order order, const PathChooser& chooser) const {
  if (!reachable_ || blocks_.size() == 1) return TransferPath::copy_engine;
  TransferPath path = choice.path;
  if (path == TransferPath::automatic)
    path = chooser.choose({.load = choice.load,
                           .to_device = !wrote_host_,
                           .may_stage = to_device_ && order == Order::free,
                           .block_bytes = bytes_ / blocks_.size(),
                           .blocks = static_cast<std::uint32_t>(std::min<std::size_t>(blocks_.size(), kNone))});
  if (path == TransferPath::staged && !(to_device_ && order == Order::free)) return TransferPath::copy_engine;
  // A graph would replay arguments that are long gone, and drops batch copies in silence.
  if (path != TransferPath::copy_engine && capturing(stream_)) return TransferPath::copy_engine;
  return path;
}

void Transfer::send_copies() const {
  for (const Copy& block : blocks_)
    check(cudaMemcpyAsync(block.to, block.from, block.bytes, cudaMemcpyDefault, stream_), "enqueue a copy");
}

void Transfer::send_batch() {
  targets_.clear();
  sources_.clear();
  sizes_.clear();
  for (const Copy& block : blocks_) {
    targets_.push_back(block.to);
    sources_.push_back(block.from);
    sizes_.push_back(block.bytes);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;  // Earlier work of the stream may write the sources.
  std::size_t first = 0;
  check(cudaMemcpyBatchAsync(targets_.data(), sources_.data(), sizes_.data(), sizes_.size(), &attributes, &first, 1,
                             stream_),
        "enqueue a batch of copies");
}

void Transfer::send_gather(std::uint32_t gather_blocks) {
  const std::uint64_t share = div_up(bytes_, std::uint64_t{gather_blocks} * kWarpsPerBlock);
  launch(blocks_, std::max(div_up(share, kLeastPiece) * kLeastPiece, kLeastPiece), gather_blocks);
}

/// Cuts the blocks into pieces and hands them over in as many launches as the ring's segments make necessary.
void Transfer::launch(std::span<const Copy> blocks, std::uint64_t piece_bytes, std::uint32_t gather_blocks) {
  std::uint64_t pieces = 0;
  for (const Copy& block : blocks) pieces += div_up(block.bytes, piece_bytes);
  const std::uint64_t most = ring_.largest() / sizeof(Copy);
  std::size_t block = 0;
  std::uint64_t offset = 0;
  while (pieces > 0) {
    const std::span<Copy> items = ring_.take_array<Copy>(std::min(pieces, most));
    for (Copy& item : items) {
      const std::uint64_t bytes = std::min(piece_bytes, blocks[block].bytes - offset);
      item = {.to = blocks[block].to + offset, .from = blocks[block].from + offset, .bytes = bytes};
      offset += bytes;
      if (offset == blocks[block].bytes) {
        ++block;
        offset = 0;
      }
    }
    launch_gather(items.data(), static_cast<std::uint32_t>(items.size()), gather_blocks, kGatherThreads, stream_);
    pieces -= items.size();
  }
}

/// Fills a segment while the one before it travels.
void Transfer::send_staged(std::uint32_t gather_blocks) {
  parts_.clear();
  std::uint64_t used = 0;
  const auto segment = [this]() -> Segment& { return segments_[next_segment_]; };
  await(segment().passed.get());
  for (const Copy& block : blocks_) {
    for (std::uint64_t offset = 0; offset < block.bytes;) {
      if (used == kSegmentBytes) {
        flush(segment(), parts_, used, gather_blocks);
        next_segment_ = (next_segment_ + 1) % kSegments;
        await(segment().passed.get());
        parts_.clear();
        used = 0;
      }
      const std::uint64_t bytes = std::min(block.bytes - offset, kSegmentBytes - used);
      std::memcpy(segment().host.get() + used, block.from + offset, bytes);
      // Where it lands before it is scattered, if it has to be.
      const Copy part{.to = block.to + offset, .from = segment().device.get() + used, .bytes = bytes};
      if (!parts_.empty() && parts_.back().to + parts_.back().bytes == part.to) {
        parts_.back().bytes += bytes;
      } else {
        parts_.push_back(part);
      }
      used += bytes;
      offset += bytes;
    }
  }
  flush(segment(), parts_, used, gather_blocks);
  next_segment_ = (next_segment_ + 1) % kSegments;
}

void Transfer::flush(Segment& segment, std::span<const Copy> parts, std::uint64_t bytes, std::uint32_t gather_blocks) {
  const bool scattered = parts.size() > 1;
  std::byte* const to = scattered ? segment.device.get() : parts.front().to;
  check(cudaMemcpyAsync(to, segment.host.get(), bytes, cudaMemcpyHostToDevice, stream_), "enqueue a staged copy");
  if (scattered) launch(parts, kLeastPiece, gather_blocks);
  check(cudaEventRecord(segment.passed.get(), stream_), "record the end of a staged copy");
}

}  // namespace sluice::gpu
