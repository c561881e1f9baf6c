// Numbers on the command line: decimal, whole, in range, or refused by the option's name.
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/tools/cli_process.hpp"
#include "tests/tools/cli_report.hpp"

using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;

namespace {

const std::string kRun = "run " + sluice::test::testbed_model() + "--threads 2 --prompt a ";
const std::string kEval = "eval " + sluice::test::testbed_model() + "--tasks none ";

}  // namespace

TEST_CASE("what is no number of the option's range is refused by its name", "[cli]") {
  struct Case {
    std::string arguments;
    std::string option;
  };
  const auto wrong = GENERATE(values<Case>({
      {kRun + "--max-tokens 0x10", "--max-tokens"},
      {kRun + "--max-tokens '5 '", "--max-tokens"},
      {kRun + "--max-tokens ' 5'", "--max-tokens"},
      {kRun + "--max-tokens +5", "--max-tokens"},
      {kRun + "--max-tokens -18446744073709551615", "--max-tokens"},
      {kRun + "--max-tokens 4294967297", "--max-tokens"},
      {kRun + "--max-tokens 1e2", "--max-tokens"},
      {kRun + "--max-tokens 1.5", "--max-tokens"},
      {kRun + "--max-tokens 0.0001K", "--max-tokens"},
      {kRun + "--max-tokens 99999999999999999999", "--max-tokens"},
      {kRun + "--seed -1", "--seed"},
      {kRun + "--seed 18446744073709551616", "--seed"},
      {kRun + "--seed 0x7", "--seed"},
      {kRun + "--seed ''", "--seed"},
      {kRun + "--audit -18446744073709551615", "--audit"},
      {kRun + "--decode-prompt 0x4", "--decode-prompt"},
      {kRun + "--promote-pages 1x", "--promote-pages"},
      {kRun + "--prefill-chunk 0x200", "--prefill-chunk"},
      {kRun + "--prefill-chunk 0", "--prefill-chunk"},
      {kRun + "--prefill-chunk 65537", "--prefill-chunk"},
      {kRun + "--page-tokens 0x10", "--page-tokens"},
      {kRun + "--temperature nan", "--temperature"},
      {kRun + "--temperature inf", "--temperature"},
      {kRun + "--temperature 0x1p1", "--temperature"},
      {kRun + "--temperature -1", "--temperature"},
      {kRun + "--temperature 1e-60", "--temperature"},
      {kRun + "--top-p nan", "--top-p"},
      {kRun + "--timeout nan", "--timeout"},
      {kRun + "--timeout 1e-9", "--timeout"},
      {kRun + "--gamma nan", "--gamma"},
      {kRun + "--gamma 0x1p-1", "--gamma"},
      {kRun + "--tau '0.1 '", "--tau"},
      {kRun + "--min-budget 0x80", "--min-budget"},
      {kRun + "--prefill flexprefill@0x1p-1", "flexprefill@0x1p-1"},
      {kRun + "--host-size 0", "--host-size"},
      {kRun + "--near-size 0", "--near-size"},
      {"plan --host-size 0", "--host-size"},
      {"plan --device-size 0", "--device-size"},
      {"plan --rows 1,,2", "--rows"},
      {"plan --placements ''", "--placements"},
      {"bench cpu --sections ''", "--sections"},
      {kRun + "--host-size 0.3", "--host-size"},
      {kRun + "--host-size 1.5.5G", "--host-size"},
      {kRun + "--host-size 0.0000000000001K", "--host-size"},
      {kRun + "--near-size 17179869184G", "--near-size"},
      {kRun + "--near-size 18446744073709551616", "--near-size"},
      {kRun + "--near 1e-60%", "--near"},
      {kRun + "--device cuda:0x1", "--device"},
      {kRun + "--device cuda:4294967296", "--device"},
      {kEval + "--decode-prompt 0x2", "--decode-prompt"},
      {kEval + "--decode-prompt 0", "--decode-prompt"},
      {kEval + "--max-tokens -3", "--max-tokens"},
      {kEval + "--audit 1.5", "--audit"},
      {"bench cpu --q-heads 0x8", "--q-heads"},
      {"bench cpu --q-heads -18446744073709551608", "--q-heads"},
      {"bench cpu --alpha nan", "--alpha"},
      {"bench cpu --group-correlation 0x1p-1", "--group-correlation"},
      {"bench cpu --steps 0x2", "--steps"},
      {"bench cpu --seed -3", "--seed"},
      {"bench gpu --layers 0x1", "--layers"},
      {"bench prefill --repeat 0x1", "--repeat"},
      {"bench decode --warm-up 0x1", "--warm-up"},
      {"bench gpu --rows 1,0x2", "--rows"},
      {"bench serve --batch 0x1", "--batch"},
      {"bench serve --rates 1,-2", "--rates"},
      {"bench serve --spread nan", "--spread"},
      {"link --samples 0x3", "--samples"},
      {"link --numa-node -1", "--numa-node"},
  }));
  const Outcome outcome = sluice::test::sluice(wrong.arguments);
  CAPTURE(wrong.arguments, outcome.out, outcome.err);
  CHECK(outcome.code == 2);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, wrong.option));
}

TEST_CASE("leading zeros are decimal, and counts may say K", "[cli]") {
  const auto config = [](const std::string& arguments) { return sluice::test::json_of(arguments).at("config"); };
  CHECK(config(kRun + "--max-tokens 010 --seed 0777").at("seed") == 777);
  CHECK(config(kRun + "--max-tokens 010").at("max_tokens") == 10);
  CHECK(config(kRun + "--max-tokens 1 --prefill-chunk 1K").at("prefill_chunk") == 1024);
  CHECK(config(kRun + "--max-tokens 1 --seed 18446744073709551615").at("seed") == 18446744073709551615u);
}

TEST_CASE("numbers inside a policy obey the same rules", "[cli]") {
  const std::string policy = GENERATE(values<std::string>({
      "lfps:alpha=nan",
      "lfps:alpha=inf",
      "lfps:alpha=+1",
      "lfps:alpha=1e-60",
      "lfps:alpha=0x1p0",
      "topk:budget=0x40",
      "topk:budget=4294967296",
      "topk:budget=1e-60%",
      "topk:budget=4194304K",
      "topk:budget=1.5K",
      "topk:sinks=-1",
      "full:near=nan%",
      "full:near=5%%",
      "magicpig:seed=18446744073709551616",
  }));
  const std::string value = policy.substr(policy.find('=') + 1);
  const Outcome outcome = sluice::test::sluice(kRun + "--policy '" + policy + "'");
  CAPTURE(policy, outcome.out, outcome.err);
  CHECK(outcome.code == 2);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, "\"" + value + "\""));
}
