#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace sluice::tools {

/// Called after every chunk of a prefill with the prompt tokens done so far and in total.
using Progress = std::function<void(std::uint32_t done, std::uint32_t total)>;

/// A sequence of tokens that a model reads and continues, wherever its attention is computed.
class Conversation {
 public:
  virtual ~Conversation() = default;
  /// Appends a prompt, in chunks.  @param tokens  at least one
  virtual void prefill(std::span<const int> tokens, const Progress& progress = {}) = 0;
  /// Appends one token and computes the logits after it.
  virtual void decode(int token) = 0;
  /// The likeliest token after the newest one, as `argmax` of the logits, which are not copied for it.
  /// @throws Error{Errc::invalid_argument} if no logit is a number, or there are none.
  [[nodiscard]] virtual int best() const = 0;
  /// Logits after the newest token, [vocab_size], copied from where they are when they are asked for; empty before the
  /// first. Valid until the next call.
  [[nodiscard]] virtual std::span<const float> logits() const = 0;
};

}  // namespace sluice::tools
