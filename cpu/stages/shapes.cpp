#include "cpu/stages/shapes.hpp"

#include "sluice/error.hpp"

namespace sluice::cpu {
namespace {

std::string head_dim_reason(std::uint32_t head_dim, bool latent) {
  if (head_dim != 0 && head_dim <= most_head_dim(latent) && head_dim % kHeadDimUnit == 0) return {};
  return "head_dim " + std::to_string(head_dim) + " (CPU kernels have multiples of " + std::to_string(kHeadDimUnit) +
         " up to " + std::to_string(most_head_dim(latent)) + ")";
}

std::string value_dim_reason(const AttentionShape& shape) {
  if (shape.value_dim <= shape.head_dim && shape.value_dim % kHeadDimUnit == 0) return {};
  return "value_dim " + std::to_string(shape.value_dim) + " of head_dim " + std::to_string(shape.head_dim) +
         " (need a multiple of " + std::to_string(kHeadDimUnit) + " up to that)";
}

std::string group_reason(const AttentionShape& shape) {
  if (shape.kv_heads == 0 || shape.q_heads % shape.kv_heads != 0 || shape.group() == 0) {
    return std::to_string(shape.q_heads) + " query heads over " + std::to_string(shape.kv_heads) +
           " KV heads (need a positive multiple)";
  }
  if (shape.group() <= kMaxGroup) return {};
  return std::to_string(shape.group()) + " query heads per KV head (CPU kernels have up to " +
         std::to_string(kMaxGroup) + ")";
}

std::string layout_reason(const AttentionShape& shape, const PageLayout& layout) {
  if (layout.page_tokens == 0) return "pages of 0 tokens (need at least one)";
  if (layout.latent && layout.scaled()) return "latent pages of " + std::string(to_string(layout.dtype));
  if (layout.latent != shape.latent())
    return std::string("pages ") + (layout.latent ? "without" : "with") + " values for a shape of value_dim " +
           std::to_string(shape.value_dim);
  if (layout.head_dim == shape.head_dim) return {};
  return "pages of head_dim " + std::to_string(layout.head_dim) + " for a shape of head_dim " +
         std::to_string(shape.head_dim);
}

[[noreturn]] void refuse(const char* stage, const std::vector<std::string>& reasons) {
  std::string message = std::string(stage) + ": unsupported:";
  for (const std::string& reason : reasons) message += (&reason == &reasons.front() ? " " : "; ") + reason;
  throw Error(Errc::unsupported, message);
}

}  // namespace

std::vector<std::string> unsupported_reasons(const AttentionShape& shape, const PageLayout& layout) {
  std::vector<std::string> reasons;
  for (std::string reason : {head_dim_reason(shape.head_dim, shape.latent()), value_dim_reason(shape),
                             group_reason(shape), layout_reason(shape, layout)}) {
    if (!reason.empty()) reasons.push_back(std::move(reason));
  }
  return reasons;
}

void refuse(const char* stage, const AttentionShape& shape) {
  refuse(stage, unsupported_reasons(shape, {.head_dim = shape.head_dim, .latent = shape.latent()}));
}

void refuse(const char* stage, const PageLayout& layout) {
  refuse(stage, unsupported_reasons({.layers = 1,
                                     .q_heads = 1,
                                     .kv_heads = 1,
                                     .head_dim = layout.head_dim,
                                     .value_dim = layout.latent ? layout.head_dim : 0},
                                    layout));
}

void refuse(const char* stage, const AttentionShape& shape, const PageLayout& layout) {
  refuse(stage, unsupported_reasons(shape, layout));
}

void refuse(const char* stage, DType type) {
  refuse(stage, {std::string(to_string(type)) + " (only pages of keys and values have scales; use f32, f16 or bf16)"});
}

}  // namespace sluice::cpu
