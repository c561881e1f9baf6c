#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "sluice/engine.hpp"
#include "tools/cli/run/generator.hpp"
#include "tools/llama/engine_session.hpp"

/// Prompts that are kept in a file from one `sluice run` to the next.
namespace sluice::tools {

/// What keys and values of a prompt depend on besides its tokens: the model's configuration and weights, by a digest of
/// all of their bytes, which is kept in the user's cache, or the name of a random one; how prompts attend; and the
/// policy.
[[nodiscard]] std::string session_model(const RunOptions& options, const PolicySpec& policy,
                                        const PrefillSpec& prefill);

/// Before a long prompt is read: whether a sequence of so many tokens can be parked there.
/// @throws Error{Errc::io} if its directory takes no new file, or has too little room
void require_room(const std::string& file, const EngineOptions& options, std::uint32_t tokens);

/// The sequence that is parked in `file`, with no more of its tokens than lead to the last one of `prompt`; nothing if
/// there is no such file.
/// @throws Error{Errc::invalid_argument} if it is of another prompt; else as Engine::resume
[[nodiscard]] std::optional<SequenceId> resume_session(sluice::Engine& engine, const std::string& file,
                                                       const std::string& model, std::span<const int> prompt);

/// A session that may have the prompt's first tokens already, and is parked once it has all of it.
class ParkedPrompt final : public Conversation {
 public:
  ParkedPrompt(EngineSession& session, sluice::Engine& engine, std::string file, std::string model)
      : session_(session), engine_(engine), file_(std::move(file)), model_(std::move(model)) {}

  /// Once, with the whole prompt. That one could not be parked is said, and it is answered all the same.
  void prefill(std::span<const int> tokens, const Progress& progress) override;
  void decode(int token) override { session_.decode(token); }
  [[nodiscard]] int best() const override { return session_.best(); }
  [[nodiscard]] std::span<const float> logits() const override { return session_.logits(); }
  /// It could not be parked.
  [[nodiscard]] bool failed() const noexcept { return failed_; }

 private:
  EngineSession& session_;
  sluice::Engine& engine_;
  std::string file_;
  std::string model_;
  bool failed_ = false;
};

}  // namespace sluice::tools
