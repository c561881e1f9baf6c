#include "tools/cli/bench/decode_prompt.hpp"

#include <algorithm>

#include "tools/cli/bench/random_numbers.hpp"

namespace sluice::tools {

RandomPrompt::RandomPrompt(Device& device, const AttentionShape& shape)
    : shape_(shape), pool_(device.allocate_pinned(kPoolElements * sizeof(std::uint16_t))) {
  fill_random_bf16({reinterpret_cast<std::uint16_t*>(pool_->data()), kPoolElements});
}

TensorView RandomPrompt::rows(std::uint32_t salt, std::uint32_t tokens, std::uint32_t heads) const {
  const std::uint64_t elements = std::uint64_t{tokens} * heads * shape_.head_dim;
  const std::uint64_t places = (kPoolElements - elements) / shape_.head_dim;
  const std::byte* data =
      pool_->data() + std::uint64_t{salt} * 2'654'435'761u % places * shape_.head_dim * sizeof(std::uint16_t);
  return dense_view(data, DType::bf16, tokens, heads, shape_.head_dim);
}

void RandomPrompt::for_each_chunk(std::uint32_t sequence, std::uint32_t tokens, const PutChunk& put) const {
  std::uint32_t salt = sequence * 0x0100'0000u;
  for (std::uint32_t at = 0; at < tokens; at += kImportChunk) {
    const std::uint32_t count = std::min(kImportChunk, tokens - at);
    const std::uint32_t shown = at + count == tokens ? std::min(kShownQueries, count) : 0;
    for (LayerId layer{0}; layer.value < shape_.layers; ++layer.value, salt += 3) {
      put(layer, rows(salt + 1, count, shape_.kv_heads), rows(salt + 2, count, shape_.kv_heads),
          rows(salt + 3, shown, shape_.q_heads));
    }
  }
}

}  // namespace sluice::tools
