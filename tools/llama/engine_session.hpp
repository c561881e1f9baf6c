#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "sluice/engine.hpp"
#include "tools/llama/conversation.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/prompt_cache.hpp"
#include "tools/llama/runner.hpp"
#include "tools/llama/staging.hpp"

namespace sluice::tools {

/// One conversation whose attention is a sequence of a sluice::Engine, which it begins and ends. Prompts go through the
/// largest bucket's prefill rows, tokens through one that decodes. On a GPU a whole forward is queued without waiting.
/// Model and engine must be on the same device and outlive the session. Sessions that share a Runner share its buffers,
/// and the graphs in which tokens are decoded on a GPU, but for those that are audited or traced.
/// Thread safety: none, and sessions of one engine must not be used at the same time.
class EngineSession final : public Conversation {
 public:
  /// @throws Error{Errc::invalid_argument} if the engine was built for another shape or has no room for prompts;
  ///         else as Engine::begin.
  EngineSession(std::shared_ptr<Runner> runner, const PolicySpec& policy);
  /// With a runner of its own.
  EngineSession(const Model& model, sluice::Engine& engine, std::shared_ptr<Device> device, const PolicySpec& policy);
  /// Goes on with a sequence of the engine whose tokens are of this model, and ends it.
  EngineSession(std::shared_ptr<Runner> runner, SequenceId sequence);
  /// Goes on where another one is, with its runner, under a policy of its own; see Engine::fork.
  EngineSession(const EngineSession& parent, const PolicySpec& policy);
  ~EngineSession() override;
  EngineSession(const EngineSession&) = delete;
  EngineSession& operator=(const EngineSession&) = delete;

  /// @throws Error{Errc::invalid_argument} for an empty prompt, a token outside the vocabulary or a prompt beyond
  ///         max_position_embeddings, all before anything changes; else as Engine::plan and Engine::finish.
  void prefill(std::span<const int> tokens, const Progress& progress = {}) override {
    prefill(tokens, progress, nullptr);
  }
  /// @param record  if not null, receives the prompt for import_prompt; only for the session's first tokens
  void prefill(std::span<const int> tokens, const Progress& progress, PromptCache* record);
  /// Takes over a recorded prompt without computing it. Only for an empty session.
  /// @throws Error{Errc::invalid_argument} if the cache is incomplete or of another shape; else as
  /// Engine::import_prefix.
  void import_prompt(const PromptCache& prompt);
  void decode(int token) override;
  friend void decode_batch(std::span<EngineSession* const> sessions, std::span<const int> tokens);
  /// Audits every N-th token that is decoded, the next one first; 0: none. See Engine::audit; the engine's largest
  /// bucket has to have audits.
  void audit_every(std::uint32_t tokens) noexcept { audit_every_ = tokens; }
  /// Traces every forward that is this session's alone; the engine's largest bucket has to have traces.
  using OnTrace = std::function<void(const ForwardTrace& trace, bool prefill)>;
  void on_trace(OnTrace called) { on_trace_ = std::move(called); }
  /// Both @throws Error{Errc::invalid_argument} if a forward failed since, and took the logits along: go on by its
  /// token.
  [[nodiscard]] int best() const override;
  [[nodiscard]] std::span<const float> logits() const override;
  [[nodiscard]] std::uint32_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] SequenceId sequence() const noexcept { return sequence_; }
  /// Tokens decoded here, and how many of the sequence each of them saw, all together.
  [[nodiscard]] std::uint32_t decoded() const noexcept { return decoded_; }
  [[nodiscard]] std::uint64_t visible() const noexcept { return visible_; }

 private:
  static void decode_together(std::span<EngineSession* const> sessions, std::span<const int> tokens);
  /// One forward of these sessions, which is finished, or taken back. `queue` queues its work, which ends by `attend`.
  static Batch run(std::span<EngineSession* const> sessions, std::span<const PlanItem> items, const Bucket& bucket,
                   const std::function<void(Runner&)>& queue);
  void require_room() const;
  void require_usable(std::size_t more) const;
  void import_chunk(const PromptCache& prompt, LayerId layer, std::uint32_t first, std::uint32_t count);
  /// A chunk of a prompt. @param last  its last one, which has logits
  void read_chunk(std::span<const int> tokens, bool last, PromptCache* record);
  void record_layer(const AttentionCall& call, PromptCache& record);
  /// Between prompt caches and the model's device, if it has one.
  [[nodiscard]] TensorCourier* courier();
  [[nodiscard]] sluice::Engine& engine() const noexcept { return runner_->engine(); }
  [[nodiscard]] const Model& model() const noexcept { return runner_->model(); }

  std::shared_ptr<Runner> runner_;
  SequenceId sequence_;
  std::uint32_t tokens_ = 0;
  std::uint32_t decoded_ = 0;
  std::uint64_t visible_ = 0;
  std::uint32_t audit_every_ = 0;
  OnTrace on_trace_;             ///< empty: nothing is traced
  bool broken_ = false;          ///< a forward is under way that could not be taken back
  bool lost_ = false;            ///< the logits went with a forward that failed
  std::shared_ptr<Logits> now_;  ///< after the newest token; null: there are none
  std::unique_ptr<TensorCourier> courier_;
};

/// One forward of a token of each session: tokens[i] goes to sessions[i]. Weights are read once for all.
/// @throws Error{Errc::invalid_argument} unless the sessions are different, of one model and one engine with as many
///         decode rows, and as many as the tokens, before anything changes; else as EngineSession::decode. After an
///         error no session has its token.
void decode_batch(std::span<EngineSession* const> sessions, std::span<const int> tokens);

}  // namespace sluice::tools
