#include <algorithm>

#include "scheduler/policy/policies.hpp"

namespace sluice::scheduler {

PolicySpec full_spec() {
  PolicySpec spec;
  spec.name = "full";
  spec.sources = static_cast<std::uint16_t>(Source::all);
  spec.near = {.sink_tokens = 4, .recent_tokens = 0, .share = 0.10f};
  return spec;
}

void add_far_runs(const NearSet& near, std::uint32_t first, std::uint32_t tokens, SelectionRow& row) {
  const std::uint32_t begin = std::max(first, near.sink_end);
  const std::uint32_t end = std::min(near.recent_begin, tokens);
  if (begin >= end) return;
  const std::uint32_t last_page = (end - 1) / near.page_tokens;
  for (std::uint32_t page = begin / near.page_tokens; page <= last_page; ++page) {
    const std::uint32_t page_begin = page * near.page_tokens;
    // Sinks cut the first run, the recent window the last one; what remains of a page is one interval.
    const std::uint32_t from = std::max(begin, page_begin) - page_begin;
    const std::uint32_t to = std::min(end, page_begin + near.page_tokens) - page_begin;
    row.runs.push_back(
        {.page = page, .begin = static_cast<std::uint16_t>(from), .end = static_cast<std::uint16_t>(to)});
  }
}

namespace {

class FullPolicy final : public LayerPolicy {
 public:
  void begin(const PromptContext&) override {}
  void select(const HeadContext& head, SelectionRow& row, Bypass& bypass, SelectCounters& counters) override {
    bypass.heads = 0;
    add_far_runs(*head.near, head.tokens, row);
    counters.candidates += row.attended();
  }
  void observe(std::uint32_t, KvReader&) override {}
  [[nodiscard]] std::unique_ptr<LayerPolicy> clone() const override { return std::make_unique<FullPolicy>(*this); }
};

}  // namespace

std::unique_ptr<LayerPolicy> make_full_policy() { return std::make_unique<FullPolicy>(); }

}  // namespace sluice::scheduler
