#include "tools/cli/synthetic/pattern_writer.hpp"

#include <algorithm>

#include "cpu/float16.hpp"

namespace sluice::tools {

PatternWriter::PatternWriter(const PromptPattern& pattern, const AttentionShape& shape)
    : pattern_(pattern), shape_(shape), rotation_(pattern.rotation_size()), row_(shape.head_dim) {}

std::uint16_t* PatternWriter::put(std::uint16_t* out) const {
  return std::transform(row_.begin(), row_.end(), out, cpu::float_to_bf16);
}

std::uint16_t* PatternWriter::query(std::uint32_t position, std::uint32_t shift, std::uint16_t* out) {
  pattern_.rotation(shift + position, rotation_.data());
  for (std::uint32_t head = 0; head < shape_.q_heads; ++head) {
    pattern_.query(head, position, rotation_.data(), row_.data());
    out = put(out);
  }
  return out;
}

std::uint16_t* PatternWriter::key_and_value(std::uint32_t position, std::uint16_t* out) {
  pattern_.rotation(position, rotation_.data());
  for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
    pattern_.key(head, position, rotation_.data(), row_.data());
    out = put(out);
  }
  for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
    pattern_.value(head, position, row_.data());
    out = put(out);
  }
  return out;
}

}  // namespace sluice::tools
