#include "gpu/stages/shapes.hpp"

#include "gpu/head_dims.hpp"
#include "gpu/tuning.hpp"
#include "sluice/error.hpp"
#include "sluice/tensor.hpp"

namespace sluice::gpu {
namespace {

constexpr std::uint32_t kPageTokensUnit = 8;
constexpr std::uint32_t kMaxPageTokens = 256;

std::string head_dim_reason(std::uint32_t head_dim) {
  if (KernelHeadDims::has(head_dim)) return {};
  return "head_dim " + std::to_string(head_dim) + " (GPU kernels have " + KernelHeadDims::list() + ")";
}

std::string group_reason(const AttentionShape& shape) {
  if (shape.kv_heads == 0 || shape.q_heads % shape.kv_heads != 0 || shape.group() == 0) {
    return std::to_string(shape.q_heads) + " query heads over " + std::to_string(shape.kv_heads) +
           " KV heads (need a positive multiple)";
  }
  if (shape.group() <= kMaxGroup) return {};
  return std::to_string(shape.group()) + " query heads per KV head (GPU kernels have up to " +
         std::to_string(kMaxGroup) + ")";
}

std::string pages_reason(const AttentionShape& shape, const PageLayout& layout) {
  if (layout.page_tokens == 0 || layout.page_tokens > kMaxPageTokens || layout.page_tokens % kPageTokensUnit != 0) {
    return "pages of " + std::to_string(layout.page_tokens) + " tokens (GPU kernels have multiples of " +
           std::to_string(kPageTokensUnit) + " up to " + std::to_string(kMaxPageTokens) + ")";
  }
  if (layout.head_dim == shape.head_dim) return {};
  return "pages of head_dim " + std::to_string(layout.head_dim) + " for a shape of head_dim " +
         std::to_string(shape.head_dim);
}

std::string values_reason(const AttentionShape& shape, const PageLayout& layout) {
  if (!shape.latent() && !layout.latent) return {};
  return "value_dim " + std::to_string(shape.value_dim) +
         " (no GPU kernel attends values that are parts of keys; latent attention is of the CPU's device)";
}

std::string dtype_reason(DType dtype) {
  if (dtype == DType::bf16 || dtype == DType::f16) return {};
  return std::string(to_string(dtype)) + " keys and values (GPU kernels have bf16 and f16" +
         (dtype == DType::fp8_e4m3 ? "; far rows of an engine may have it)" : ")");
}

}  // namespace

std::vector<std::string> unsupported_reasons(const AttentionShape& shape, const PageLayout& layout) {
  std::vector<std::string> reasons;
  for (std::string reason : {head_dim_reason(shape.head_dim), group_reason(shape), pages_reason(shape, layout),
                             values_reason(shape, layout), dtype_reason(layout.dtype)}) {
    if (!reason.empty()) reasons.push_back(std::move(reason));
  }
  return reasons;
}

void check_supported(const char* stage, const AttentionShape& shape, const PageLayout& layout) {
  const std::vector<std::string> reasons = unsupported_reasons(shape, layout);
  if (reasons.empty()) return;
  std::string message = std::string(stage) + ": unsupported:";
  for (const std::string& reason : reasons) message += (&reason == &reasons.front() ? " " : "; ") + reason;
  throw Error(Errc::unsupported, message);
}

void check_tuned(const char* stage, std::uint32_t head_dim, const char* remedy) {
  if (TunedHeadDims::has(head_dim)) return;
  throw Error(Errc::unsupported, std::string(stage) + ": unsupported: head_dim " + std::to_string(head_dim) +
                                     " (its GPU kernels have " + TunedHeadDims::list() + "); " + remedy);
}

void check_tensor_type(const char* stage, DType type) {
  if (is_tensor_type(type)) return;
  throw Error(Errc::unsupported, std::string(stage) + ": unsupported: " + to_string(type) +
                                     " (only pages of keys and values have scales; use f32, f16 or bf16)");
}

void check_supported(const char* stage, const PageLayout& layout) {
  check_supported(stage, {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = layout.head_dim}, layout);
}

}  // namespace sluice::gpu
