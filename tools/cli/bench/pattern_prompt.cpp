#include "tools/cli/bench/pattern_prompt.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "tools/cli/bench/device_copies.hpp"
#include "tools/cli/synthetic/pattern_writer.hpp"
#include "tools/llama/engine.hpp"

namespace sluice::tools {
namespace {

/// Tokens that a thread draws at a time.
constexpr std::uint32_t kPiece = 64;
/// Stretches begin within so many positions: enough that no two layers' passages lie alike, few enough to be drawn.
constexpr std::uint32_t kLeastSpread = 8192, kMostSpread = 131'072;
constexpr std::uint32_t kSinks = PromptPattern::kSinks;

std::uint16_t* elements(Buffer& buffer) noexcept { return reinterpret_cast<std::uint16_t*>(buffer.data()); }

}  // namespace

PatternPrompt::PatternPrompt(const PatternPromptOptions& options, const AttentionShape& shape, Device& device,
                             Stream& stream)
    : shape_(shape), options_(options), spread_(std::clamp(options.tokens, kLeastSpread, kMostSpread)) {
  const std::uint64_t kv = 2ull * shape.kv_heads * shape.head_dim * sizeof(std::uint16_t);
  const std::uint64_t q = std::uint64_t{shape.q_heads} * shape.head_dim * sizeof(std::uint16_t);
  keys_ = device.allocate_pinned((std::uint64_t{spread_} + options.tokens) * kv);
  queries_ = device.allocate_pinned(std::uint64_t{options.sequences} * shape.layers * kShownQueries * q);
  draw_keys(PromptPattern(options.structure, shape, options.seed));
  draw_rows(device, stream);
}

std::uint64_t PatternPrompt::row_elements() const noexcept {
  return (std::uint64_t{shape_.q_heads} + 2 * shape_.kv_heads) * shape_.head_dim;
}

/// Multiples of the golden ratio fill an interval evenly, however many there are.
std::uint32_t PatternPrompt::shift(std::uint32_t sequence, std::uint32_t layer) const noexcept {
  const double place = (static_cast<double>(sequence) * shape_.layers + layer) * 0.6180339887498949;
  return static_cast<std::uint32_t>((place - std::floor(place)) * spread_);
}

void PatternPrompt::draw_keys(const PromptPattern& pattern) {
  const std::uint64_t row = 2ull * shape_.kv_heads * shape_.head_dim;
  const std::uint32_t positions = spread_ + options_.tokens;
  const cpu::Topology topology;
  const cpu::Workers workers(topology, {});
  workers.parallel_for(static_cast<std::uint32_t>(div_up(positions, kPiece)), [&](std::uint32_t piece) {
    PatternWriter writer(pattern, shape_);
    for (std::uint32_t t = piece * kPiece; t < std::min(positions, (piece + 1) * kPiece); ++t)
      writer.key_and_value(t, elements(*keys_) + t * row);
  });
}

/// Queries of the prompts' ends, and the rows of all forwards.
void PatternPrompt::draw_rows(Device& device, Stream& stream) {
  const std::uint32_t planes = options_.sequences * shape_.layers;
  const std::uint64_t q = std::uint64_t{shape_.q_heads} * shape_.head_dim;
  std::vector<std::uint16_t> rows(std::uint64_t{options_.steps} * planes * row_elements());
  const cpu::Topology topology;
  const cpu::Workers workers(topology, {});
  workers.parallel_for(planes, [&](std::uint32_t plane) {
    const std::uint32_t sequence = plane / shape_.layers, layer = plane % shape_.layers;
    const PromptPattern pattern(options_.structure, shape_, options_.seed, options_.seed + 1 + plane);
    PatternWriter writer(pattern, shape_);
    const std::uint32_t from = shift(sequence, layer);
    const std::uint32_t shown = std::min(kShownQueries, options_.tokens);
    for (std::uint32_t i = 0; i < shown; ++i)
      writer.query(options_.tokens - shown + i, from,
                   elements(*queries_) + (std::uint64_t{plane} * kShownQueries + i) * q);
    for (std::uint32_t i = 0; i < options_.steps; ++i) {
      const std::uint32_t position = options_.tokens + i;
      const std::uint64_t row = (std::uint64_t{i} * shape_.layers + layer) * options_.sequences + sequence;
      writer.key_and_value(from + position, writer.query(position, from, &rows[row * row_elements()]));
    }
  });
  rows_ = uploaded(device, stream, std::as_bytes(std::span(rows)));
  now_ = device.allocate(options_.drafts * step_bytes());
}

void PatternPrompt::for_each_chunk(std::uint32_t sequence, std::uint32_t tokens, const PutChunk& put) const {
  const std::uint32_t sinks = std::min(kSinks, tokens);
  const std::uint32_t shown = std::min(kShownQueries, tokens);
  const std::uint32_t d = shape_.head_dim;
  // The last one is whole, so that queries come with it.
  std::uint32_t count = sinks;
  for (std::uint32_t at = 0; at < tokens; at += count) {
    if (at != 0) count = (tokens - at) % kImportChunk != 0 ? (tokens - at) % kImportChunk : kImportChunk;
    for (LayerId layer{0}; layer.value < shape_.layers; ++layer.value) {
      const std::uint32_t from = at == 0 ? 0 : shift(sequence, layer.value) + at;
      const std::byte* const row = keys_->data() + 2ull * from * shape_.kv_heads * d * sizeof(std::uint16_t);
      const auto [none, k, v] =
          qkv_views(dense_view(row, DType::bf16, count, 2 * shape_.kv_heads, d), 0, shape_.kv_heads);
      const std::uint32_t given = at + count == tokens ? std::min(shown, count) : 0;
      const std::uint64_t plane = std::uint64_t{sequence} * shape_.layers + layer.value;
      const std::byte* const q =
          queries_->data() + (plane * kShownQueries + shown - given) * shape_.q_heads * d * sizeof(std::uint16_t);
      put(layer, k, v, dense_view(q, DType::bf16, given, shape_.q_heads, d));
    }
  }
}

void PatternPrompt::begin(std::uint32_t position, std::uint32_t drafts, Stream& stream) {
  const Copy copy{.to = now_->data(),
                  .from = rows_->data() + std::uint64_t{position - options_.tokens} * step_bytes(),
                  .bytes = drafts * step_bytes()};
  stream.copy({&copy, 1});
}

AttentionCall PatternPrompt::attended(const AttentionCall& call, std::uint32_t drafts) const {
  const std::uint64_t first = std::uint64_t{call.layer.value} * options_.sequences;
  const std::uint64_t next = drafts == 1 ? 1 : std::uint64_t{shape_.layers} * options_.sequences;
  TensorView rows =
      dense_view<const std::byte>(now_->data() + first * row_elements() * sizeof(std::uint16_t), DType::bf16,
                                  call.q.tokens, shape_.q_heads + 2 * shape_.kv_heads, shape_.head_dim);
  rows.token_stride = next * row_elements();
  const auto [q, k, v] = qkv_views(rows, shape_.q_heads, shape_.kv_heads);
  return {.layer = call.layer, .q = q, .k = k, .v = v, .out = call.out};
}

}  // namespace sluice::tools
