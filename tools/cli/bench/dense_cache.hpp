#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sluice/core_verbs.hpp"
#include "sluice/device.hpp"
#include "tools/llama/model.hpp"

namespace sluice::tools {

/// Keys and values of one sequence, all layers, in device memory, and dense attention to all of them by the device's
/// own kernel: what a model costs whose cache fits there. Thread safety: none.
class DenseCache {
 public:
  /// Room for `tokens` tokens.  @throws Error{Errc::out_of_capacity} if the device has none.
  DenseCache(const AttentionShape& shape, std::uint32_t tokens, Device& device);

  /// Appends tokens of a layer, [tokens, kv_heads, head_dim] where the device reads them. Once for each layer.
  void append(LayerId layer, const TensorView& k, const TensorView& v, Stream& stream);
  /// Appends one token and attends all up to it. Enqueues.
  void attend(const AttentionCall& call, Stream& stream);
  [[nodiscard]] std::uint64_t bytes() const noexcept;

 private:
  static constexpr std::uint32_t kPageTokens = 256;
  [[nodiscard]] std::byte* page_of(std::uint32_t layer, std::uint32_t head, std::uint32_t page) const noexcept;

  AttentionShape shape_;
  PageLayout layout_;
  std::uint32_t pages_;  ///< of a layer and KV head
  Device& device_;
  std::vector<std::unique_ptr<Buffer>> layers_;  ///< [kv_heads, pages]
  std::unique_ptr<Buffer> floats_;               ///< q, out, lse
  std::vector<std::uint32_t> tokens_;            ///< [layers]
  std::vector<std::uint32_t> frames_;            ///< 0, 1, 2, ...
  std::vector<PageRun> runs_;
};

}  // namespace sluice::tools
