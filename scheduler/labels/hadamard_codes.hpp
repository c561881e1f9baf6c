#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/heap_bytes.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/shape.hpp"

namespace sluice::scheduler {

/// Two bits for each channel of the Hadamard transforms of the keys of one KV head, by which keys are ranked (Adamas,
/// arXiv 2510.18413): the transform evens out what channels hold, each of its values falls into one of four buckets,
/// and keys are the better the smaller the Manhattan distance of their buckets from the query's. Buckets end at -s, 0
/// and s: of keys s is the standard deviation over the prompt, of a query its own. Where head_dim is no power of two,
/// blocks of the largest that divides it are transformed. Without a prompt keys are scored whole.
class HadamardCodes {
 public:
  explicit HadamardCodes(const AttentionShape& shape);

  void begin(const PromptContext& prompt);
  /// Codes the tokens before `tokens` that have no code, and the newest in any case: that of a forward which failed may
  /// have been another one.
  void follow(std::uint32_t tokens, KvReader& kv);
  /// As if there had never been more than `tokens` tokens.
  void truncate(std::uint32_t tokens) noexcept;

  /// out[i, h] = minus the distance of q[h] and the key of tokens[i], which have codes.
  void estimate(const float* q, std::span<const std::uint32_t> tokens, KvReader& kv, float* out) const;

  [[nodiscard]] std::uint32_t coded() const noexcept { return static_cast<std::uint32_t>(codes_.size() / bytes_); }
  /// Of one token.
  [[nodiscard]] std::uint64_t bytes_per_token() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept { return scheduler::heap_bytes(codes_); }
  /// What codes of `tokens` tokens hold at most.
  [[nodiscard]] static std::uint64_t most_heap_bytes(const AttentionShape& shape, std::uint32_t tokens) noexcept;

 private:
  std::uint32_t group_;
  std::uint32_t head_dim_;
  std::uint32_t bytes_;              ///< of one code: four channels in each, the first one lowest
  bool begun_ = false;               ///< there was a prompt
  float deviation_ = 0.f;            ///< of the transformed keys
  std::vector<std::uint8_t> codes_;  ///< [tokens, bytes]
};

/// In place: `row` times the Hadamard matrix of its size, or of the largest power of two that divides it, block by
/// block; scaled so that lengths stay.
void hadamard_transform(std::span<float> row) noexcept;

}  // namespace sluice::scheduler
