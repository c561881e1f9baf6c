#include "tools/cli/bench/prefill_batch.hpp"

#include <algorithm>
#include <chrono>

#include "tools/cli/text/report.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::tools {
namespace {

constexpr std::chrono::minutes kPatience{10};

}  // namespace

PrefillBatch::PrefillBatch(const std::vector<std::unique_ptr<PrefillLayer>>& layers, std::uint32_t chunk_tokens,
                           Device& device, Stream& stream)
    : device_(device),
      stages_(stages_of(device)),
      stream_(stream),
      shape_(layers.front()->options().shape),
      strides_(layers.front()->strides()) {
  for (const auto& layer : layers) {
    prompts_.push_back(std::make_unique<PrefillPass>(*layer, chunk_tokens, device, stream));
  }
  plan_calls();
}

void PrefillBatch::plan_calls() {
  std::size_t most = 0;
  for (const auto& prompt : prompts_) most = std::max(most, prompt->chunks());
  calls_.assign(most, {});
  for (std::size_t c = 0; c < calls_.size(); ++c) {
    for (const auto& prompt : prompts_) {
      prompt->add_choice(c, calls_[c].choice);
      prompt->add_attention(c, calls_[c].dense, calls_[c].chosen);
    }
  }
}

void PrefillBatch::choose_everywhere() {
  for (const auto& prompt : prompts_) prompt->plan(std::vector<bool>(prompt->chunks(), true));
  plan_calls();
}

void PrefillBatch::choose(const PrefillSpec& spec) {
  for (const Call& call : calls_) stages_->select_blocks(call.choice, spec, strides_, shape_, &stream_);
}

void PrefillBatch::attend() {
  for (const Call& call : calls_) {
    stages_->prefill(call.dense, strides_, shape_, &stream_);
    stages_->prefill(call.chosen, strides_, shape_, &stream_);
  }
}

std::vector<float> PrefillBatch::lse() const {
  std::vector<float> all;
  for (const auto& prompt : prompts_) {
    const std::vector<float> one = prompt->lse();
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

std::vector<float> PrefillBatch::outputs(const std::vector<std::vector<std::uint32_t>>& tokens) const {
  std::vector<float> all;
  for (std::size_t i = 0; i < prompts_.size(); ++i) {
    const std::vector<float> one = prompts_[i]->outputs(tokens[i]);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

double PrefillBatch::time(std::uint32_t samples, const std::function<void()>& verbs) const {
  // The first wakes a GPU's clocks and hides what it takes to queue the others.
  const std::uint32_t skipped = device_.info().own_processor ? 1 : 0;
  std::vector<std::unique_ptr<Event>> events;
  for (std::uint32_t i = 0; i <= samples + skipped; ++i) {
    if (i != 0) verbs();
    events.push_back(device_.create_event());
    stream_.record(*events.back());
  }
  stream_.synchronize(deadline_after(kPatience));
  std::vector<double> times;
  for (std::size_t i = skipped + 1; i < events.size(); ++i) {
    times.push_back(std::chrono::duration<double, std::milli>(events[i]->time() - events[i - 1]->time()).count());
  }
  return percentile(times, 0.5);
}

}  // namespace sluice::tools
