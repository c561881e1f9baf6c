#pragma once

#include <memory>
#include <vector>

#include "cpu/machine/host_pool.hpp"
#include "runtime/engine/engine_sizes.hpp"
#include "scheduler/plan/layer_stacks.hpp"
#include "sluice/device.hpp"
#include "sluice/engine.hpp"
#include "sluice/step/forward_verbs.hpp"

namespace sluice::runtime {

/// All memory of an engine: reserved when it is built, never grown.
class EngineMemory {
 public:
  /// Far memory is touched by threads of its own, which have ended when it is there.
  /// @throws Error{Errc::out_of_capacity}; Error{Errc::unsupported} if the verbs refuse the shape or the bucket.
  EngineMemory(const EngineOptions& options, const EngineSizes& sizes, Device& device, ForwardVerbs& verbs,
               const cpu::Topology& topology, std::uint32_t numa_node);

  /// What that would be; `verbs` null: without their scratch memory. The options are valid.
  [[nodiscard]] static EngineMemoryUse needed(const EngineOptions& options, const EngineSizes& sizes,
                                              const ForwardVerbs* verbs);

  /// Of the largest bucket.
  [[nodiscard]] const ForwardMemory& largest() const noexcept { return slips_.front(); }
  /// Of a forward of this bucket, which has its max_tokens.
  [[nodiscard]] ForwardMemory of(const Bucket& bucket) const noexcept { return of(0, bucket); }
  /// The same, with the slip of this number, below in_flight.
  [[nodiscard]] ForwardMemory of(std::uint32_t slip, const Bucket& bucket) const noexcept {
    ForwardMemory memory = slips_[slip];
    memory.bucket = bucket;
    return memory;
  }
  [[nodiscard]] const scheduler::LayerStacks& stacks() const noexcept { return stacks_; }
  /// Of blocks that a slip has room for: two of every block list, should a plan not be enqueued.
  [[nodiscard]] std::uint32_t copies() const noexcept { return copies_; }
  /// What `block` holds of tokens [0, tokens) becomes what `copy` holds, keys and values of all planes.
  void copy_rows(std::uint32_t block, std::uint32_t copy, std::uint32_t tokens) const noexcept;

  [[nodiscard]] std::uint64_t block_bytes() const noexcept {
    return largest().far_layout.page_bytes() * largest().planes();
  }
  /// In near pages, rows of a block, when ForwardVerbs::see_near last looked.
  [[nodiscard]] std::uint64_t near_bytes_in(std::uint32_t block) const noexcept {
    const ForwardMemory& m = largest();
    return m.near_pages == 0 ? 0 : std::uint64_t{m.near_seen[block]} * 2 * m.layout.row_bytes();
  }
  /// But for what is used, and the threads' own.
  [[nodiscard]] EngineMemoryUse use() const noexcept;

 private:
  void take_device(const EngineSizes& sizes, ForwardMemory& memory, Device& device, ForwardVerbs& verbs);
  void take_pinned(const EngineOptions& options, const ForwardMemory& memory, Device& device);
  /// Device memory as an engine begins: nothing is near, everything else is 0.
  void clear(const EngineOptions& options, Device& device);

  scheduler::LayerStacks stacks_;
  std::uint32_t copies_ = 0;
  std::unique_ptr<cpu::HostPool> far_;
  std::unique_ptr<Buffer> near_;
  std::unique_ptr<Buffer> codes_;
  std::unique_ptr<Buffer> digests_;  ///< null unless pages have some
  std::unique_ptr<Buffer> device_;
  std::unique_ptr<Buffer> pinned_;
  std::vector<ForwardMemory> slips_;  ///< [in_flight] alike but for the slip
};

}  // namespace sluice::runtime
