#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sluice/step/prefill_choice.hpp"
#include "tests/support/problem.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/stages_under_test.hpp"

namespace sluice::test {

/// One KV head's prompt: keys and values of a Problem, and a query for every (token, head of the group), in rows with
/// gaps between them. Queries are rounded to the dtype of the keys, so that choosing blocks in that dtype loses
/// nothing.
class Prompt {
 public:
  explicit Prompt(const ProblemOptions& options, DType q_dtype = DType::f32);

  [[nodiscard]] const Problem& kv() const noexcept { return kv_; }
  [[nodiscard]] Problem& kv() noexcept { return kv_; }
  [[nodiscard]] std::uint32_t tokens() const noexcept { return kv_.options().tokens; }
  [[nodiscard]] std::uint32_t group() const noexcept { return kv_.options().group; }
  [[nodiscard]] std::uint32_t head_dim() const noexcept { return kv_.options().head_dim; }
  [[nodiscard]] double q(std::uint32_t token, std::uint32_t head, std::uint32_t c) const noexcept;
  void set_q(std::uint32_t token, std::uint32_t head, std::uint32_t c, double value) noexcept;
  /// The head asks for key `token` with weight exp(strength * |k| / sqrt(head_dim)), roughly.
  void ask_for(std::uint32_t token, std::uint32_t head, std::uint32_t key, double strength) noexcept;
  [[nodiscard]] double score(std::uint32_t token, std::uint32_t head, std::uint32_t key) const noexcept;

  [[nodiscard]] DType q_dtype() const noexcept { return q_dtype_; }
  [[nodiscard]] std::uint64_t head_stride() const noexcept { return head_dim() + 3; }
  [[nodiscard]] std::uint64_t token_stride() const noexcept { return group() * head_stride() + 5; }
  /// [tokens, token_stride] elements of q_dtype.
  [[nodiscard]] std::span<const std::byte> queries() const noexcept { return q_; }

 private:
  [[nodiscard]] std::size_t at(std::uint32_t token, std::uint32_t head, std::uint32_t c) const noexcept {
    return token * token_stride() + head * head_stride() + c;
  }

  Problem kv_;
  DType q_dtype_;
  std::vector<std::byte> q_;
};

/// A prompt in the memory of a device.
struct PlacedPrompt {
  PlacedPrompt(StagesUnderTest& under_test, const Prompt& prompt);
  [[nodiscard]] const std::byte* row(std::uint32_t token) const noexcept { return q + token * row_bytes; }

  std::byte* q = nullptr;
  std::uint64_t row_bytes = 0;
  KvView kv;
  AttentionShape shape;
  PrefillShape strides;  ///< outputs are dense float32 [tokens, group, head_dim]
};

/// What a PrefillTask asks for.
struct PrefillRange {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint32_t key_begin = 0;
  std::uint32_t key_end = kNone;
  std::uint32_t reach = 0;
  std::span<const std::uint32_t> blocks = {};  ///< as in PrefillTask; empty: all
};

/// The bit of (head, query block `row` of the chunk, key block) in the bits of a PrefillTask.
struct BlockBits {
  BlockBits(std::uint32_t first, std::uint32_t count) noexcept
      : top(first / kPrefillBlock), rows(prefill_blocks(first, count)), words(prefill_mask_words(first + count)) {}
  [[nodiscard]] std::size_t size(std::uint32_t group) const noexcept { return std::size_t{group} * rows * words; }
  [[nodiscard]] std::size_t word(std::uint32_t head, std::uint32_t row, std::uint32_t key_block) const noexcept {
    return (std::size_t{head} * rows + row) * words + key_block / 32;
  }
  [[nodiscard]] bool get(std::span<const std::uint32_t> bits, std::uint32_t head, std::uint32_t row,
                         std::uint32_t key_block) const noexcept {
    return (bits[word(head, row, key_block)] >> key_block % 32 & 1u) != 0;
  }
  void set(std::span<std::uint32_t> bits, std::uint32_t head, std::uint32_t row,
           std::uint32_t key_block) const noexcept {
    bits[word(head, row, key_block)] |= 1u << key_block % 32;
  }
  std::uint32_t top;    ///< position block of the first row
  std::uint32_t rows;   ///< query blocks
  std::uint32_t words;  ///< per row
};

namespace reference {

/// out is [count, group, head_dim], lse [count, group].
[[nodiscard]] Attention prefill(const Prompt& prompt, const PrefillRange& range);

}  // namespace reference
}  // namespace sluice::test
