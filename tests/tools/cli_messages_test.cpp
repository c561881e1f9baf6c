// Errors: one line, of bounded length, without bytes that a terminal would obey.
#include <algorithm>
#include <filesystem>
#include <string>

#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/tools/cli_process.hpp"

using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;

namespace {

namespace fs = std::filesystem;

const std::string kModel = sluice::test::testbed_model();
constexpr std::size_t kMostBytes = 1200;

bool obeyed(char c) { return (static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == '\x7f'; }

void check_tame(const Outcome& outcome) {
  CAPTURE(outcome.err.substr(0, 2000), outcome.err.size());
  CHECK(is_one_error(outcome));
  CHECK(std::none_of(outcome.err.begin(), outcome.err.end(), obeyed));
  CHECK_FALSE(contains(outcome.err, "\xc2\x9b"));  // CSI as one character
  CHECK_FALSE(contains(outcome.err, "\xff"));
  CHECK(outcome.err.size() <= kMostBytes);
}

/// A testbed with a line of its config.json replaced.
std::string model_with(const TemporaryDirectory& scratch, const std::string& line) {
  const fs::path from = fs::path(sluice::test::test_data()) / "testbed";
  std::string config = read_file((from / "config.json").string());
  const std::string old = "\"hidden_act\": \"silu\"";
  config.replace(config.find(old), old.size(), line);
  return sluice::test::testbed_with(scratch, config);
}

}  // namespace

TEST_CASE("an echoed argument has its control characters escaped", "[cli]") {
  const std::string evil = "x\x1b[31m\x07\x7f\r\xc2\x9b" "2J\xff";
  const std::string arguments = GENERATE_COPY(values<std::string>({
      "run " + kModel + "--prompt a --policy '" + evil + "'",
      "run --model '" + evil + "' --prompt a",
      "run " + kModel + "--prompt-file '" + evil + "'",
      "run " + kModel + "--prompt a --output 'no/such/" + evil + "'",
      "run " + kModel + "--prompt a --max-tokens '" + evil + "'",
      "run " + kModel + "--prompt a --transfer-profile '" + evil + "'",
      "run " + kModel + "--prompt a '--" + evil + "'",
      "'" + evil + "'",
      "eval " + kModel + "--tasks '" + evil + "'",
      "policies -o '" + evil + "'",
  }));
  const Outcome outcome = sluice::test::sluice(arguments);
  CAPTURE(arguments);
  CHECK(outcome.code == 2 + (contains(arguments, "--output") ? -1 : 0));
  check_tame(outcome);
  CHECK(contains(outcome.err, "\\x1b[31m\\x07\\x7f\\r\\xc2\\x9b2J\\xff"));
}

TEST_CASE("a message of any length keeps its cause and its remedy", "[cli]") {
  const Outcome outcome =
      sluice::test::sluice("run " + kModel + "--prompt a --policy '" + std::string(60'000, 'y') + "'");
  CHECK(outcome.code == 2);
  check_tame(outcome);
  CHECK(contains(outcome.err, "policy \"yyy"));
  CHECK(contains(outcome.err, "lfps, sluice)"));  // The presets that there are stand at the end.
}

TEST_CASE("values of a model's files are echoed like arguments", "[cli]") {
  const std::string value = GENERATE(std::string("\"ge\\u001b[31mlu\\nnext\""), "\"" + std::string(50'000, 'z') + "\"");
  const TemporaryDirectory scratch;
  const Outcome outcome =
      sluice::test::sluice("run --model '" + model_with(scratch, "\"hidden_act\": " + value) + "' --prompt a");
  CHECK(outcome.code == 3);
  check_tame(outcome);
  CHECK(contains(outcome.err, "hidden_act"));
}
