#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tools/cli/bench/prefill_layer.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {

/// The attention of several prompts, chunk by chunk: one call of a verb for the chunks of all prompts that begin at the
/// same token. Everything enqueues on the stream, and must stay until the stream has passed it.
class PrefillBatch {
 public:
  /// The layers, of one shape, belong to the caller and must outlive it.
  PrefillBatch(const std::vector<std::unique_ptr<PrefillLayer>>& layers, std::uint32_t chunk_tokens, Device& device,
               Stream& stream);

  /// Lets every chunk of every prompt choose its blocks; all are dense at first. Nothing may be enqueued.
  void choose_everywhere();
  void choose(const PrefillSpec& spec);
  /// What the plan and the last choice say.
  void attend();

  [[nodiscard]] const std::vector<std::unique_ptr<PrefillPass>>& prompts() const noexcept { return prompts_; }
  /// Waits. [prompts, tokens, q_heads]
  [[nodiscard]] std::vector<float> lse() const;
  /// Waits. Of each prompt's `tokens` the rows, one prompt after the other: [tokens.size(), q_heads, head_dim] each.
  [[nodiscard]] std::vector<float> outputs(const std::vector<std::vector<std::uint32_t>>& tokens) const;
  /// Queues `verbs` again and again without a pause; the median time of one, in ms.
  [[nodiscard]] double time(std::uint32_t samples, const std::function<void()>& verbs) const;

 private:
  /// The chunks of all prompts that begin at one token.
  struct Call {
    std::vector<SelectBlocksTask> choice{};
    std::vector<PrefillTask> dense{}, chosen{};  ///< tasks of one call all have blocks, or none has
  };
  /// Collects the tasks of what is planned, which the verbs read when the stream gets to them.
  void plan_calls();

  Device& device_;
  std::shared_ptr<Stages> stages_;
  Stream& stream_;
  AttentionShape shape_;
  PrefillShape strides_;
  std::vector<std::unique_ptr<PrefillPass>> prompts_;
  std::vector<Call> calls_;
};

}  // namespace sluice::tools
