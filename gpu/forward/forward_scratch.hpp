#pragma once

#include <cstdint>

#include "gpu/kernels/forward/forward.hpp"

/// How a bucket's launches are cut, which its scratch memory is laid out for.
namespace sluice::gpu {

/// Of near rows.
[[nodiscard]] AttendVariant variant_of(const ForwardMemory& memory);
/// The same of rows over the link.
[[nodiscard]] AttendVariant fetch_variant(const ForwardMemory& memory);

/// Of a bucket that is whole: thread blocks of a job of so many tokens, of so many jobs; 0 if a launch may not have as
/// many.
[[nodiscard]] std::uint32_t whole_slices(const ForwardMemory& memory, std::uint32_t jobs, std::uint32_t multiprocessors,
                                         std::uint32_t tokens);

/// Near and fetched rows are attended by one launch if they are alike and it has room for all jobs, unless the CPU says
/// what to fetch.
[[nodiscard]] bool attends_together(const ForwardMemory& memory, const ForwardScratch& scratch);

}  // namespace sluice::gpu
