#pragma once

#include <memory>
#include <string>
#include <vector>

#include "capi/guard.hpp"
#include "capi/tensor.hpp"
#include "sluice.h"
#include "sluice/engine.hpp"

/// What callers of C hold.
struct sluice_engine {
  /// `of_policies`: as the caller wrote them.
  sluice_engine(const sluice::EngineOptions& options, std::vector<std::string> of_policies,
                std::shared_ptr<sluice::Device> device, const sluice::capi::Place& where,
                std::uint64_t most_device_bytes)
      : engine(options, std::move(device)),
        place(where),
        device_bytes(most_device_bytes),
        texts(std::move(of_policies)) {
    for (const std::string& text : texts) policies.push_back(text.c_str());
  }

  sluice::Engine engine;
  sluice::capi::Place place;
  std::uint64_t device_bytes;
  std::vector<std::string> texts;     ///< of its policies
  std::vector<const char*> policies;  ///< the same, as C reads them
};

namespace sluice::capi {

/// @throws Error{Errc::invalid_argument} if it is null.
inline Engine& engine_of(sluice_engine* engine) {
  require_pointer(engine, "engine");
  return engine->engine;
}
inline const Engine& engine_of(const sluice_engine* engine) {
  require_pointer(engine, "engine");
  return engine->engine;
}

[[nodiscard]] sluice_memory memory_of(const EngineMemoryUse& use) noexcept;

/// Such as an engine takes. The host device has streams of C++ alone.
/// @throws Error{Errc::invalid_argument}
inline void* stream_of(const sluice_engine& engine, void* stream) {
  require(stream == nullptr || engine.place.device_type == SLUICE_DEVICE_CUDA,
          "stream is not null, and the engine computes on the host, where everything happens at once; give it NULL");
  return stream;
}

}  // namespace sluice::capi
