// The comparison of record in parts, and what is made of those that there are.
#include <cstdlib>
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

const std::string kData = sluice::test::test_data();

/// tools/lab/record.sh with everything as small as it may be.
Outcome record(const std::string& arguments, const std::string& command = sluice::test::cli_path()) {
  return sluice::test::shell(
      "SLUICE='" + command +
      "' RECORD_CORE_LENGTHS=512 RECORD_FLEX_LENGTH=512 RECORD_CPU_BATCH=512 "
      "RECORD_CPU_RAGGED=2K RECORD_ABLATION_LENGTHS=512 RECORD_THREADS='1 2' RECORD_SERVE='--random-weights tiny "
      "--kv-size 2M --host-size 4M "
      "--prompt 64 --answer 4 --rates 20,40 --seconds 0.2 --tbt-limit 1000' sh '" +
      kData + "/../../tools/lab/record.sh' " + arguments);
}

}  // namespace

TEST_CASE("the record is measured in parts and merged from those that there are", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string directory = "'" + scratch.file("") + "' host ";
  const Outcome list = record("--list host");
  REQUIRE(list.code == 0);
  CHECK(contains(list.out, "1 prefill-layer-vertical_slash\n2 prefill-layer-query_aware\n"));
  CHECK(contains(list.out, " cpu-batches\n"));
  for (const char* part : {"core-together", "cpu-batches"}) {
    const Outcome outcome = record(directory + "--part " + part);
    CAPTURE(part, outcome.err);
    REQUIRE(outcome.code == 0);
  }
  CHECK(scratch.entries() == 4);  // With what each took.
  CHECK(!json::parse(read_file(scratch.file("core-together.json"))).at("results").at("attention").empty());
  if (std::system("python3 -c '' 2>/dev/null") != 0) {
    WARN("skipped: python3 makes the tables, and there is none");
    return;
  }
  const Outcome merged = record(directory + "--merge");
  CAPTURE(merged.err);
  REQUIRE(merged.code == 0);
  const std::string tables = read_file(scratch.file("tables.md"));
  CHECK(tables == merged.out);
  CHECK(tables.starts_with("Missing: `prefill-layer-vertical_slash`"));
  CHECK_FALSE(contains(tables, "`core-together`"));
  CHECK(contains(tables, "One core, four query heads share keys"));
  CHECK(contains(tables, "| 512 | `topk` |"));
  CHECK(contains(tables, "Seconds of the parts\n\n| part | s |\n|---|--:|\n| core-together | "));
}

// The command of a machine with a GPU, as far as the parts tell: what it is asked for is done on the CPU, and small.
const char* const kSmaller = R"(#!/bin/sh
[ "$1" != doctor ] || { echo 'MACHINE' >"$3"; exit; }
[ "$1" != link ] || { shift $(($# - 1)); echo '{"host": {"gpu": "none", "cpu": "one"}, "version": "0", "results": {}}' >"$1"; exit; }
[ "$1 $2" != "bench decode" ] || set -- "$@" --random-weights tiny
count=$# before=
while [ $count -gt 0 ]; do
  word=$1
  case $before in
    --device) word=host ;;
    --length) word=512 ;;
    --layers | --steps | --warm-up) word=1 ;;
    --ragged) word=128 ;;
    --rows) word=2 ;;
    --sections) word=${word%,kernels} ;;
  esac
  before=$1
  shift
  set -- "$@" "$word"
  count=$((count - 1))
done
exec COMMAND "$@"
)";

TEST_CASE("what the record times, and what it asks of models, are options that the command has", "[cli]") {
  const TemporaryDirectory scratch, made;
  std::string wrapper = kSmaller;
  wrapper.replace(wrapper.find("COMMAND"), 7, "'" + sluice::test::cli_path() + "'");
  wrapper.replace(wrapper.find("MACHINE"), 7, sluice::test::plans::machine().dump());
  const std::string command = scratch.write("sluice", wrapper);
  REQUIRE(std::system(("chmod +x '" + command + "'").c_str()) == 0);
  const std::string directory = "'" + made.file("") + "' cuda ";
  // Of each command that parts run one, with most of its options.
  for (const char* const part :
       {"flex-tau-0.1", "flex-most-8192", "cpu-ragged", "cpu-threads-2", "cpu-engine", "serve",
        "ablation", "decode-default", "decode-costs-8K", "decode-batch-ragged", "decode-model", "presets", "link"}) {
    const Outcome outcome = record(directory + "--part " + part, command);
    CAPTURE(part, outcome.err);
    REQUIRE(outcome.code == 0);
    CHECK(json::parse(read_file(made.file(std::string(part) + ".json"))).contains("results"));
  }
  if (std::system("python3 -c '' 2>/dev/null") != 0) return;
  const Outcome merged = record(directory + "--merge", command);
  CAPTURE(merged.err);
  REQUIRE(merged.code == 0);
  for (const char* const title :
       {"Decoding: one layer, us", "Decoding: whole models", "Requests as they come", "The highest of these rates",
        "FlexPrefill by gamma", "Batches on the CPU", "What a layer takes beyond", "| decode-default-long | ",
        "One layer on several cores", "| cpu-engine-128K-all | ",
        "| presets | 512 | `vattention` | ", "| ablation-sinks | 512 | `lfps \\| bypass=off` | off |"})
    CHECK(contains(merged.out, title));
}

TEST_CASE("benchmarks of models are parts where there is a Python for them", "[cli]") {
  if (std::system("python3 -c '' 2>/dev/null") != 0) {
    WARN("skipped: python3 makes reports of what they print, and there is none");
    return;
  }
  const TemporaryDirectory scratch, made;
  const std::string python = scratch.write("python",
                                           "#!/bin/sh\ncase $1 in -c) exit ;; esac\n[ -f \"$1\" ] || exit 1\n"
                                           "echo said; shift; echo \"{\\\"asked\\\": \\\"$*\\\"}\"\n");
  REQUIRE(std::system(("chmod +x '" + python + "'").c_str()) == 0);
  const auto with_python = [&](const std::string& arguments) {
    return sluice::test::shell("RECORD_PYTHON='" + python + "' SLUICE='" + sluice::test::cli_path() + "' sh '" + kData +
                               "/../../tools/lab/record.sh' " + arguments);
  };
  CHECK(contains(with_python("--list cuda").out, " model-loop\n"));
  CHECK_FALSE(contains(with_python("--list host").out, " model-"));
  const std::string directory = "'" + made.file("") + "' cuda ";
  const Outcome outcome = with_python(directory + "--part model-generate-128K");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json report = json::parse(read_file(made.file("model-generate-128K.json")));
  CHECK(contains(report.at("results").at("models").at(0).at("asked").get<std::string>(), "--tokens 128K"));
  CHECK(made.entries() == 2);  // With what it took.
  CHECK(contains(with_python(directory + "--merge").out, "Models of transformers: generate"));
}

TEST_CASE("other libraries are measured where there is a torch that sees a GPU, and skipped with a word where not",
          "[cli]") {
  const TemporaryDirectory scratch, made;
  const std::string beside = R"({"host": {"gpu": "one", "cpu": "one"}, "version": "0", "results": {"beside": [)"
                             R"({"shape": "1x4K", "kernel": "sluice dense", "us": 10.0}, )"
                             R"({"shape": "1x4K", "kernel": "FlashAttention-3", "us": 12.5}, )"
                             R"({"kernel": "FlashInfer XQA", "error": "missing: no flashinfer"}]}})";
  const auto with_torch = [&](bool there, const std::string& arguments) {
    const std::string python =
        scratch.write("python", "#!/bin/sh\n[ \"$1\" != -c ] || exit " + std::string(there ? "0" : "1") +
                                    "\nfor file; do :; done\n[ -f \"$1\" ] && echo '" + beside + "' >\"$file\"\n");
    REQUIRE(std::system(("chmod +x '" + python + "'").c_str()) == 0);
    return sluice::test::shell("RECORD_PYTHON='" + python + "' SLUICE='" + sluice::test::cli_path() + "' sh '" + kData +
                               "/../../tools/lab/record.sh' '" + made.file("") + "' cuda " + arguments);
  };
  const Outcome skipped = with_torch(false, "--part compare-prefill");
  CHECK(skipped.code == 0);
  CHECK(contains(skipped.err,
                 "compare-prefill is skipped: '" + scratch.file("python") + "' has no torch that sees a GPU"));
  CHECK(made.entries() == 0);
  if (std::system("python3 -c '' 2>/dev/null") != 0) return;
  const Outcome outcome = with_torch(true, "--part compare-prefill");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  CHECK(made.entries() == 2);
  const std::string tables = with_torch(true, "--merge").out;
  CHECK(contains(tables, "Beside other libraries: prefill"));
  CHECK(contains(tables, "| 1x4K | 10.0 (1.00) | 12.5 (1.25) |"));
  CHECK(contains(tables, "- FlashInfer XQA: missing: no flashinfer"));
}

TEST_CASE("what parts took stands below the tables, and those that took too long are named", "[cli]") {
  if (std::system("python3 -c '' 2>/dev/null") != 0) {
    WARN("skipped: python3 makes the tables, and there is none");
    return;
  }
  const TemporaryDirectory scratch, made;
  const auto command = [&](const std::string& body) {
    const std::string path = scratch.write("sluice", "#!/bin/sh\n" + body);
    REQUIRE(std::system(("chmod +x '" + path + "'").c_str()) == 0);
    return path;
  };
  const std::string directory = "'" + made.file("") + "' host ";
  const std::string report = R"({"host": {"cpu": "one"}, "version": "0", "results": {}})";
  const std::string slow = command("sleep 1.1\nfor file; do :; done\necho '" + report + "' >\"$file\"\n");
  const Outcome outcome = record(directory + "--part core-alpha", slow);
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const int took = std::stoi(read_file(made.file("core-alpha.seconds")));
  CHECK(took >= 1);
  const std::string row = "| core-alpha | " + std::to_string(took) + " |\n";
  const std::string alone = record(directory + "--merge").out;
  CHECK(contains(alone, row + "| all of these | " + std::to_string(took) + " |\n"));
  CHECK_FALSE(contains(alone, "Above"));
  made.write("cpu-batches.seconds", "420\n");
  made.write("cpu-ragged.seconds", "421\n");
  const std::string merged = record(directory + "--merge").out;
  CHECK(contains(merged,
                 row + "| cpu-batches | 420 |\n| cpu-ragged | 421 |\n| all of these | " + std::to_string(took + 841)));
  CHECK(contains(merged, "Above 420 s, the most that a part may take with a GPU: `cpu-ragged` (421 s).\n"));
  // What one took that fails is not what the one before it took.
  CHECK(record(directory + "--part core-alpha", command("exit 1\n")).code != 0);
  CHECK_FALSE(contains(record(directory + "--merge").out, "| core-alpha |"));
}

TEST_CASE("the record's scripts have nothing that shellcheck warns of", "[cli]") {
  if (std::system("command -v shellcheck >/dev/null") != 0) {
    WARN("skipped: there is no shellcheck");
    return;
  }
  const Outcome outcome = sluice::test::shell("cd '" + kData + "/../../tools/lab' && shellcheck -x record.sh record/*.sh");
  INFO(outcome.out);
  CHECK(outcome.code == 0);
}

TEST_CASE("a part that there is not is refused", "[cli]") {
  const Outcome outcome = record("/nonexistent host --part 99");
  CHECK(outcome.code != 0);
}

TEST_CASE("plot draws several reports as one, and refuses what is none", "[cli]") {
  const TemporaryDirectory scratch;
  const auto report = [&](const std::string& name, const std::string& policy, const json& config) {
    const json row = {{"task", "a"}, {"policy", policy}, {"accuracy", 0.5}, {"bytes", 0.1}};
    json whole = row, unknown = row;
    whole["task"] = "all";  // Of tasks that are drawn one by one.
    whole["policy"] = "of all";
    unknown["bytes"] = nullptr;
    unknown["policy"] = "unknown";
    const json document = {{"config", config}, {"tasks", {{"results", {row, whole, unknown}}}}};
    return "'" + scratch.write(name, document.dump()) + "' ";
  };
  const json none = json::object();
  const std::string a = report("a", "first", none);
  const Outcome two = sluice::test::sluice("plot " + a + report("b", "second", {{"option", none}}));
  REQUIRE(two.code == 0);
  for (const char* const name : {">first</text>", ">second</text>"}) CHECK(contains(two.out, name));
  for (const char* const name : {"of all", "unknown"}) CHECK_FALSE(contains(two.out, name));
  const Outcome ways = sluice::test::sluice("plot " + a + report("c", "first", {{"prefill", {{"name", "auto@0.9"}}}}) +
                                            report("d", "first", {{"option", {{"prefill_mode", "flex"}}}}));
  for (const char* const name : {">first, full</text>", ">first, auto@0.9</text>", ">first, flex</text>"})
    CHECK(contains(ways.out, name));
  for (const char* text : {"", "{}", "[1]", R"({"tasks": {"results": {}}})", R"({"tasks": {"results": [{"policy": "x"}]}})",
                           R"({"tasks": {"results": [{"policy": 1, "accuracy": 1}]}})"}) {
    const Outcome outcome = sluice::test::sluice("plot " + a + "'" + scratch.write("bad", text) + "'");
    CAPTURE(text, outcome.err);
    CHECK(outcome.code == 2);
    CHECK(is_one_error(outcome));
  }
}
