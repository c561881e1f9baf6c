#pragma once

#include <cstdint>

#include "sluice/forward_memory.hpp"

namespace sluice::gpu {

/// The question of a layer to the workers, which a thread block of its own asks beside near attention: what `split` has
/// written has to be there for the CPU first, and to wait for that takes as long as a good part of a layer.
struct ForwardAsk {
  ForwardState* state = nullptr;  ///< null: nobody asks
  ForwardMailbox* mailbox = nullptr;
  std::uint32_t layer = 0;
  std::uint32_t drafts = 1;
  std::uint32_t lists = 0;  ///< of far rows
  bool gate = false;        ///< closes it first, see ForwardGate
};

[[nodiscard]] inline ForwardAsk ask_of(const ForwardMemory& memory, std::uint32_t layer) noexcept {
  return {.state = memory.state,
          .mailbox = memory.mailbox,
          .layer = layer,
          .drafts = memory.drafts,
          .lists = memory.bucket.decode_rows * memory.shape.kv_heads,
          .gate = memory.handover == Handover::stream};
}

}  // namespace sluice::gpu
