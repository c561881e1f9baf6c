#include "gpu/backend.hpp"
#include "sluice/error.hpp"

namespace sluice::gpu {

void Backend::select_blocks(std::span<const SelectBlocksTask> tasks, const FlexPrefillSpec&, const PrefillShape&,
                            const AttentionShape&, Stream*) {
  if (tasks.empty()) return;
  throw Error(Errc::unsupported, "select_blocks: this backend cannot choose blocks of a prompt yet; prefill densely");
}

std::uint64_t Backend::select_blocks_scratch_bytes(std::uint32_t, std::uint32_t, const AttentionShape&) const {
  return 0;
}

}  // namespace sluice::gpu
