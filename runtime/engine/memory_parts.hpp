#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sluice/step/forward_verbs.hpp"

/// Where the parts of an engine's buffers lie. The sizes are in the ForwardMemory already; `from` null only counts, and
/// both return the bytes of the whole buffer.
namespace sluice::runtime {

/// Device memory, the verbs' scratch memory included.
std::uint64_t carve_device(ForwardMemory& m, std::uint64_t scratch, std::byte* from);

/// Pinned memory: what all forwards use in turn, and a slip for each. `slips` are alike.
std::uint64_t carve_pinned(std::vector<ForwardMemory>& slips, std::uint64_t listed_blocks, std::byte* from);

}  // namespace sluice::runtime
