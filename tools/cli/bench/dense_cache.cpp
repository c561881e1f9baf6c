#include "tools/cli/bench/dense_cache.hpp"

#include <algorithm>
#include <numeric>

#include "sluice/backend.hpp"
#include "sluice/units.hpp"

namespace sluice::tools {

DenseCache::DenseCache(const AttentionShape& shape, std::uint32_t tokens, Device& device)
    : shape_(shape),
      layout_{.page_tokens = kPageTokens, .head_dim = shape.head_dim, .dtype = DType::bf16},
      pages_(static_cast<std::uint32_t>(div_up(tokens, kPageTokens))),
      device_(device),
      tokens_(shape.layers),
      frames_(std::size_t{shape.kv_heads} * pages_) {
  std::iota(frames_.begin(), frames_.end(), 0u);
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    layers_.push_back(device.allocate(frames_.size() * layout_.page_bytes()));
  floats_ = device.allocate(std::uint64_t{shape.q_heads} * (2 * shape.head_dim + 1) * sizeof(float));
}

std::uint64_t DenseCache::bytes() const noexcept { return layers_.size() * layers_.front()->bytes(); }

std::byte* DenseCache::page_of(std::uint32_t layer, std::uint32_t head, std::uint32_t page) const noexcept {
  return layers_[layer]->data() + (std::uint64_t{head} * pages_ + page) * layout_.page_bytes();
}

void DenseCache::append(LayerId layer, const TensorView& k, const TensorView& v, Stream& stream) {
  std::vector<AppendTask> tasks;
  std::uint32_t& at = tokens_[layer.value];
  for (std::uint32_t done = 0; done < k.tokens;) {
    const std::uint32_t row = at % kPageTokens;
    const std::uint32_t count = std::min(k.tokens - done, kPageTokens - row);
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      tasks.push_back({.k = k.row(done, head),
                       .v = v.row(done, head),
                       .dtype = k.dtype,
                       .token_stride = k.token_stride,
                       .page = page_of(layer.value, head, at / kPageTokens),
                       .first_row = row,
                       .count = count});
    }
    done += count;
    at += count;
  }
  device_.backend().append(tasks, layout_, &stream);
}

void DenseCache::attend(const AttentionCall& call, Stream& stream) {
  append(call.layer, call.k, call.v, stream);
  const std::uint32_t tokens = tokens_[call.layer.value];
  runs_.clear();
  for (std::uint32_t begin = 0; begin < tokens; begin += kPageTokens) {
    const auto rows = static_cast<std::uint16_t>(std::min(tokens - begin, kPageTokens));
    runs_.push_back({.page = begin / kPageTokens, .begin = 0, .end = rows});
  }
  const std::uint32_t d = shape_.head_dim;
  float* const q = reinterpret_cast<float*>(floats_->data());
  float* const out = q + std::size_t{shape_.q_heads} * d;
  float* const lse = out + std::size_t{shape_.q_heads} * d;
  CoreVerbs& backend = device_.backend();
  backend.to_f32(call.q, q, &stream);
  std::vector<AttendTask> tasks(shape_.kv_heads);
  std::vector<Partial> parts(shape_.kv_heads);
  std::vector<MergeTask> merges(shape_.kv_heads);
  for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
    const std::size_t first = std::size_t{head} * shape_.group();
    parts[head] = {.out = out + first * d, .lse = lse + first};
    tasks[head].q = q + first * d;
    tasks[head].kv = {.base = layers_[call.layer.value]->data(),
                      .frames = frames_.data() + std::size_t{head} * pages_,
                      .layout = layout_};
    tasks[head].runs = runs_;
    tasks[head].out = parts[head];
    merges[head] = {
        .parts = {&parts[head], 1}, .out = call.out.row(0, static_cast<std::uint32_t>(first)), .lse = nullptr};
  }
  backend.attend(tasks, shape_, &stream);
  backend.merge(merges, shape_, call.out.dtype, &stream);
}

}  // namespace sluice::tools
