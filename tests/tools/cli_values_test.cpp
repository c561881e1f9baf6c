#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tools/cli/text/message.hpp"
#include "tools/cli/text/output.hpp"
#include "tools/cli/text/progress_bar.hpp"
#include "tools/cli/text/values.hpp"

using namespace sluice::tools;
using sluice::test::contains;
using sluice::test::failure_of;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;

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
  CHECK(format_size(1'023'590) == "1000K");  // 999.6K to three digits
  CHECK(format_size(1023 * sluice::MiB + sluice::MiB / 3) == "1023M");
}

TEST_CASE("sizes have their units in either case, and are not less than they may be", "[cli]") {
  for (const char* text : {"64M", "64m", "64MB", "64mb", "64MiB", "64mib", "64Mib", "64mIB"}) {
    CAPTURE(text);
    CHECK(parse_size(text, "-") == 64 * sluice::MiB);
  }
  for (const char* text : {"64i", "64mi", "64ib", "64bi", "64mbb", "mib"}) {
    CAPTURE(text);
    CHECK(contains(failure_of([&] { return parse_size(text, "--size"); }).message, "--size: cannot read '"));
  }
  CHECK(parse_size("0", "--size") == 0);
  CHECK(contains(failure_of([&] { return parse_size("0", "--size", 1); }).message, "at least 1"));
}

TEST_CASE("what is no size, share or count is refused by the option's name", "[cli]") {
  for (const char* text : {"", "G", "-1", "1GG", "1 G", "0x10", "nan", "inf", "1e3", "99999999999G", "1..2", "."}) {
    CAPTURE(text);
    CHECK(contains(failure_of([&] { return parse_size(text, "--size"); }).message,
                   std::string("--size: cannot read '") + text + "'"));
  }
  for (const char* text : {"", "%", "101%", "1.01", "-1%", "ten", "1%%"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_share(text, "--near"), sluice::Error);
  }
  for (const char* text : {"", ",", "0", "1.5", "8k,x", "-4", "4096G", "1,,2", ",1", "1,,"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_counts(text, "--lengths"), sluice::Error);
  }
  CHECK(parse_share("10%", "-") == Approx(0.1));
  CHECK(parse_share("0.1", "-") == Approx(0.1));
  CHECK(parse_counts("2048,8K,", "-") == std::vector<std::uint32_t>{2048, 8192});
}

TEST_CASE("numbers are decimal, exact and in range, or none", "[cli]") {
  CHECK(parse_count("010", "-") == 10);
  CHECK(parse_count("32K", "-") == 32768);
  CHECK(parse_count("1.5K", "-") == 1536);
  CHECK(parse_count("4294967295", "-") == 4294967295u);
  CHECK(parse_size("9007199254740993", "-") == 9007199254740993u);  // No double holds it.
  CHECK(parse_size("1.1G", "-") == 1181116006u);
  CHECK(parse_size("8388607T", "-") == 8388607ull << 40);
  CHECK(parse_seed("18446744073709551615", "-") == 18446744073709551615ull);
  CHECK(parse_number("1e-3", "-") == Approx(0.001));
  CHECK(parse_number(".5", "-") == 0.5);
  for (const char* text : {"", "-", "+1", "-1", " 1", "1 ", "0x1", "1e2", "1.", "1..5K", "0.0001K", "4294967296",
                           "4194304K", "18446744073709551617", "1KB", "K", "1\n", "1,2"}) {
    CAPTURE(text);
    CHECK(contains(failure_of([&] { return parse_count(text, "--n"); }).message, "--n: cannot read '"));
  }
  for (const char* text :
       {"", "nan", "inf", "-inf", "0x1p0", "+0.5", "0.5 ", "1e400", "1e-60", "1.5", "-0.5", "0.5K"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_number(text, "--x"), sluice::Error);
  }
  for (const char* text : {"0.3", "8388608T", "18446744073709551616", "0.00000000001K", "1iB", "0x10", "1.5"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(parse_size(text, "--size"), sluice::Error);
  }
  for (const char* text : {"-1", "0x7", "1K", "18446744073709551616"})
    CHECK_THROWS_AS(parse_seed(text, "--seed"), sluice::Error);
}

TEST_CASE("what is shown to people is one line that keeps both of its ends", "[cli]") {
  CHECK(printable("plain \xc3\xa9 text") == "plain \xc3\xa9 text");
  CHECK(printable("a\nb\x1b[2J\x7f") == "a\\nb\\x1b[2J\\x7f");
  CHECK(printable("\xc2\x9b|\xff|\xc3") == "\\xc2\\x9b|\\xff|\\xc3");
  const std::string nul("a\0b", 3);
  CHECK(printable(nul) == "a\\x00b");
  for (const std::size_t length : {100u, 101u, 1000u, 100'000u}) {
    std::string text = "begin";
    while (text.size() < length) text += "\xe2\x82\xac";
    text += "end";
    const std::string shown = printable(text, 100);
    CAPTURE(length, shown);
    CHECK(shown.size() <= 100);
    CHECK(shown.starts_with("begin"));
    CHECK(shown.ends_with("end"));
    CHECK_FALSE(contains(printable(shown), "\\x"));  // No character was cut.
  }
}

TEST_CASE("a log gets a line of progress rarely", "[cli]") {
  using namespace std::chrono_literals;
  const sluice::Clock::time_point begin{};
  LogPace pace(begin);
  CHECK_FALSE(pace.due(begin + 9s, 50, 100));   // Not before ten seconds,
  CHECK(pace.due(begin + 10s, 51, 100));        // then at once if there is something new,
  CHECK_FALSE(pace.due(begin + 19s, 99, 100));  // and not again within ten more,
  CHECK_FALSE(pace.due(begin + 30s, 59, 100));  // nor for less than a tenth,
  CHECK(pace.due(begin + 31s, 60, 100));
  CHECK_FALSE(pace.due(begin + 90s, 61, 100));
  CHECK(pace.due(begin + 91s, 61, 100));  // but once a minute whatever is done.
  LogPace busy(begin);
  std::size_t lines = 0;
  for (int i = 0; i < 3600 * 100; ++i)
    lines += busy.due(begin + i * 10ms, static_cast<std::uint64_t>(i), 3600 * 100) ? 1 : 0;
  CHECK(lines <= 60 + 10);
}

TEST_CASE("a list of policies splits at policies, not inside their options", "[cli]") {
  using Names = std::vector<std::string>;
  CHECK(split_policies("full,topk") == Names{"full", "topk"});
  CHECK(split_policies("full,lfps:alpha=0.3,budget=2%,topk") == Names{"full", "lfps:alpha=0.3,budget=2%", "topk"});
  CHECK(split_policies("lfps:alpha=0.3,topk:budget=64,sinks=4") == Names{"lfps:alpha=0.3", "topk:budget=64,sinks=4"});
  CHECK(split_policies("full;lfps:alpha=0.3,budget=2%;topk") == Names{"full", "lfps:alpha=0.3,budget=2%", "topk"});
  CHECK(split_policies("full,topk,") == Names{"full", "topk"});
  CHECK(split_policies("full;topk;") == Names{"full", "topk"});
  for (const char* text : {",", ";", "full,,topk", "full;;topk", ",full", ";full", "full,,", "full;;"}) {
    CAPTURE(text);
    CHECK(contains(failure_of([&] { return split_policies(text); }).message, "--policies: cannot read '"));
  }
  CHECK(split_policies("topk:budget=max(64, 2%),sinks=4,full") == Names{"topk:budget=max(64, 2%),sinks=4", "full"});
  CHECK(split_policies("history+pages | top_p=0.95,pages:quest,budget=64 | int4 | near=5%,sinks=2,full") ==
        Names{"history+pages | top_p=0.95", "pages:quest,budget=64 | int4 | near=5%,sinks=2", "full"});
  // An option with no policy before it stays an item, so that reading it as a policy names it.
  CHECK(split_policies("alpha=0.3,full") == Names{"alpha=0.3", "full"});
  CHECK(split_policies("full;alpha=0.3") == Names{"full", "alpha=0.3"});
}

TEST_CASE("an output file appears whole or not at all", "[cli]") {
  const TemporaryDirectory scratch;
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
