#include "tests/support/decoding.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "tests/support/policy_reference.hpp"

namespace sluice::test {
namespace {

constexpr AttentionShape kShape{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t kPrompt = 300;
constexpr std::uint32_t kSteps = 40;
constexpr std::uint32_t kQueries = 40;  ///< of the prompt's newest tokens, at least what history begins with

double tolerance(const EngineRig& rig) { return rig.kv_dtype == DType::f32 ? 1e-4 : 2e-3; }

/// All layers' outputs of each token behind the prompt.
std::vector<std::vector<double>> wanted(const EngineRig& rig, const DecodedLine& line) {
  const PolicySpec policy = parse_policy(line.policy);
  std::vector<std::vector<double>> want(kSteps);
  if (policy.estimate == Estimate::int4) {
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        const std::vector<double> part =
            line.story->attended(layer, kPrompt + step, policy.near.sink_tokens, policy.near.recent_tokens,
                                 scheduler::budget_tokens(policy.budget, kPrompt + step + 1));
        want[step].insert(want[step].end(), part.begin(), part.end());
      }
    }
    return want;
  }
  policies::Reference reference(rig, *line.story, kShape, policy);
  reference.prefill(kPrompt);
  for (std::vector<double>& each : want) {
    const std::vector<float> out = reference.decode();
    each.assign(out.begin(), out.end());
  }
  return want;
}

/// One round: the lines begin, are decoded to their ends, and end.
class Round {
 public:
  Round(const EngineRig& rig, Engine& engine, ForwardTensors& tensors, const std::vector<DecodedLine>& lines,
        const DecodingHooks& hooks, const DecodingHooks::Enqueue& enqueue, DecodingReport& report)
      : rig_(rig),
        engine_(engine),
        tensors_(tensors),
        lines_(lines),
        hooks_(hooks),
        enqueue_(enqueue),
        report_(report) {}

  void run() {
    for (const DecodedLine& line : lines_) {
      tellers_.push_back({.story = line.story.get(), .id = engine_.begin(parse_policy(line.policy))});
      import_story(engine_, rig_, tellers_.back(), line.prompt, kNone, line.prompt - kQueries);
      ids_.push_back(tellers_.back().id);
    }
    for (std::uint32_t step = 0; step < kSteps; ++step) {
      // What is late once is not late every time.
      constexpr int kAttempts = 4;
      for (int attempt = 1; !forward(attempt == kAttempts);) ++attempt;
      for (Teller& teller : tellers_) ++teller.at;
      require_right(step);
    }
    for (const SequenceId id : ids_) engine_.end(id);
  }

 private:
  /// Whether it got to its end. `last`: it must.
  bool forward(bool last) {
    for (std::uint32_t row = 0; row < tellers_.size(); ++row) tensors_.set(row, *tellers_[row].story, tellers_[row].at);
    tensors_.spoil();
    const Batch batch = engine_.plan(one_each(ids_), engine_.options().largest, rig_.stream);
    enqueue_();
    hooks_.enqueued();
    try {
      engine_.finish(batch);
    } catch (const Error& error) {
      if (last || error.code() != Errc::device) throw;
      rig_.synchronize();
      require_failed_well(error.what());
      ++report_.failed;
      return false;
    }
    rig_.synchronize();
    ++report_.forwards;
    return true;
  }
  void require_failed_well(const std::string& reason) const {
    if (reason.find("not answered in time") == std::string::npos)
      throw std::runtime_error("a forward failed for another reason than a late answer: " + reason);
    for (std::uint32_t row = 0; row < tellers_.size(); ++row) {
      const std::vector<float> out = tensors_.out(row);
      const std::size_t layer = out.size() / kShape.layers;
      // The layer whose answer was late, if not one before the last, and all behind it.
      if (!std::all_of(out.end() - static_cast<std::ptrdiff_t>(layer), out.end(),
                       [](float x) { return std::isnan(x); }))
        throw std::runtime_error("a forward failed, and its last layer's outputs are numbers");
      if (engine_.tokens(ids_[row]) != tellers_[row].at)
        throw std::runtime_error("a forward failed, and a sequence has another number of tokens");
    }
  }
  void require_right(std::uint32_t step) const {
    for (std::uint32_t row = 0; row < tellers_.size(); ++row) {
      if (engine_.tokens(ids_[row]) != tellers_[row].at)
        throw std::runtime_error("a forward ended, and a sequence does not have its token");
      const std::vector<float> out = tensors_.out(row);
      const std::vector<double>& want = lines_[row].want[step];
      double worst = 0.0;
      for (std::size_t i = 0; i < want.size(); ++i) {
        const double off = std::abs(want[i] - out[i]);
        worst = std::isnan(off) ? INFINITY : std::max(worst, off);
      }
      if (!(worst < tolerance(rig_)))
        throw std::runtime_error("outputs of `" + lines_[row].policy + "`, token " + std::to_string(step) +
                                 " behind the prompt, are off by " + std::to_string(worst));
    }
  }

  const EngineRig& rig_;
  Engine& engine_;
  ForwardTensors& tensors_;
  const std::vector<DecodedLine>& lines_;
  const DecodingHooks& hooks_;
  const DecodingHooks::Enqueue& enqueue_;
  DecodingReport& report_;
  std::vector<Teller> tellers_;
  std::vector<SequenceId> ids_;
};

}  // namespace

std::vector<DecodedLine> decoded_lines(const EngineRig& rig, std::uint64_t seed) {
  std::vector<DecodedLine> lines;
  for (const char* const policy : {"exact | int4 | top_k=max(64, 0.25%) | near=0%,sinks=4,recent=128", "lfps"}) {
    lines.push_back({.policy = policy,
                     .story = std::make_unique<Story>(kShape, kPrompt + kSteps, 2 * seed + lines.size()),
                     .prompt = kPrompt,
                     .want = {}});
    if (rig.kv_dtype != DType::f32) lines.back().story->round_queries();
    lines.back().want = wanted(rig, lines.back());
  }
  return lines;
}

EngineOptions decoding_options(const EngineRig& rig, const std::vector<DecodedLine>& lines) {
  const auto rows = static_cast<std::uint32_t>(lines.size());
  EngineOptions options{.shape = kShape,
                        .kv_dtype = rig.kv_dtype,
                        .policies = {},  // Those of its lines.
                        .largest = {.decode_rows = rows},
                        .sequences = rows,
                        .threads = 2,
                        .pin_threads = false};
  options.host_bytes = 30 * rows * block_bytes(options);
  options.near_bytes = 12 * near_block_bytes(options);  // Less than there are, so that rows come and go.
  for (const DecodedLine& line : lines) options.policies.push_back(parse_policy(line.policy));
  return options;
}

DecodingReport decode_lines(const EngineRig& rig, const EngineOptions& options, const std::vector<DecodedLine>& lines,
                            const DecodingHooks& hooks) {
  Engine engine(options, rig.device);
  ForwardTensors tensors(*rig.device, options.shape, static_cast<std::uint32_t>(lines.size()));
  const DecodingHooks::Enqueue enqueue = hooks.prepare(engine, tensors);
  DecodingReport report;
  do {
    Round(rig, engine, tensors, lines, hooks, enqueue, report).run();
  } while (hooks.again());
  return report;
}

}  // namespace sluice::test
