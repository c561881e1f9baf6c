#pragma once

#include <memory>

#include "sluice/device.hpp"
#include "sluice/step/backend.hpp"

namespace sluice::tools {

/// Stages of attention one by one, for what is measured without an engine. A GPU's enqueue on its streams, and live as
/// long as it; for the embedded host device threads of their own compute at once, whatever its streams still hold.
[[nodiscard]] std::shared_ptr<Backend> backend_of(Device& device);

/// Those of a GPU; null if it is none.
[[nodiscard]] Backend* cuda_backend_of(Device& device) noexcept;

}  // namespace sluice::tools
