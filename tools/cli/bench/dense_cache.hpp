#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sluice/device.hpp"
#include "tools/llama/model.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {

/// Keys and values of a batch of sequences, all layers, in device memory, and dense attention to all of them by the
/// device's own kernel: what a model costs whose cache fits there. Thread safety: none.
class DenseCache {
 public:
  /// Room for `tokens` tokens of each sequence.  @throws Error{Errc::out_of_capacity} if the device has none.
  DenseCache(const AttentionShape& shape, std::uint32_t tokens, std::uint32_t sequences, Device& device);

  /// Appends tokens of a layer, [tokens, kv_heads, head_dim] where the device reads them. Once for each layer.
  void append(std::uint32_t sequence, LayerId layer, const TensorView& k, const TensorView& v, Stream& stream);
  /// Appends one token of each sequence, rows of the call, and attends all up to it. Enqueues.
  void attend(const AttentionCall& call, Stream& stream);
  /// Bytes of a token, all layers.
  [[nodiscard]] static std::uint64_t token_bytes(const AttentionShape& shape) noexcept;

 private:
  static constexpr std::uint32_t kPageTokens = 256;
  [[nodiscard]] std::byte* page_of(std::uint32_t sequence, std::uint32_t layer, std::uint32_t head,
                                   std::uint32_t page) const noexcept;
  /// Where a token of a sequence goes.
  void place(std::uint32_t sequence, LayerId layer, const TensorView& k, const TensorView& v, std::uint32_t first,
             std::uint32_t count, std::vector<AppendTask>& tasks);

  AttentionShape shape_;
  PageLayout layout_;
  std::uint32_t pages_;  ///< of a sequence, layer and KV head
  std::uint32_t sequences_;
  std::shared_ptr<Stages> stages_;
  std::vector<std::unique_ptr<Buffer>> layers_;  ///< [sequences, kv_heads, pages]
  std::unique_ptr<Buffer> floats_;               ///< q, out, lse of all
  std::vector<std::uint32_t> tokens_;            ///< [sequences, layers]
  std::vector<std::uint32_t> frames_;            ///< 0, 1, 2, ...
  std::vector<std::vector<PageRun>> runs_;       ///< of each sequence
};

}  // namespace sluice::tools
