// Where results go: one CSV table per file, no file twice, no write unchecked.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/tools/cli_plan.hpp"
#include "tests/tools/cli_process.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;

namespace {

namespace fs = std::filesystem;

const std::string kRun = "run " + sluice::test::testbed_model() + "--threads 2 --max-tokens 2 --prompt 'The sky' ";

/// A command with two tables: times, and memory.
std::string plan() {
  static const TemporaryDirectory scratch;
  return "plan --policies full --length 8K --layers 2 --machine '" +
         scratch.write("machine.json", sluice::test::plans::machine().dump()) + "' ";
}

/// Rows of one table: the header's fields in every line. Quoted fields hold no comma here.
void check_one_table(const std::string& csv, std::size_t rows) {
  CAPTURE(csv);
  std::istringstream lines(csv);
  std::string line;
  std::size_t seen = 0;
  std::ptrdiff_t commas = -1;
  while (std::getline(lines, line)) {
    const auto here = std::count(line.begin(), line.end(), ',');
    if (commas < 0) commas = here;
    CHECK(here == commas);
    CHECK_FALSE(line.empty());
    ++seen;
  }
  CHECK(seen == rows + 1);
}

/// The exit code of a shell command line; `%` stands for the program.
int shell(std::string command) {
  command.replace(command.find('%'), 1, "'" + sluice::test::cli_path() + "'");
  return sluice::test::shell(command).code;
}

}  // namespace

TEST_CASE("a CSV file holds one table, and every further table has a file beside it", "[cli]") {
  const TemporaryDirectory scratch;
  const Outcome outcome =
      sluice::test::sluice(plan() + "-o csv --output '" + scratch.file("result.v1.csv") + "'");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(scratch.entries() == 2);
  check_one_table(read_file(scratch.file("result.v1.csv")), 1);
  const std::string memory = read_file(scratch.file("result.v1-memory.csv"));
  CHECK(memory.starts_with("policy,placement,length_tokens,rows,kv_bytes,"));
  check_one_table(memory, 1);
}

TEST_CASE("a table that this run left empty does not leave an older run's file in its place", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string old = scratch.write("result-room.csv", "of another run");
  // In so little memory there is room for no method.
  const Outcome outcome = sluice::test::sluice(
      "bench decode --device host --random-weights tiny --length 64 --steps 1 --warm-up 0 --methods hybrid/sluice "
      "--kv-size 1K -o csv --output '" +
      scratch.file("result.csv") + "'");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(read_file(old).starts_with("length_tokens,batch,kv_bytes,method,"));
  check_one_table(read_file(old), 0);
}

TEST_CASE("standard output takes one CSV table and says how to have the others", "[cli]") {
  const Outcome outcome = sluice::test::sluice(plan() + "-o csv");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  check_one_table(outcome.out, 1);
  CHECK(contains(outcome.err, "left out: memory"));
  CHECK(contains(outcome.err, "--output"));
}

TEST_CASE("CSV quotes what would break a row and leaves out what is no number", "[cli]") {
  const Outcome outcome = sluice::test::sluice("policies -o csv");
  REQUIRE(outcome.code == 0);
  CHECK(contains(outcome.out, "\"history | top_k=max(64, 2%)"));
}

TEST_CASE("a table that cannot be written does not take the picture along", "[cli]") {
  const TemporaryDirectory scratch;
  const Outcome outcome =
      sluice::test::sluice(plan() + "--output /dev/full --plot '" + scratch.file("plot.svg") + "'");
  CAPTURE(outcome.err);
  CHECK(outcome.code == 1);
  CHECK(contains(outcome.err, "/dev/full"));
  CHECK(contains(read_file(scratch.file("plot.svg")), "</svg>"));
}

TEST_CASE("two results may not go to one file, however it is spelt", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string file = scratch.file("out.json");
  fs::create_directory(scratch.file("sub"));
  fs::create_symlink(file, scratch.file("link.json"));
  const std::string spelling = GENERATE("out.json", "./out.json", "sub/../out.json", "link.json");
  const bool exists = GENERATE(false, true);
  if (exists) (void)scratch.write("out.json", "old");
  const std::string other = scratch.file(spelling);
  for (const std::string& arguments : {plan() + "--output '" + file + "' --plot '" + other + "'",
                                       "link --output '" + file + "' --save-profile '" + other + "'"}) {
    const Outcome outcome = sluice::test::sluice(arguments);
    CAPTURE(arguments, outcome.err);
    CHECK(outcome.code == 2);
    CHECK(is_one_error(outcome));
    CHECK(contains(outcome.err, "--output"));
    if (exists) CHECK(read_file(file) == "old");
  }
}

TEST_CASE("a result sent to /dev/stdout follows what stands there and replaces nothing", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string out = scratch.write("out", "");
  CHECK(shell("% policies -o json --output /dev/stdout >>'" + out + "'") == 0);
  CHECK(shell("% policies -o json --output /dev/stdout >>'" + out + "'") == 0);
  const std::string twice = read_file(out);
  const std::size_t second = twice.find("\n}\n{\n");
  REQUIRE(second != std::string::npos);
  CHECK(json::parse(twice.substr(0, second + 2)).at("results") == json::parse(twice.substr(second + 2)).at("results"));
  CHECK(fs::is_symlink("/dev/stdout"));
  CHECK(shell("(echo before; % policies -o json --output /dev/stdout) >'" + out + "'") == 0);
  CHECK(read_file(out).starts_with("before\n{"));
}

TEST_CASE("a result reaches the file behind a symbolic link", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string file = scratch.write("real.json", "old");
  fs::create_symlink("real.json", scratch.file("latest.json"));
  REQUIRE(sluice::test::sluice("policies -o json --output '" + scratch.file("latest.json") + "'").code == 0);
  CHECK(fs::is_symlink(scratch.file("latest.json")));
  CHECK(json::parse(read_file(file)).at("command") == "policies");
}

TEST_CASE("no write fails in silence", "[cli]") {
  if (!fs::exists("/dev/full")) return;
  const TemporaryDirectory scratch;
  const std::string arguments = GENERATE_COPY(std::string("--help"), std::string("run --help"), std::string("bench cpu --help"),
                                              std::string("--version"), std::string("policies"), kRun, kRun + "-o json");
  CAPTURE(arguments);
  CHECK(shell("% " + arguments + " >/dev/full 2>'" + scratch.file("err") + "'") == 1);
  CHECK(contains(read_file(scratch.file("err")), "standard output"));
}

TEST_CASE("a table that standard error does not take is a failure", "[cli]") {
  if (!fs::exists("/dev/full")) return;
  CHECK(shell("% " + kRun + ">/dev/null 2>/dev/full") == 1);
  CHECK(shell("% policies --output /dev/full 2>/dev/null") == 1);
}

TEST_CASE("a result that its file does not take goes to standard output, and nothing is left half-written", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string err = scratch.file("err"), file = scratch.file("result.json"), out = scratch.file("out");
  // The file may have 512 bytes, or 1024, as the shell counts; standard output is a pipe, which has no such limit.
  CHECK(shell("{ (ulimit -f 1; % policies -o json --output '" + file + "' 2>'" + err +
              "'; echo \"code $?\"); } | cat >'" + out + "'") == 0);
  const std::string said = read_file(err), printed = read_file(out);
  CAPTURE(said);
  CHECK(contains(said, "ulimit -f"));
  CHECK(contains(said, "standard output instead"));
  REQUIRE(printed.ends_with("code 1\n"));
  CHECK(json::parse(printed.substr(0, printed.rfind("code 1"))).at("command") == "policies");
  CHECK(scratch.entries() == 2);
}

TEST_CASE("tables that their files do not take go to standard output, each of them", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string out = scratch.file("out");
  // Nothing that is not empty can be written, but to a pipe.
  CHECK(shell("{ (ulimit -f 0; % " + plan() + "-o csv --output '" + scratch.file("result.csv") +
              "' 2>/dev/null; echo \"code $?\"); } | cat >'" + out + "'") == 0);
  const std::string printed = read_file(out);
  CAPTURE(printed);
  REQUIRE(printed.ends_with("code 1\n"));
  const std::size_t between = printed.find("\n\n");
  REQUIRE(between != std::string::npos);
  check_one_table(printed.substr(0, between + 1), 1);
  CHECK(printed.substr(between + 2).starts_with("policy,placement,length_tokens,rows,kv_bytes,"));
  CHECK(scratch.entries() == 1);
}
