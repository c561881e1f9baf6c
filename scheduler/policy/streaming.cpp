// StreamingLLM (arXiv 2309.17453), as a mask over original positions: RoPE is not re-based to positions
// inside the cache. Sinks count towards the budget of 1,024 tokens.

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec streaming_spec() {
  PolicySpec spec;
  spec.name = "streaming";
  spec.near = {.sink_tokens = 4, .recent_tokens = 1020, .share = 0.f};
  return spec;
}

namespace {

class StreamingPolicy final : public LayerPolicy {
 public:
  void begin(const PromptContext&) override {}
  void select(const HeadContext&, SelectionRow&, Bypass& bypass, SelectCounters&) override { bypass.heads = 0; }
  void observe(std::uint32_t, KvReader&) override {}
  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override { return std::make_unique<StreamingPolicy>(*this); }
};

}  // namespace

std::unique_ptr<LayerPolicy> make_streaming_policy() { return std::make_unique<StreamingPolicy>(); }

}  // namespace sluice::scheduler
