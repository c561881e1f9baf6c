#pragma once

#include "capi/sized.hpp"
#include "sluice.h"
#include "sluice/engine.hpp"

namespace sluice::capi {

/// The defaults, which are those of EngineOptions.
[[nodiscard]] sluice_engine_options default_options();

/// What a caller gave, with defaults for fields that it does not know.
[[nodiscard]] sluice_engine_options read_options(const sluice_engine_options* options);

/// @throws Error{Errc::invalid_argument} naming the field that has no such value; ranges are the engine's to check.
[[nodiscard]] EngineOptions to_engine(const sluice_engine_options& options);

/// The result's cores and windows lie where those of `options` do. Nothing of the device: EngineOptions have none. Nor
/// policies, whose texts are the caller's to keep.
[[nodiscard]] sluice_engine_options from_engine(const EngineOptions& options);

[[nodiscard]] sluice_engine_sizes from_sizes(const EngineSizes& sizes) noexcept;

[[nodiscard]] std::uint32_t features_of(const Bucket& bucket) noexcept;
/// @throws Error{Errc::invalid_argument} if there are others than sluice.h has.
void set_features(std::uint32_t features, const char* name, Bucket& bucket);

/// @throws Error{Errc::invalid_argument} unless it is 0 or 1
[[nodiscard]] bool switch_of(std::uint32_t value, const char* name);

}  // namespace sluice::capi
