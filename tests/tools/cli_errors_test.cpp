// Wrong words, and files that are missing, damaged or not to be written.
#include <filesystem>
#include <fstream>
#include <utility>

#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/tools/cli_process.hpp"

using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;

namespace {

const std::string kModel = sluice::test::testbed_model();

/// With a file of tasks.
const std::string kAsked = "eval " + kModel + "--tasks '" + sluice::test::test_data() + "/testbed/tasks.jsonl' ";

Outcome run_model(const std::string& arguments) {
  return sluice::test::sluice("run " + kModel + "--max-tokens 2 " + arguments);
}

}  // namespace

TEST_CASE("wrong usage is exit code 2 and one line that names the cause", "[cli]") {
  struct Case {
    std::string arguments;
    std::string named;
  };
  const auto wrong = GENERATE(values<Case>({
      {"", "a command is missing; there are run"},
      {"nonsense", "no command 'nonsense'; there are run"},
      {"run --prompt hello", "--model"},
      {"run " + kModel, "--prompt"},
      {"run " + kModel + "--prompt a --prompt-file b", "prompt"},
      {"run " + kModel + "--prompt a --unknown-option", "--unknown-option"},
      {"run " + kModel + "--prompt a --policy nosuch", "nosuch"},
      {"run " + kModel + "--prompt a --policy lfps:alpha=x", "alpha=x"},
      {"run " + kModel + "--prompt a --policy lfps:nokey=1", "nokey"},
      {"run " + kModel + "--prompt a --policy topk:budget=0", "budget"},
      {"run " + kModel + "--prompt a --near 110%", "--near"},
      {"run " + kModel + "--prompt a --host-size 4X", "--host-size"},
      {"run " + kModel + "--prompt a --host-size -4G", "--host-size"},
      {"run " + kModel + "--prompt a --near-size lots", "--near-size"},
      {"run " + kModel + "--prompt a --kv-dtype int4", "int4"},
      {"run " + kModel + "--prompt a --placement far", "far"},
      {"run " + kModel + "--prompt a --page-tokens 24", "page_tokens"},
      {"run " + kModel + "--prompt a --top-p 0", "top_p"},
      {"run " + kModel + "--prompt a --max-tokens 0", "--max-tokens"},
      {"run " + kModel + "--prompt a --threads -1", "--threads"},
      {"run " + kModel + "--prompt ''", "prompt"},
      {"eval " + kModel, "--tasks"},
      {"eval --tasks kv", "--model"},
      {"eval " + kModel + "--tasks nosuch", "nosuch"},
      {"eval " + kModel + "--tasks ''", "empty"},
      {kAsked + "--policies ','", "--policies"},
      {kAsked + "--policies nosuch", "nosuch"},
      {kAsked + "--policies 'history | fitted=0.9'", "clusters | fitted=0.9"},
      {kAsked + "--near 110%", "--near"},
      {"bench cpu --sections attention --length 1K --sinks 2", "--sinks"},
      {"bench cpu --sections attention --length 1K --sinks 1", "--sinks"},
      {"bench cpu --sections attention --length 60 --sinks 0.5", "--sinks"},
      {"bench", "a command is missing; there are "},
      {"bench tpu", "tpu"},
      {"run --modle x --prompt a", "--modle"},
      {"bench cpu --shape nosuch", "llama-3.1-8b"},
      {"bench cpu --q-heads 7", "q_heads"},
      {"bench cpu --sections nosuch", "nosuch"},
      {"bench cpu --rows 0", "--rows"},
      {"bench cpu --rows 1,x --length 1K", "--rows"},
      {"policies -o xml", "xml"},
  }));
  const Outcome outcome = sluice::test::sluice(wrong.arguments);
  CAPTURE(wrong.arguments, outcome.out, outcome.err);
  CHECK(outcome.code == 2);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, wrong.named));
}

TEST_CASE("an unknown policy is answered with the presets there are", "[cli]") {
  const Outcome outcome = run_model("--prompt a --policy nosuch");
  CAPTURE(outcome.err);
  for (const char* preset : {"full", "topk", "streaming", "lfps", "sluice"}) CHECK(contains(outcome.err, preset));
}

TEST_CASE("a prompt that is not UTF-8 is refused with the offset of the byte", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string file = scratch.write("prompt", "ab\xff");
  for (const std::string& source : {"--prompt-file '" + file + "'", "--prompt-file - <'" + file + "'"}) {
    const Outcome outcome = run_model(source);
    CAPTURE(source, outcome.err);
    CHECK(outcome.code == 2);
    CHECK(is_one_error(outcome));
    CHECK(contains(outcome.err, "UTF-8 at byte 2"));
  }
}

TEST_CASE("token ids that are none are refused by name and place", "[cli]") {
  const TemporaryDirectory scratch;
  for (const auto& [ids, named] : {std::pair("1 2 x", "entry 3 'x'"),
                                   {"1 2 320", "entry 3 '320'"},
                                   {"1 -2", "entry 2 '-2'"},
                                   {"", "no token ids"},
                                   {"[1, 2", "']' at the end"}}) {
    const std::string file = scratch.write("ids", ids);
    const Outcome outcome = run_model("--prompt-tokens '" + file + "'");
    CAPTURE(ids, outcome.err);
    CHECK(outcome.code == 2);
    CHECK(is_one_error(outcome));
    CHECK(contains(outcome.err, file + ": "));
    CHECK(contains(outcome.err, named));
  }
}

TEST_CASE("a model that is missing or damaged is bad input", "[cli]") {
  const TemporaryDirectory scratch;
  const auto with_model = [](const std::string& directory) {
    return sluice::test::sluice("run --model '" + directory + "' --prompt a");
  };
  const Outcome missing = with_model(scratch.file("nosuch"));
  CAPTURE(missing.err);
  CHECK(missing.code == 2);
  CHECK(is_one_error(missing));
  CHECK(contains(missing.err, "nosuch: there is no such folder"));

  namespace fs = std::filesystem;
  const std::string damaged = scratch.file("model");
  fs::copy(fs::path(sluice::test::test_data()) / "testbed", damaged);
  const fs::path shard = fs::path(damaged) / "model-00002-of-00002.safetensors";
  fs::permissions(shard, fs::perms::owner_write, fs::perm_options::add);
  fs::resize_file(shard, fs::file_size(shard) / 2);
  const Outcome truncated = with_model(damaged);
  CAPTURE(truncated.err);
  CHECK(truncated.code == 2);
  CHECK(is_one_error(truncated));
  CHECK(contains(truncated.err, "model-00002-of-00002.safetensors"));

  fs::resize_file(shard, 0);
  std::ofstream(shard) << "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n";
  const Outcome pointer = with_model(damaged);
  CAPTURE(pointer.err);
  CHECK(pointer.code == 2);
  CHECK(contains(pointer.err, "git lfs pull"));
  fs::remove(shard);
  const Outcome gone = with_model(damaged);
  CAPTURE(gone.err);
  CHECK(gone.code == 2);
  CHECK(contains(gone.err, "model-00002-of-00002.safetensors: is missing"));
  CHECK(contains(gone.err, "fetch the model again"));
}

TEST_CASE("a result that cannot be written is known before the work starts and leaves nothing", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string nowhere = scratch.file("no/such/dir/result.json");
  const Outcome outcome = run_model("--prompt a --output '" + nowhere + "'");
  CAPTURE(outcome.err);
  CHECK(outcome.code == 1);
  CHECK(is_one_error(outcome));  // Nothing was generated either.
  CHECK(contains(outcome.err, nowhere));
  const Outcome directory = sluice::test::sluice("policies --output '" + scratch.file("") + "'");
  CHECK(directory.code == 1);
  CHECK(is_one_error(directory));
  CHECK(scratch.entries() == 0);
}

TEST_CASE("a run that fails leaves the old result in place and no part of a new one", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string result = scratch.write("result.json", "old");
  const Outcome outcome =
      run_model("--prompt '" + std::string(600, 'x') + "' --host-size 1M -o json --output '" + result + "'");
  CAPTURE(outcome.err);
  CHECK(outcome.code == 1);
  CHECK(read_file(result) == "old");
  CHECK(scratch.entries() == 1);
}

TEST_CASE("a prompt beyond the host pool names the size that would do", "[cli]") {
  const Outcome outcome = run_model("--prompt '" + std::string(600, 'x') + "' --host-size 1M");
  CAPTURE(outcome.err);
  CHECK(outcome.code == 1);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, "--host-size"));
}
