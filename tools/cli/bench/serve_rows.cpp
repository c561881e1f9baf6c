#include "tools/cli/bench/serve_rows.hpp"

#include <algorithm>
#include <vector>

#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "tools/cli/synthetic/pattern_writer.hpp"

namespace sluice::tools {
namespace {

/// Tokens that a thread draws at a time.
constexpr std::uint32_t kPiece = 64;

}  // namespace

ServeRows::ServeRows(Device& device, const AttentionShape& shape, PromptStructure structure, std::uint64_t seed,
                     std::uint32_t tokens, std::uint32_t rows)
    : shape_(shape),
      row_bytes_((std::uint64_t{shape.q_heads} + 2 * shape.kv_heads) * shape.head_dim * sizeof(std::uint16_t)),
      pool_(device.allocate_pinned(tokens * row_bytes_)),
      rows_(device.allocate(rows * row_bytes_)),
      out_(device.allocate(std::uint64_t{rows} * shape.q_heads * shape.head_dim * sizeof(std::uint16_t))) {
  draw(structure, seed, tokens);
}

void ServeRows::draw(PromptStructure structure, std::uint64_t seed, std::uint32_t tokens) {
  const PromptPattern pattern(structure, shape_, seed);
  const cpu::Topology topology;
  const cpu::Workers workers(topology, {});
  workers.parallel_for(static_cast<std::uint32_t>(div_up(tokens, kPiece)), [&](std::uint32_t piece) {
    PatternWriter writer(pattern, shape_);
    for (std::uint32_t t = piece * kPiece; t < std::min(tokens, (piece + 1) * kPiece); ++t) {
      auto* const out = reinterpret_cast<std::uint16_t*>(pool_->data() + t * row_bytes_);
      writer.key_and_value(t, writer.query(t, 0, out));
    }
  });
}

void ServeRows::put(std::span<const RowSpan> spans, std::uint32_t rows, Stream& stream) {
  std::vector<Copy> copies;
  std::uint32_t at = 0;
  for (const RowSpan& span : spans) {
    copies.push_back({.to = rows_->data() + at * row_bytes_,
                      .from = pool_->data() + span.first * row_bytes_,
                      .bytes = span.count * row_bytes_});
    at += span.count;
  }
  count_ = rows;
  stream.copy(copies);
}

QkvViews ServeRows::views() const {
  const std::byte* const rows = rows_->data();
  return qkv_views(dense_view(rows, DType::bf16, count_, shape_.q_heads + 2 * shape_.kv_heads, shape_.head_dim),
                   shape_.q_heads, shape_.kv_heads);
}

MutableTensorView ServeRows::out() const {
  return dense_view(out_->data(), DType::bf16, count_, shape_.q_heads, shape_.head_dim);
}

}  // namespace sluice::tools
