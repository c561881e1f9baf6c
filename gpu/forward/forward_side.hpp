#pragma once

#include <cuda_runtime_api.h>

#include "gpu/device/handles.hpp"
#include "sluice/step/forward_memory.hpp"
#include "sluice/step/forward_verbs.hpp"

namespace sluice::gpu {

/// A stream beside the caller's on which near rows are filled while a forward runs.
class ForwardSide final : public sluice::ForwardSide {
 public:
  explicit ForwardSide(int ordinal);
  /// Gives what is under way a moment: it ends by itself when the caller's stream has got to its plan.
  ~ForwardSide() override;
  ForwardSide(const ForwardSide&) = delete;
  ForwardSide& operator=(const ForwardSide&) = delete;

  /// What comes on `stream` finds rows filled that `fill` was asked to, however far it got.
  void join(cudaStream_t stream) const;
  /// Fills what was placed on `stream`.
  void fill(const ForwardMemory& memory, cudaStream_t stream) const;

 private:
  int ordinal_;
  StreamHandle stream_;
  EventHandle placed_;
  EventHandle filled_;
};

}  // namespace sluice::gpu
