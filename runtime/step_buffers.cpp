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
  // Everything is allocated before anything changes, for earlier sequences go on with what they have if this fails.
  ranked_pages = std::max(ranked_pages, ranked_pages_);
  const std::uint64_t new_rows = std::uint64_t{std::max(batch, batch_)} * shape_.q_heads;
  const bool grows = batch > batch_;
  Ranking ranking;
  if (ranked_pages > (grows ? 0 : ranked_pages_)) ranking = allocate_ranking(new_rows, ranked_pages);
  if (grows) {
    const std::uint64_t q_bytes = new_rows * shape_.head_dim * sizeof(float);
    const std::uint64_t kv_bytes = std::uint64_t{batch} * shape_.kv_heads * shape_.head_dim * sizeof(float);
    const std::uint64_t partial_bytes = q_bytes + new_rows * sizeof(float);
    Pruning pruning;
    if (pruned_tokens_ != 0) pruning = allocate_pruning(new_rows, pruned_tokens_);
    Memory query = device_.allocate_pinned(q_bytes);
    Memory device_query = device_.allocate(q_bytes);
    Memory key = device_.allocate_pinned(kv_bytes);
    Memory value = device_.allocate_pinned(kv_bytes);
    Memory near_memory = device_.allocate(partial_bytes);
    Memory far_memory = device_.allocate_pinned(partial_bytes);
    Memory merged_out = audited_ ? device_.allocate_pinned(q_bytes) : nullptr;
    Memory lse = audited_ ? device_.allocate_pinned(new_rows * sizeof(float)) : nullptr;
    pruning_ = std::move(pruning);
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
    batch_ = batch;
  }
  if (ranking.scores != nullptr) {
    ranking_ = std::move(ranking);
    ranked_pages_ = ranked_pages;
  }
}

void StepBuffers::reserve_pruning(std::uint32_t tokens) {
  if (tokens <= pruned_tokens_) return;
  pruning_ = allocate_pruning(rows(), tokens);
  pruned_tokens_ = tokens;
}

StepBuffers::Ranking StepBuffers::allocate_ranking(std::uint64_t rows, std::uint32_t ranked_pages) {
  Memory scores = device_.allocate(rows * max_pages_ * sizeof(float));
  return {.scores = std::move(scores), .ranked = device_.allocate_pinned(rows * ranked_pages * sizeof(std::uint32_t))};
}

StepBuffers::Pruning StepBuffers::allocate_pruning(std::uint64_t rows, std::uint32_t tokens) {
  Memory estimates = device_.allocate(rows * tokens * sizeof(float));
  return {.estimates = std::move(estimates),
          .kept = device_.allocate_pinned(rows * div_up(tokens, 32) * sizeof(std::uint32_t))};
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
  if (late.fetches.size() < batches) late.fetches.resize(batches);
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
  return floats(ranking_.scores) + (std::uint64_t{row} * shape_.q_heads + head) * max_pages_;
}

float* StepBuffers::host_page_scores(std::uint32_t row, std::uint32_t head) const noexcept {
  return floats(host_page_scores_) + (std::uint64_t{row} * shape_.q_heads + head) * max_pages_;
}

float* StepBuffers::estimates(std::uint32_t row, std::uint32_t head) const noexcept {
  return floats(pruning_.estimates) + (std::uint64_t{row} * shape_.q_heads + head) * pruned_tokens_;
}

std::uint32_t* StepBuffers::kept(std::uint32_t row, std::uint32_t head, std::uint32_t words) const noexcept {
  const std::uint32_t group = shape_.group();
  const std::uint64_t first = (std::uint64_t{row} * shape_.q_heads + head / group * group) * div_up(pruned_tokens_, 32);
  return reinterpret_cast<std::uint32_t*>(pruning_.kept->data()) + first + std::uint64_t{head % group} * words;
}

std::uint32_t* StepBuffers::ranked(std::uint32_t row, std::uint32_t head, std::uint32_t count) const noexcept {
  // Heads of one group lie `count` apart, so that a group's ranking is one dense span.
  const std::uint32_t group = shape_.group();
  const std::uint64_t first = (std::uint64_t{row} * shape_.q_heads + head / group * group) * ranked_pages_;
  return reinterpret_cast<std::uint32_t*>(ranking_.ranked->data()) + first + std::uint64_t{head % group} * count;
}

}  // namespace sluice::runtime
