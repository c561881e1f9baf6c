// What `sluice bench serve` decides and attends, whatever the times are.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cpu/device/host_device.hpp"
#include "cpu/float16.hpp"
#include "tests/support/catch.hpp"
#include "tools/cli/bench/serve_limits.hpp"
#include "tools/cli/bench/serve_load.hpp"
#include "tools/cli/bench/serve_rows.hpp"

using namespace sluice;
using namespace sluice::tools;

TEST_CASE("the highest rate that holds is found by as few runs as that takes", "[serve]") {
  for (std::size_t count = 1; count <= 9; ++count) {
    std::vector<double> rates(count);
    for (std::size_t i = 0; i < count; ++i) rates[i] = 0.5 * static_cast<double>(i + 1);
    for (std::size_t good = 0; good <= count; ++good) {
      CAPTURE(count, good);
      std::vector<double> asked;
      const auto found = largest_that_holds(rates, [&](double rate) {
        asked.push_back(rate);
        return rate <= 0.5 * static_cast<double>(good);
      });
      CHECK(found.value_or(0.0) == 0.5 * static_cast<double>(good));
      CHECK(asked.size() <= static_cast<std::size_t>(std::ceil(std::log2(static_cast<double>(count + 1)))));
      std::ranges::sort(asked);
      CHECK(std::ranges::adjacent_find(asked) == asked.end());
    }
  }
}

TEST_CASE("a run holds its limits by the percentiles that are shown", "[serve]") {
  const ServeLimits limits{.between_ms = 100.0, .queued_s = 2.0};
  ServeResult result;
  result.requests = 5;
  result.between_ms.assign(1000, 50.0);
  result.queued_s = {0.0, 1.0, 2.0, 9.0, 9.0};
  CHECK(holds(limits, result));
  for (int i = 0; i < 10; ++i) result.between_ms[i * 7] = 400.0;  // A hundredth: the percentile lies below.
  CHECK(holds(limits, result));
  result.between_ms[999] = 400.0;
  CHECK_FALSE(holds(limits, result));
  CHECK(holds({.queued_s = 2.0}, result));
  result.between_ms.assign(1000, 50.0);
  result.queued_s[2] = 2.1;
  CHECK_FALSE(holds(limits, result));
  CHECK(holds({.between_ms = 100.0}, result));
  result.queued_s = {0.0, 0.0, 0.0};
  result.refused = 2;
  CHECK(holds(limits, result));
  result.queued_s.pop_back();  // Two admitted, three refused.
  result.refused = 3;
  CHECK_FALSE(holds(limits, result));
  result.refused = 0;
  result.waiting = 1;
  CHECK_FALSE(holds(limits, result));
  result.waiting = 0;
  CHECK(holds(limits, result));
  result.given_up = true;
  CHECK_FALSE(holds(limits, result));
}

TEST_CASE("a run is given up only if it cannot hold its limits any more", "[serve]") {
  std::mt19937 rng(3);
  const ServeLimits limits{.between_ms = 100.0, .queued_s = 2.0};
  int given_up = 0;
  for (int turn = 0; turn < 2000; ++turn) {
    const std::uint64_t requests = 1 + rng() % 12;
    const std::uint64_t tokens = 1 + rng() % 600;
    const std::uint64_t waited = rng() % (requests + 1);
    const std::uint64_t late = rng() % std::min<std::uint64_t>(tokens + 1, 14);
    // The best that may still come of it: all that is yet to come is in time.
    ServeResult best;
    best.requests = requests;
    best.between_ms.assign(tokens, 1.0);
    std::fill_n(best.between_ms.begin(), late, 1e3);
    best.queued_s.assign(requests, 0.0);
    std::fill_n(best.queued_s.begin(), waited, 1e3);
    CAPTURE(requests, tokens, waited, late);
    if (!lost(limits, requests, waited, tokens, late)) continue;
    ++given_up;
    CHECK_FALSE(holds(limits, best));
  }
  CHECK(given_up > 500);
  CHECK_FALSE(lost({}, 2, 2, 100, 100));
}

TEST_CASE("all methods get the same requests at a rate, and more of them at a higher one", "[serve]") {
  LoadOptions options;
  options.requests = 4000;
  options.seed = 5;
  const std::vector<LoadRequest> load = make_load(options);
  CHECK(std::ranges::equal(load, make_load(options), [](const LoadRequest& a, const LoadRequest& b) {
    return a.arrival == b.arrival && a.prompt == b.prompt && a.answer == b.answer;
  }));
  for (const double rate : {0.25, 1.0, 40.0, 200.0}) {
    const auto coming = coming_within(load, rate, 10.0);
    CAPTURE(rate, coming.size());
    CHECK(coming.data() == load.data());
    CHECK(coming.back().arrival / rate < 10.0);
    CHECK(load[coming.size()].arrival / rate >= 10.0);
    const double mean = 10.0 * rate;
    CHECK(std::abs(static_cast<double>(coming.size()) - mean) <= 4.0 * std::sqrt(mean) + 1.0);
  }
  CHECK(coming_within(load, 1e-6, 1.0).size() == 1);
  CHECK(coming_within(load, 0.0, 10.0).size() == load.size());
  CHECK(coming_within(load, 40.0, 0.0).size() == load.size());
}

TEST_CASE("rows of a forward are those of their sequences' positions", "[serve]") {
  const AttentionShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
  cpu::HostDevice device(std::make_shared<const cpu::Workers>(cpu::Topology(), cpu::WorkersOptions{.threads = 2}));
  const auto stream = device.create_stream("test");
  ServeRows rows(device, shape, PromptStructure::vertical_slash, 9, 200, 90);
  const std::vector<RowSpan> spans{{.first = 199, .count = 1}, {.first = 0, .count = 1}, {.first = 60, .count = 80}};
  rows.put(std::vector<RowSpan>{{.first = 3, .count = 90}}, 90, *stream);  // Which the next forward replaces.
  rows.put(spans, 85, *stream);
  stream->synchronize(deadline_after(std::chrono::seconds(10)));
  const auto [q, k, v] = rows.views();
  CHECK(q.tokens == 85);  // Three of them are padding.
  CHECK(rows.out().tokens == 85);
  const PromptPattern pattern(PromptStructure::vertical_slash, shape, 9);
  std::vector<float> rotation(pattern.rotation_size()), want(shape.head_dim);
  const auto same = [&](const std::byte* got) {
    const auto* halves = reinterpret_cast<const std::uint16_t*>(got);
    return std::ranges::equal(want, std::span(halves, want.size()),
                              [](float a, std::uint16_t b) { return cpu::float_to_bf16(a) == b; });
  };
  std::uint32_t row = 0;
  for (const RowSpan& span : spans) {
    for (std::uint32_t at = span.first; at < span.first + span.count; ++at, ++row) {
      CAPTURE(at, row);
      pattern.rotation(at, rotation.data());
      for (std::uint32_t head = 0; head < shape.q_heads; ++head) {
        pattern.query(head, at, rotation.data(), want.data());
        CHECK(same(q.row(row, head)));
      }
      for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
        pattern.key(head, at, rotation.data(), want.data());
        CHECK(same(k.row(row, head)));
        pattern.value(head, at, want.data());
        CHECK(same(v.row(row, head)));
      }
    }
  }
}
