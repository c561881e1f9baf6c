#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "sluice/runtime.hpp"
#include "tools/llama/conversation.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/prompt_cache.hpp"
#include "tools/llama/staging.hpp"

namespace sluice::tools {

/// One conversation: a Model whose attention is a sequence of a Runtime, which it begins and ends.
///
///   Session session(model, runtime, parse_policy("sluice"));
///   session.prefill(prompt);
///   while (!done) session.decode(sampler.next(session.logits()));
///
/// Model and runtime must be on the same device. On a GPU a step, or a chunk of a prompt, is queued in the runtime's
/// device_stream() without waiting between layers; prefill and decode wait once, for the logits.
/// Model and runtime must outlive the session. A call that throws after it reached the runtime leaves the sequence
/// between two layers; the session then refuses further work, and only its destruction is left. Lack of memory is an
/// Error{Errc::out_of_capacity} too.
/// Thread safety: none, and sessions of one Runtime must not be used at the same time.
class Session final : public Conversation {
 public:
  /// @throws Error{Errc::invalid_argument} if the runtime was built for another shape or is not where the model is;
  ///         else as Runtime::begin.
  Session(const Model& model, Runtime& runtime, const PolicySpec& policy, const PrefillSpec& prefill = {});
  ~Session() override;
  Session(Session&& other) noexcept;
  Session& operator=(Session&&) = delete;

  /// Appends a prompt, in chunks of the runtime's `prefill_chunk`. May be called again before the first decode.
  /// @param tokens  at least one
  /// @throws Error{Errc::invalid_argument} for an empty prompt, a token outside the vocabulary or a prompt beyond
  ///         max_position_embeddings, all before anything changes; else as Runtime::prefill.
  void prefill(std::span<const int> tokens, const Progress& progress = {}) override {
    prefill(tokens, progress, nullptr);
  }
  /// @param record  if not null, receives the prompt for import_prompt; only for the session's first tokens
  void prefill(std::span<const int> tokens, const Progress& progress, PromptCache* record);

  /// Takes over a recorded prompt without computing it. Only for an empty session.
  /// @throws Error{Errc::invalid_argument} if the cache is incomplete or of another shape; else as
  /// Runtime::import_prefix.
  void import_prompt(const PromptCache& prompt);

  /// Appends one token and computes the logits after it.
  /// @throws Error{Errc::invalid_argument} before a prompt, for a token outside the vocabulary and past
  ///         max_position_embeddings; else as Runtime::step.
  void decode(int token) override;

  /// Logits after the newest token, [vocab_size]; empty before the first. Valid until the next call.
  [[nodiscard]] std::span<const float> logits() const noexcept override { return logits_; }
  /// Tokens in the sequence: prompt and decoded.
  [[nodiscard]] std::uint32_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] SequenceId sequence() const noexcept { return sequence_; }
  [[nodiscard]] Stats stats() const { return runtime_->stats(sequence_); }

  friend void decode_batch(std::span<Session* const> sessions, std::span<const int> tokens);

 private:
  static void decode_together(std::span<Session* const> sessions, std::span<const int> tokens);
  void prefill_all(std::span<const int> tokens, const Progress& progress, PromptCache* record);
  void import_all(const PromptCache& prompt);
  void require_usable(std::uint64_t more_tokens) const;
  void prefill_chunk(std::span<const int> chunk, bool last, PromptCache* record);
  void import_chunk(const PromptCache& prompt, LayerId layer, std::uint32_t first, std::uint32_t count);
  void record_layer(const AttentionCall& call, PromptCache& record);
  /// Between prompt caches and the model's device, which must have one.
  [[nodiscard]] TensorCourier& courier();

  const Model* model_;
  Runtime* runtime_;  ///< null once moved from
  SequenceId sequence_;
  std::uint32_t tokens_ = 0;
  bool decoding_ = false;  ///< a step was made: no more prefill
  bool broken_ = false;    ///< an error left the sequence between two layers
  std::vector<float> logits_;
  std::vector<float> batch_logits_;  ///< [batch, vocab_size], of the batches that this session leads
  std::vector<PlacedToken> placed_;
  Activations work_;
  std::unique_ptr<TensorCourier> courier_;
};

/// One decode step of several sessions at once: tokens[i] goes to sessions[i]. Weights are read once for all.
/// @throws Error{Errc::invalid_argument} unless the sessions are different, of one model and one runtime, and as many
///         as the tokens; else as Session::decode. After an error from the runtime all of them refuse further work.
void decode_batch(std::span<Session* const> sessions, std::span<const int> tokens);

}  // namespace sluice::tools
