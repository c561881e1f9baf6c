#include "tools/llama/prompt_cache.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "sluice/error.hpp"
#include "tools/llama/bf16.hpp"

namespace sluice::tools {
namespace {

/// One head of one token to float32.
void copy_head(const TensorView& view, const std::byte* from, float* to) {
  if (view.dtype == DType::f32) {
    std::memcpy(to, from, view.head_dim * sizeof(float));
    return;
  }
  for (std::uint32_t i = 0; i < view.head_dim; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
    to[i] = from_bf16(bits);
  }
}

/// Rows [from, tokens) of a strided view to a dense array.
void copy_rows(const TensorView& view, std::uint32_t from, float* to) {
  for (std::uint32_t token = from; token < view.tokens; ++token) {
    for (std::uint32_t head = 0; head < view.heads; ++head, to += view.head_dim) {
      copy_head(view, view.row(token, head), to);
    }
  }
}

}  // namespace

std::uint64_t PromptCache::bytes() const noexcept {
  return (k_.size() + v_.size() + q_.size() + logits_.size()) * sizeof(float) + ids_.size() * sizeof(int);
}

std::uint64_t PromptCache::bytes_of(const AttentionShape& shape, std::uint64_t tokens) noexcept {
  const std::uint64_t heads = 2 * tokens * shape.kv_heads + std::min<std::uint64_t>(tokens, kQueries) * shape.q_heads;
  return heads * shape.head_dim * shape.layers * sizeof(float);
}

TensorView PromptCache::keys(LayerId layer, std::uint32_t first, std::uint32_t count) const noexcept {
  return dense_view(k_.data() + row(layer, first), DType::f32, count, shape_.kv_heads, shape_.head_dim);
}

TensorView PromptCache::values(LayerId layer, std::uint32_t first, std::uint32_t count) const noexcept {
  return dense_view(v_.data() + row(layer, first), DType::f32, count, shape_.kv_heads, shape_.head_dim);
}

TensorView PromptCache::last_queries(LayerId layer, std::uint32_t first, std::uint32_t count) const noexcept {
  const std::uint32_t begin = std::max(first, first_query());
  const std::uint32_t kept = first + count > begin ? first + count - begin : 0;
  const float* data = kept == 0 ? nullptr : q_.data() + query_row(layer, begin);
  return dense_view(data, DType::f32, kept, shape_.q_heads, shape_.head_dim);
}

void PromptCache::start(const AttentionShape& shape, std::span<const int> ids) {
  shape_ = shape;
  ids_.assign(ids.begin(), ids.end());
  logits_.clear();
  const std::uint64_t kv_floats = std::uint64_t{shape.layers} * tokens() * shape.kv_heads * shape.head_dim;
  k_.resize(kv_floats);
  v_.resize(kv_floats);
  q_.resize(std::uint64_t{shape.layers} * (tokens() - first_query()) * shape.q_heads * shape.head_dim);
}

void PromptCache::record(const AttentionCall& call, std::uint32_t first) {
  if (call.q.dtype == DType::f16 || call.k.dtype != call.q.dtype || call.v.dtype != call.q.dtype) {
    throw Error(Errc::unsupported,
                std::string("a prompt cache records float32 and bf16, not ") + to_string(call.q.dtype));
  }
  copy_rows(call.k, 0, k_.data() + row(call.layer, first));
  copy_rows(call.v, 0, v_.data() + row(call.layer, first));
  const std::uint32_t begin = std::max(first, first_query());
  if (first + call.q.tokens > begin) copy_rows(call.q, begin - first, q_.data() + query_row(call.layer, begin));
}

void PromptCache::finish(std::span<const float> logits) { logits_.assign(logits.begin(), logits.end()); }

}  // namespace sluice::tools
