#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "sluice/device.hpp"
#include "sluice/shape.hpp"
#include "sluice/tensor.hpp"
#include "tools/llama/model.hpp"

namespace sluice::tools {

inline constexpr std::uint32_t kImportChunk = 4096;
/// Of a prompt's newest tokens, those whose queries are shown to policies that begin with them.
inline constexpr std::uint32_t kShownQueries = 32;

/// Tokens of a layer, behind those that it has; queries of a prompt's newest tokens come with the last ones.
using PutChunk =
    std::function<void(LayerId layer, const TensorView& k, const TensorView& v, const TensorView& queries)>;

/// What `bench decode` decodes behind: keys and values of prompts, in pinned memory, and what the tokens behind them
/// look for.
class DecodePrompt {
 public:
  virtual ~DecodePrompt() = default;
  /// `put` for every chunk of a sequence's prompt, layer by layer.
  virtual void for_each_chunk(std::uint32_t sequence, std::uint32_t tokens, const PutChunk& put) const = 0;
  /// Before a forward of `drafts` tokens of each sequence, the first of them at `position`: enqueues what puts them
  /// where `attended` has them.
  virtual void begin(std::uint32_t position, std::uint32_t drafts, Stream& stream) = 0;
  /// A layer of that forward: what is attended instead of what the model says, in the same place every time, so that a
  /// graph finds it there.
  [[nodiscard]] virtual AttentionCall attended(const AttentionCall& call, std::uint32_t drafts) const = 0;
};

/// Random keys, values and queries. Every chunk of every layer starts at another place of one pool. Behind them the
/// model's own are attended.
class RandomPrompt final : public DecodePrompt {
 public:
  RandomPrompt(Device& device, const AttentionShape& shape);
  void for_each_chunk(std::uint32_t sequence, std::uint32_t tokens, const PutChunk& put) const override;
  void begin(std::uint32_t, std::uint32_t, Stream&) override {}
  [[nodiscard]] AttentionCall attended(const AttentionCall& call, std::uint32_t) const override { return call; }

 private:
  static constexpr std::size_t kPoolElements = 24u << 20;
  [[nodiscard]] TensorView rows(std::uint32_t salt, std::uint32_t tokens, std::uint32_t heads) const;

  AttentionShape shape_;
  std::unique_ptr<Buffer> pool_;
};

}  // namespace sluice::tools
