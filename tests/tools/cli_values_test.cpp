#include <array>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"
#include "tools/cli/output.hpp"
#include "tools/cli/trace_file.hpp"
#include "tools/cli/values.hpp"

using namespace sluice::tools;
using sluice::test::contains;
using sluice::test::read_file;
using sluice::test::ScratchDirectory;

namespace {

template <class Call>
std::string message_of(const Call& call) {
  try {
    (void)call();
  } catch (const sluice::Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("sizes are binary and read back as written", "[cli]") {
  CHECK(parse_size("0", "-") == 0);
  CHECK(parse_size("17", "-") == 17);
  CHECK(parse_size("1K", "-") == 1024);
  CHECK(parse_size("1.5g", "-") == 3 * 512 * sluice::MiB);
  CHECK(parse_size("4GiB", "-") == 4 * sluice::GiB);
  CHECK(parse_size("2T", "-") == 2048 * sluice::GiB);
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{999}, sluice::KiB, 10 * sluice::MiB, 7 * sluice::GiB}) {
    CAPTURE(bytes);
    CHECK(parse_size(format_size(bytes), "-") == bytes);
  }
}

TEST_CASE("what is no size, share or count is refused by the option's name", "[cli]") {
  for (const char* text : {"", "G", "-1", "1GG", "1 G", "0x10", "nan", "inf", "1e3", "99999999999G", "1..2", "."}) {
    CAPTURE(text);
    CHECK(contains(message_of([&] { return parse_size(text, "--size"); }),
                   std::string("--size: cannot read '") + text + "'"));
  }
  for (const char* text : {"", "%", "101%", "1.01", "-1%", "ten", "1%%"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_share(text, "--near"), sluice::Error);
  }
  for (const char* text : {"", ",", "0", "1.5", "8k,x", "-4", "4096G"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_counts(text, "--lengths"), sluice::Error);
  }
  CHECK(parse_share("10%", "-") == Approx(0.1));
  CHECK(parse_share("0.1", "-") == Approx(0.1));
  CHECK(parse_counts("2048,8K,", "-") == std::vector<std::uint32_t>{2048, 8192});
}

TEST_CASE("a list of policies splits at policies, not inside their options", "[cli]") {
  using Names = std::vector<std::string>;
  CHECK(split_policies("full,topk") == Names{"full", "topk"});
  CHECK(split_policies("full,lfps:alpha=0.3,budget=2%,topk") == Names{"full", "lfps:alpha=0.3,budget=2%", "topk"});
  CHECK(split_policies("lfps:alpha=0.3,topk:budget=64,sinks=4") == Names{"lfps:alpha=0.3", "topk:budget=64,sinks=4"});
  CHECK(split_policies("full;lfps:alpha=0.3,budget=2%;topk") == Names{"full", "lfps:alpha=0.3,budget=2%", "topk"});
  CHECK(split_policies(",,;") == Names{});
  CHECK(split_policies("topk:budget=max(64, 2%),sinks=4,full") == Names{"topk:budget=max(64, 2%),sinks=4", "full"});
  CHECK(split_policies("history+pages | top_p=0.95,pages:quest,budget=64 | int4 | near=5%,sinks=2,full") ==
        Names{"history+pages | top_p=0.95", "pages:quest,budget=64 | int4 | near=5%,sinks=2", "full"});
  // An option with no policy before it stays an item, so that reading it as a policy names it.
  CHECK(split_policies("alpha=0.3,full") == Names{"alpha=0.3", "full"});
  CHECK(split_policies("full;alpha=0.3") == Names{"full", "alpha=0.3"});
}

TEST_CASE("an output file appears whole or not at all", "[cli]") {
  const ScratchDirectory scratch;
  const OutputTarget target(scratch.file("result"));
  CHECK(scratch.entries() == 0);
  target.commit("one");
  CHECK(read_file(scratch.file("result")) == "one");
  target.commit("two");
  CHECK(read_file(scratch.file("result")) == "two");
  CHECK(scratch.entries() == 1);
  OutputTarget("/dev/null").commit("gone");  // Written to, not replaced by a file.
  CHECK(std::filesystem::is_character_file("/dev/null"));
  CHECK_THROWS_AS(OutputTarget(scratch.file("nosuch/result")), sluice::Error);
}

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
