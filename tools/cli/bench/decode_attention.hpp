#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "sluice/engine.hpp"
#include "tools/cli/bench/dense_cache.hpp"
#include "tools/cli/bench/random_numbers.hpp"
#include "tools/llama/model.hpp"

/// Attention of a model that `bench decode` times, behind a prompt of random numbers.
namespace sluice::tools {

inline constexpr std::uint32_t kImportChunk = 4096;

/// Random keys, values and queries in pinned memory. Every chunk of every layer starts at another place of one pool.
class RandomPrompt {
 public:
  RandomPrompt(Device& device, const AttentionShape& shape)
      : shape_(shape), pool_(device.allocate_pinned(kPoolElements * sizeof(std::uint16_t))) {
    fill_random_bf16({reinterpret_cast<std::uint16_t*>(pool_->data()), kPoolElements});
  }
  [[nodiscard]] TensorView rows(std::uint32_t salt, std::uint32_t tokens, std::uint32_t heads) const {
    const std::uint64_t elements = std::uint64_t{tokens} * heads * shape_.head_dim;
    const std::uint64_t places = (kPoolElements - elements) / shape_.head_dim;
    const std::byte* data =
        pool_->data() + std::uint64_t{salt} * 2'654'435'761u % places * shape_.head_dim * sizeof(std::uint16_t);
    return dense_view(data, DType::bf16, tokens, heads, shape_.head_dim);
  }

 private:
  static constexpr std::size_t kPoolElements = 24u << 20;
  AttentionShape shape_;
  std::unique_ptr<Buffer> pool_;
};

/// put(layer, k, v, queries) for every chunk of a sequence's prompt, layer by layer; queries of its newest tokens come
/// last.
inline void for_each_chunk(
    const RandomPrompt& prompt, const AttentionShape& shape, std::uint32_t sequence, std::uint32_t tokens,
    const std::function<void(LayerId, const TensorView&, const TensorView&, const TensorView&)>& put) {
  constexpr std::uint32_t kQueries = 32;
  std::uint32_t salt = sequence * 0x0100'0000u;
  for (std::uint32_t at = 0; at < tokens; at += kImportChunk) {
    const std::uint32_t count = std::min(kImportChunk, tokens - at);
    const std::uint32_t shown = at + count == tokens ? std::min(kQueries, count) : 0;
    for (LayerId layer{0}; layer.value < shape.layers; ++layer.value, salt += 3) {
      put(layer, prompt.rows(salt + 1, count, shape.kv_heads), prompt.rows(salt + 2, count, shape.kv_heads),
          prompt.rows(salt + 3, shown, shape.q_heads));
    }
  }
}

/// One method at one length: attention for a model's forwards behind a prompt that it holds.
class Attention {
 public:
  virtual ~Attention() = default;
  virtual void begin() {}
  virtual void attend(const AttentionCall& call) = 0;
  /// `tokens`: that there are from now on, those of drafts that were not accepted being taken back.
  virtual void end(std::uint32_t tokens) { (void)tokens; }
};

/// What a forward decodes: one token, or drafts of a sequence, of which one is accepted.
struct Verified {
  std::uint32_t rows = 1;
  std::uint32_t drafts = 1;  ///< as in Bucket
};

class DenseAttention final : public Attention {
 public:
  DenseAttention(const AttentionShape& shape, const RandomPrompt& prompt, std::uint32_t sequences, std::uint32_t tokens,
                 std::uint32_t steps, Device& device, Stream& stream)
      : stream_(stream), cache_(shape, tokens + steps, sequences, device) {
    for (std::uint32_t i = 0; i < sequences; ++i) {
      for_each_chunk(prompt, shape, i, tokens,
                     [&](LayerId layer, const TensorView& k, const TensorView& v, const TensorView&) {
                       cache_.append(i, layer, k, v, stream_);
                     });
      stream_.synchronize(deadline_after(std::chrono::minutes(2)));
    }
  }
  void attend(const AttentionCall& call) override { cache_.attend(call, stream_); }

 private:
  Stream& stream_;
  DenseCache cache_;
};

/// As many sequences as the engine has, with equal parts of its rows.
class EngineAttention final : public Attention {
 public:
  EngineAttention(const EngineOptions& options, const PolicySpec& policy, const RandomPrompt& prompt,
                  std::uint32_t tokens, const std::shared_ptr<Device>& device, Stream& stream)
      : stream_(stream.native_handle() != nullptr ? stream.native_handle() : &stream), engine_(options, device) {
    bucket_ = engine_.options().largest;
    bucket_.prefill_rows = bucket_.prefills = 0;
    for (std::uint32_t i = 0; i < options.sequences; ++i) {
      items_.push_back({.sequence = engine_.begin(policy), .tokens = options.largest.decode_rows / options.sequences});
      for_each_chunk(prompt, options.shape, i, tokens,
                     [&](LayerId layer, const TensorView& k, const TensorView& v, const TensorView& q) {
                       engine_.import_prefix(items_[i].sequence, layer, k, v, stream_, q);
                     });
    }
  }
  void begin() override { batch_ = engine_.plan(items_, bucket_, stream_); }
  void attend(const AttentionCall& call) override {
    engine_.attend(bucket_, call.layer, call.q, call.k, call.v, call.out, stream_);
  }
  void end(std::uint32_t tokens) override {
    engine_.finish(batch_);
    for (const PlanItem& item : items_) {
      if (item.tokens != 1) engine_.truncate(item.sequence, tokens);
    }
  }
  [[nodiscard]] const sluice::Engine& engine() const noexcept { return engine_; }

 private:
  void* stream_;
  sluice::Engine engine_;
  std::vector<PlanItem> items_;
  Bucket bucket_;
  Batch batch_;
};

}  // namespace sluice::tools
