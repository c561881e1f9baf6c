#pragma once

#include <memory>
#include <vector>

#include "sluice/engine.hpp"
#include "tools/cli/bench/decode_prompt.hpp"
#include "tools/cli/bench/dense_cache.hpp"
#include "tools/llama/model.hpp"

/// Attention of a model that `bench decode` times, behind a prompt.
namespace sluice::tools {

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
  DenseAttention(const AttentionShape& shape, const DecodePrompt& prompt, std::uint32_t sequences, std::uint32_t tokens,
                 std::uint32_t steps, Device& device, Stream& stream)
      : stream_(stream), cache_(shape, tokens + steps, sequences, device) {
    for (std::uint32_t i = 0; i < sequences; ++i) {
      prompt.for_each_chunk(i, tokens, [&](LayerId layer, const TensorView& k, const TensorView& v, const TensorView&) {
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
  EngineAttention(const EngineOptions& options, const PolicySpec& policy, const DecodePrompt& prompt,
                  std::uint32_t tokens, const std::shared_ptr<Device>& device, Stream& stream)
      : stream_(stream.native_handle() != nullptr ? stream.native_handle() : &stream), engine_(options, device) {
    bucket_ = engine_.options().largest;
    bucket_.prefill_rows = bucket_.prefills = 0;
    bucket_.audit = false;
    for (std::uint32_t i = 0; i < options.sequences; ++i) {
      items_.push_back({.sequence = engine_.begin(policy), .tokens = options.largest.decode_rows / options.sequences});
      prompt.for_each_chunk(i, tokens,
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
  /// The forwards from now on are held against exact attention, if the engine was built for that.
  void audit() noexcept { bucket_.audit = true; }
  /// What that found, of all sequences.
  [[nodiscard]] AuditReport audited() const {
    AuditReport all;
    for (const PlanItem& item : items_) all.merge_totals(engine_.audit(item.sequence));
    return all;
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
