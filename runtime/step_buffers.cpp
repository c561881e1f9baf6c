#include "runtime/step_buffers.hpp"

#include <algorithm>
#include <utility>

namespace sluice::runtime {
namespace {

float* floats(const std::unique_ptr<Buffer>& memory) { return reinterpret_cast<float*>(memory->data()); }

}  // namespace

StepBuffers::StepBuffers(Device& device, const AttentionShape& shape, std::uint32_t max_pages, bool audited)
    : device_(device), shape_(shape), max_pages_(max_pages), audited_(audited) {}

void StepBuffers::reserve(std::uint32_t batch, std::uint32_t ranked_pages) {
  // What earlier sequences need is kept.
  ranked_pages = std::max(ranked_pages, ranked_pages_);
  const std::uint32_t pruned_tokens = pruned_tokens_;
  if (batch > batch_) {
    const std::uint64_t new_rows = std::uint64_t{batch} * shape_.q_heads;
    const std::uint64_t q_bytes = new_rows * shape_.head_dim * sizeof(float);
    const std::uint64_t kv_bytes = std::uint64_t{batch} * shape_.kv_heads * shape_.head_dim * sizeof(float);
    const std::uint64_t partial_bytes = q_bytes + new_rows * sizeof(float);
    Memory query = device_.allocate_pinned(q_bytes);
    Memory device_query = device_.allocate(q_bytes);
    Memory key = device_.allocate_pinned(kv_bytes);
    Memory value = device_.allocate_pinned(kv_bytes);
    Memory near_memory = device_.allocate(partial_bytes);
    Memory far_memory = device_.allocate_pinned(partial_bytes);
    Memory merged_out = audited_ ? device_.allocate_pinned(q_bytes) : nullptr;
    Memory lse = audited_ ? device_.allocate_pinned(new_rows * sizeof(float)) : nullptr;
    query_ = std::move(query);
    device_query_ = std::move(device_query);
    key_ = std::move(key);
    value_ = std::move(value);
    near_ = std::move(near_memory);
    far_ = std::move(far_memory);
    merged_out_ = std::move(merged_out);
    merged_lse_ = std::move(lse);
    fetched_.clear();
    fetch_room_ = 0;
    ranked_pages_ = 0;
    pruned_tokens_ = 0;
    batch_ = batch;  // Last: a failed allocation changes nothing.
  }
  if (ranked_pages > ranked_pages_) {
    Memory scores = device_.allocate(rows() * max_pages_ * sizeof(float));
    ranked_ = device_.allocate_pinned(rows() * ranked_pages * sizeof(std::uint32_t));
    page_scores_ = std::move(scores);
    ranked_pages_ = ranked_pages;
  }
  reserve_pruning(pruned_tokens);
}

void StepBuffers::reserve_pruning(std::uint32_t tokens) {
  if (tokens <= pruned_tokens_) return;
  Memory estimates = device_.allocate(rows() * tokens * sizeof(float));
  kept_ = device_.allocate_pinned(rows() * div_up(tokens, 32) * sizeof(std::uint32_t));
  estimates_ = std::move(estimates);
  pruned_tokens_ = tokens;
}

void StepBuffers::reserve_host_scores() {
  const std::uint64_t bytes = rows() * max_pages_ * sizeof(float);
  if (host_page_scores_ == nullptr || host_page_scores_->bytes() < bytes) host_page_scores_ = device_.allocate_pinned(bytes);
}

void StepBuffers::reserve_fetch(std::uint32_t batches) {
  for (; fetch_room_ < batches; ++fetch_room_) {
    fetched_.push_back(device_.allocate(rows() * (shape_.head_dim + 1) * sizeof(float)));
  }
  while (copied.size() < batches) {
    copied.push_back(device_.create_event());
    attended.push_back(device_.create_event());
  }
  if (fetch_batches.size() < batches) fetch_batches.resize(batches);
}

float* StepBuffers::at(const Memory& memory, std::uint32_t row, std::uint32_t head) const noexcept {
  return floats(memory) + (std::uint64_t{row} * shape_.q_heads + head) * shape_.head_dim;
}

float* StepBuffers::kv_at(const Memory& memory, std::uint32_t row, std::uint32_t kv_head) const noexcept {
  return floats(memory) + (std::uint64_t{row} * shape_.kv_heads + kv_head) * shape_.head_dim;
}

Partial StepBuffers::partial(const Memory& memory, std::uint32_t row, std::uint32_t head) const noexcept {
  return {.out = at(memory, row, head),
          .lse = floats(memory) + rows() * shape_.head_dim + std::uint64_t{row} * shape_.q_heads + head};
}

Partial StepBuffers::fetched(std::uint32_t batch, std::uint32_t row, std::uint32_t head) const noexcept {
  return partial(fetched_[batch], row, head);
}

float* StepBuffers::merged_lse(std::uint32_t row, std::uint32_t head) const noexcept {
  return floats(merged_lse_) + std::uint64_t{row} * shape_.q_heads + head;
}

float* StepBuffers::page_scores(std::uint32_t row, std::uint32_t head) const noexcept {
  return floats(page_scores_) + (std::uint64_t{row} * shape_.q_heads + head) * max_pages_;
}

float* StepBuffers::host_page_scores(std::uint32_t row, std::uint32_t head) const noexcept {
  return floats(host_page_scores_) + (std::uint64_t{row} * shape_.q_heads + head) * max_pages_;
}

float* StepBuffers::estimates(std::uint32_t row, std::uint32_t head) const noexcept {
  return floats(estimates_) + (std::uint64_t{row} * shape_.q_heads + head) * pruned_tokens_;
}

std::uint32_t* StepBuffers::kept(std::uint32_t row, std::uint32_t head, std::uint32_t words) const noexcept {
  const std::uint32_t group = shape_.group();
  const std::uint64_t first = (std::uint64_t{row} * shape_.q_heads + head / group * group) * div_up(pruned_tokens_, 32);
  return reinterpret_cast<std::uint32_t*>(kept_->data()) + first + std::uint64_t{head % group} * words;
}

std::uint32_t* StepBuffers::ranked(std::uint32_t row, std::uint32_t head, std::uint32_t count) const noexcept {
  // Heads of one group lie `count` apart, so that a group's ranking is one dense span.
  const std::uint32_t group = shape_.group();
  const std::uint64_t first = (std::uint64_t{row} * shape_.q_heads + head / group * group) * ranked_pages_;
  return reinterpret_cast<std::uint32_t*>(ranked_->data()) + first + std::uint64_t{head % group} * count;
}

}  // namespace sluice::runtime
