#include "tools/cli/trace_file.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"

using namespace sluice::tools;

TEST_CASE("a trace keeps every event of every thread, one track per lane", "[cli]") {
  TraceFile trace;
  constexpr std::uint32_t kEach = 1000;
  std::vector<std::jthread> threads;
  for (const sluice::Lane lane : {sluice::Lane::cpu, sluice::Lane::link, sluice::Lane::device}) {
    threads.emplace_back([&trace, lane] {
      for (std::uint32_t i = 0; i < kEach; ++i) {
        trace.record({.name = "attend", .lane = lane, .layer = i, .begin_ns = 5000 + i, .end_ns = 7000 + i});
      }
    });
  }
  threads.clear();
  const auto events = nlohmann::json::parse(trace.json()).at("traceEvents");
  std::array<std::uint32_t, 3> seen{};
  double first = 1e9;
  for (const auto& event : events) {
    if (event.at("ph") != "X") continue;
    ++seen[event.at("tid").get<std::size_t>()];
    first = std::min(first, event.at("ts").get<double>());
    CHECK(event.at("dur") == 2.0);  // Microseconds.
  }
  CHECK(seen == std::array<std::uint32_t, 3>{kEach, kEach, kEach});
  CHECK(first == 0.0);
  CHECK(trace.dropped() == 0);
}
