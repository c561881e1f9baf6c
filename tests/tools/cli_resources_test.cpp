// The command where memory, threads, files or reads fail.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/tools/cli_process.hpp"

using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::TemporaryDirectory;

namespace {

/// `BEFORE sluice ARGUMENTS` in a shell.
Outcome after(const std::string& before, const std::string& arguments) {
  return sluice::test::shell(before + " '" + sluice::test::cli_path() + "' " + arguments);
}

Outcome run_after(const std::string& before, const std::string& arguments) {
  return after(before, "run " + sluice::test::testbed_model() + "--max-tokens 1 --threads 2 -o json " + arguments);
}

}  // namespace

// Address sanitizers map terabytes of shadow memory, so a limit would end them before main.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("short of memory the command fails with one line that names a remedy", "[cli]") {
  int failed = 0;
  int ran = 0;
  // With less than it takes to map the program nothing of it runs.
  const auto image = static_cast<int>(std::filesystem::file_size(sluice::test::cli_path()) >> 20);
  for (int mib = image + 8; mib <= 1'500; mib = mib * 10 / 9) {
    const Outcome outcome = run_after("ulimit -v " + std::to_string(mib * 1024) + ";", "--prompt hello");
    CAPTURE(mib, outcome.code, outcome.out, outcome.err);
    if (contains(outcome.err, "error while loading shared libraries")) continue;
    if (outcome.code == 0) {
      ++ran;
      continue;
    }
    ++failed;
    CHECK(outcome.code == 1);
    CHECK(is_one_error(outcome));
    CHECK(contains(outcome.err, ";"));
    CHECK_FALSE(contains(outcome.err, "unexpected"));
  }
  CHECK(failed > 0);
  CHECK(ran > 0);
}
#endif

TEST_CASE("a pipe in a model's directory is named at once", "[cli]") {
  const TemporaryDirectory scratch;
  REQUIRE(std::system(("mkfifo '" + scratch.file("config.json") + "'").c_str()) == 0);
  const Outcome outcome = after("", "run --model '" + scratch.file("") + "' --prompt a");
  CAPTURE(outcome.err);
  CHECK(outcome.code == 1);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, "config.json"));
}

TEST_CASE("a prompt may come through a pipe", "[cli]") {
  for (const char* source : {"--prompt-file -", "--prompt-file /dev/stdin", "--prompt-tokens /dev/stdin"}) {
    const Outcome outcome = run_after("echo 65 66 |", source);
    CAPTURE(source, outcome.err);
    CHECK(outcome.code == 0);
  }
}

TEST_CASE("a prompt that cannot be read is an error, not an empty or a shorter prompt", "[cli]") {
  for (const char* source : {"--prompt-file - </proc/self/mem", "--prompt-file - </tmp", "--prompt-file /proc/self/mem",
                             "--prompt-tokens /proc/self/mem", "--prompt-file /tmp"}) {
    const Outcome outcome = run_after("", source);
    CAPTURE(source, outcome.err);
    CHECK(outcome.code == 1);
    CHECK(is_one_error(outcome));
    CHECK(contains(outcome.err, "cannot read"));
  }
}

TEST_CASE("a model's generation_config.json gives the defaults of sampling, and flags win", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string model = scratch.file("model");
  std::filesystem::copy(sluice::test::test_data() + "/testbed", model);
  const auto config_of = [&](const std::string& flags) {
    const Outcome outcome =
        sluice::test::sluice("run --model '" + model + "' --prompt a --max-tokens 1 -o json --threads 2 " + flags);
    CAPTURE(flags, outcome.err);
    REQUIRE(outcome.code == 0);
    CHECK(contains(outcome.err, "repetition_penalty") == contains(flags, "--seed 1"));
    return nlohmann::json::parse(outcome.out).at("config");
  };
  const nlohmann::json plain = config_of("");
  CHECK(plain.at("temperature") == 0);
  CHECK(plain.at("engine").at("kv_dtype") == "bf16");
  (void)scratch.write("model/generation_config.json",
                      R"({"do_sample": true, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.5})");
  const nlohmann::json sampled = config_of("--seed 1");
  CHECK(sampled.at("temperature") == 0.5);
  CHECK(sampled.at("top_k") == 3);
  CHECK(sampled.at("top_p") == 1);
  const nlohmann::json flagged = config_of("--seed 1 --temperature 0 --top-k 0 --top-p 0.5 --kv-dtype f32");
  CHECK(flagged.at("temperature") == 0);
  CHECK(flagged.at("top_k") == 0);
  CHECK(flagged.at("top_p") == 0.5);
  CHECK(flagged.at("engine").at("kv_dtype") == "f32");
}
