#include "tools/cli/bench/dense_cache.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "sluice/units.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {
namespace {

/// On the embedded host device stages are computed at once: what they read has to be there.
void settle(Stream& stream) {
  if (stream.native_handle() == nullptr) stream.synchronize(deadline_after(std::chrono::minutes(2)));
}

}  // namespace

DenseCache::DenseCache(const AttentionShape& shape, std::uint32_t tokens, std::uint32_t sequences, Device& device)
    : shape_(shape),
      layout_{.page_tokens = kPageTokens, .head_dim = shape.head_dim, .dtype = DType::bf16},
      pages_(static_cast<std::uint32_t>(div_up(tokens, kPageTokens))),
      sequences_(sequences),
      stages_(stages_of(device)),
      tokens_(std::size_t{sequences} * shape.layers),
      frames_(std::size_t{shape.kv_heads} * pages_),
      runs_(sequences) {
  std::iota(frames_.begin(), frames_.end(), 0u);
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    layers_.push_back(device.allocate(sequences * frames_.size() * layout_.page_bytes()));
  floats_ = device.allocate(std::uint64_t{sequences} * shape.q_heads * (2 * shape.head_dim + 1) * sizeof(float));
}

std::uint64_t DenseCache::token_bytes(const AttentionShape& shape) noexcept {
  return std::uint64_t{shape.layers} * shape.kv_heads * shape.head_dim * 2 * sizeof(std::uint16_t);
}

std::byte* DenseCache::page_of(std::uint32_t sequence, std::uint32_t layer, std::uint32_t head,
                               std::uint32_t page) const noexcept {
  const std::uint64_t at = (std::uint64_t{sequence} * shape_.kv_heads + head) * pages_ + page;
  return layers_[layer]->data() + at * layout_.page_bytes();
}

void DenseCache::place(std::uint32_t sequence, LayerId layer, const TensorView& k, const TensorView& v,
                       std::uint32_t first, std::uint32_t count, std::vector<AppendTask>& tasks) {
  std::uint32_t& at = tokens_[std::size_t{sequence} * shape_.layers + layer.value];
  for (std::uint32_t done = 0; done < count;) {
    const std::uint32_t row = at % kPageTokens;
    const std::uint32_t some = std::min(count - done, kPageTokens - row);
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      tasks.push_back({.k = k.row(first + done, head),
                       .v = v.row(first + done, head),
                       .dtype = k.dtype,
                       .token_stride = k.token_stride,
                       .page = page_of(sequence, layer.value, head, at / kPageTokens),
                       .first_row = row,
                       .count = some});
    }
    done += some;
    at += some;
  }
}

void DenseCache::append(std::uint32_t sequence, LayerId layer, const TensorView& k, const TensorView& v,
                        Stream& stream) {
  std::vector<AppendTask> tasks;
  place(sequence, layer, k, v, 0, k.tokens, tasks);
  settle(stream);
  stages_->append(tasks, layout_, &stream);
}

void DenseCache::attend(const AttentionCall& call, Stream& stream) {
  std::vector<AppendTask> appends;
  for (std::uint32_t i = 0; i < sequences_; ++i) place(i, call.layer, call.k, call.v, i, 1, appends);
  settle(stream);
  stages_->append(appends, layout_, &stream);
  const std::uint32_t d = shape_.head_dim;
  const std::size_t all_heads = std::size_t{sequences_} * shape_.q_heads;
  float* const q = reinterpret_cast<float*>(floats_->data());
  float* const out = q + all_heads * d;
  float* const lse = out + all_heads * d;
  stages_->to_f32(call.q, q, &stream);
  const std::size_t count = std::size_t{sequences_} * shape_.kv_heads;
  std::vector<AttendTask> tasks(count);
  std::vector<Partial> parts(count);
  std::vector<MergeTask> merges(count);
  for (std::uint32_t i = 0; i < sequences_; ++i) {
    const std::uint32_t tokens = tokens_[std::size_t{i} * shape_.layers + call.layer.value];
    runs_[i].clear();
    for (std::uint32_t begin = 0; begin < tokens; begin += kPageTokens) {
      const auto rows = static_cast<std::uint16_t>(std::min(tokens - begin, kPageTokens));
      runs_[i].push_back({.page = begin / kPageTokens, .begin = 0, .end = rows});
    }
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      const std::size_t at = std::size_t{i} * shape_.kv_heads + head;
      const std::size_t first = at * shape_.group();
      parts[at] = {.out = out + first * d, .lse = lse + first};
      tasks[at].q = q + first * d;
      tasks[at].kv = {.base = page_of(i, call.layer.value, 0, 0),
                      .frames = frames_.data() + std::size_t{head} * pages_,
                      .layout = layout_};
      tasks[at].runs = runs_[i];
      tasks[at].out = parts[at];
      merges[at] = {.parts = {&parts[at], 1}, .out = call.out.row(i, head * shape_.group()), .lse = nullptr};
    }
  }
  stages_->attend(tasks, shape_, &stream);
  stages_->merge(merges, shape_, call.out.dtype, &stream);
}

}  // namespace sluice::tools
