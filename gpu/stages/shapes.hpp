#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sluice/shape.hpp"
#include "sluice/step/page.hpp"

namespace sluice::gpu {

/// The shapes, pages and types that stages have kernels for: KernelHeadDims, bf16 or f16 keys and values, page_tokens a
/// multiple of 8 up to 256, up to 32 query heads per KV head. Clusters and choices of blocks are of TunedHeadDims; the
/// latter of up to 2^20 keys, with queries rounded to the dtype of the keys.

/// Why stages cannot serve the shape; empty if they can.
[[nodiscard]] std::vector<std::string> unsupported_reasons(const AttentionShape& shape, const PageLayout& layout);

/// @throws Error{Errc::unsupported} naming the stage and the reasons, if there are any.
void check_supported(const char* stage, const AttentionShape& shape, const PageLayout& layout);
/// Likewise, for a stage that takes no shape.
void check_supported(const char* stage, const PageLayout& layout);

/// Of stages that have kernels for TunedHeadDims only.
/// @throws Error{Errc::unsupported} naming the stage, the head_dim and the remedy.
void check_tuned(const char* stage, std::uint32_t head_dim, const char* remedy);

/// Of types that stages read and write but pages: no fp8_e4m3, whose scales only pages have.
/// @throws Error{Errc::unsupported} naming the stage and the type.
void check_tensor_type(const char* stage, DType type);

}  // namespace sluice::gpu
