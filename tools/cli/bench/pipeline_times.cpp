#include "tools/cli/bench/pipeline_times.hpp"

#include <algorithm>
#include <map>

namespace sluice::tools {

PipelineTimes pipeline_times(const ForwardTrace& trace, std::uint32_t layers) {
  struct Choice {
    double begin_us = 0.0;
    double end_us = 0.0;
  };
  std::map<std::uint32_t, Choice> choices;  // Several threads have a part in one.
  PipelineTimes times;
  for (const TraceSpan& span : trace.spans) {
    if (span.stage != Stage::choose_far) continue;
    Choice& choice = choices.try_emplace(span.layer, Choice{span.begin_us, span.end_us}).first->second;
    choice.begin_us = std::min(choice.begin_us, span.begin_us);
    choice.end_us = std::max(choice.end_us, span.end_us);
  }
  for (const auto& [layer, choice] : choices) times.choice_us += choice.end_us - choice.begin_us;
  for (const TraceStall& stall : trace.stalls) {
    if (stall.actor != Actor::device) continue;
    if (waited_for(stall.cause) == Actor::workers) times.waited_us += stall.end_us - stall.begin_us;
    if (waited_for(stall.cause) == Actor::link) times.exposed_us += stall.end_us - stall.begin_us;
  }
  for (double PipelineTimes::*const each :
       {&PipelineTimes::choice_us, &PipelineTimes::waited_us, &PipelineTimes::exposed_us})
    times.*each /= layers;
  return times;
}

PipelineGoal pipeline_goal(const PipelineTimes& times, double link_bytes, double gather_gbps) noexcept {
  constexpr double kSlack = 1.15, kFixedUs = 12.0, kBytesPerUs = 1e3;  // Of 1 GB/s.
  const double bytes_per_us = gather_gbps * kBytesPerUs;
  const double exposed_bytes = std::min(link_bytes, times.exposed_us * bytes_per_us);
  return {.exposed_bytes = exposed_bytes, .us = kSlack * (times.choice_us + exposed_bytes / bytes_per_us) + kFixedUs};
}

}  // namespace sluice::tools
