#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sluice/engine.hpp"
#include "tests/support/engine_rig.hpp"

/// Two sequences that are decoded again and again, each token held against float64: one whose policy chooses on the
/// device, `sluice`, and one that learns on the CPU, `lfps`. For processes in which something happens meanwhile.
namespace sluice::test {

/// A sequence, and what comes of each of its tokens behind the prompt.
struct DecodedLine {
  std::string policy;
  std::unique_ptr<Story> story;
  std::uint32_t prompt = 0;
  std::vector<std::vector<double>> want;  ///< [tokens behind the prompt][layers, q_heads, head_dim]
};
/// Both of them; a row each of a forward.
[[nodiscard]] std::vector<DecodedLine> decoded_lines(const EngineRig& rig, std::uint64_t seed);
/// Options of an engine that serves them.
[[nodiscard]] EngineOptions decoding_options(const EngineRig& rig, const std::vector<DecodedLine>& lines);

struct DecodingHooks {
  /// Enqueues the forward that was planned.
  using Enqueue = std::function<void()>;
  /// Makes that for an engine and its tensors; nothing is planned yet.
  std::function<Enqueue(Engine&, ForwardTensors&)> prepare;
  /// A forward has been enqueued; it has not ended, perhaps.
  std::function<void()> enqueued = [] {};
  /// Whether the lines are decoded once more.
  std::function<bool()> again;
};

struct DecodingReport {
  std::uint64_t forwards = 0;  ///< that got to their end
  std::uint64_t failed = 0;    ///< that did not, and were repeated
};

/// A forward that fails must do it as documented: `finish` says so, the newest outputs are no numbers, no sequence has
/// its token, and the forward repeated is right.  @throws std::runtime_error naming what was not right, and Error
DecodingReport decode_lines(const EngineRig& rig, const EngineOptions& options, const std::vector<DecodedLine>& lines,
                            const DecodingHooks& hooks);

}  // namespace sluice::test
