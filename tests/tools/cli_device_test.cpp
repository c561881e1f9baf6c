// The commands for a GPU, on machines without one; where there is one it is hidden.
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::TemporaryDirectory;
using sluice::test::without_gpu;

namespace {

const std::string kRun = "run --random-weights tiny --prompt-tokens /dev/null ";

}  // namespace

TEST_CASE("what needs a GPU says so in one line and exits with 3 where there is none", "[cli]") {
  const std::string arguments = GENERATE(values<std::string>({
      "bench gpu --length 1K",
      "bench gpu --sections kernels",
      "bench prefill --device cuda --length 1K",
      "bench decode",
      "bench serve --device cuda",
      "link",
      "run --device cuda --random-weights tiny --prompt a",
      "run --device cuda --prefill flexprefill --random-weights tiny --prompt a",
      "run --device cuda:1 --random-weights tiny --prompt a",
      "run --device cuda --transfer-profile none --random-weights tiny --prompt a",
  }));
  const Outcome outcome = without_gpu(arguments);
  CAPTURE(arguments, outcome.out, outcome.err);
  CHECK(outcome.code == 3);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, "CUDA device"));
}

TEST_CASE("no profile is left behind by a link that could not be measured", "[cli]") {
  const TemporaryDirectory scratch;
  const Outcome outcome = without_gpu("link --save-profile '" + scratch.file("profile.json") + "'");
  CAPTURE(outcome.err);
  CHECK(outcome.code == 3);
  CHECK(scratch.entries() == 0);
}

TEST_CASE("a wrong value of a device option is named, with the values that there are", "[cli]") {
  struct Case {
    std::string arguments;
    std::string word;
    std::string have;
  };
  const auto wrong = GENERATE(values<Case>({
      {kRun + "--device gpu", "'gpu'", "host, cuda, cuda:N"},
      {kRun + "--device cuda:x", "'cuda:x'", "host, cuda, cuda:N"},
      {kRun + "--device cuda:-1", "'cuda:-1'", "host, cuda, cuda:N"},
      {kRun + "--transfer slow", "'slow'", "auto, copy-engine, batch, gather, staged"},
      {kRun + "--transfer-profile /no/such/profile", "'/no/such/profile'", "sluice link --save-profile"},
      {"bench decode --methods sluice", "'sluice'", "PLACEMENT/POLICY"},
      {"bench decode --methods far/sluice", "\"far\"", "hybrid, stream"},
      {"bench decode --methods hybrid/nosuch", "\"nosuch\"", "full, topk, streaming, quest"},
      {"bench decode --methods ''", "--methods", "hybrid/sluice"},
      {"bench decode --methods hybrid/full --far 99", "\"99\"", "means nothing here"},
      {"bench decode --batch 0", "--batch", "'0'"},
      {"bench decode --kv-size 1Q", "--kv-size", "1Q"},
      {"bench decode --batch 2 --drafts 2", "--batch", "one sequence"},
      {"bench decode --drafts 33", "--drafts", "[1, 32]"},
      {"bench gpu --device host --pattern odd", "'odd'", "structured, uniform"},
      {"bench gpu --device host --sections odd", "'odd'", "attention, kernels, pipeline"},
      {"bench gpu --device host --sections pipeline --prefetch odd", "'odd'", "on,off"},
      {"bench gpu --device host --sections pipeline --prefetch ,", "--prefetch", "at least one item"},
      {"bench gpu --device host --shape odd", "'odd'", "llama-3.1-8b"},
      {"bench gpu --device host --placements far", "\"far\"", "hybrid, stream"},
      {kRun + "--placement auto", "\"auto\"", "hybrid, stream"},
      {"link --sections odd", "'odd'", "transfers, gather, load, latency, pinning"},
  }));
  const Outcome outcome = without_gpu(wrong.arguments);
  CAPTURE(wrong.arguments, outcome.out, outcome.err);
  CHECK(outcome.code == 2);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, wrong.word));
  CHECK(contains(outcome.err, wrong.have));
}

TEST_CASE("a damaged transfer profile is refused with what is wrong with it", "[cli]") {
  struct Case {
    std::string text;
    std::string named;
  };
  const std::string head = R"({"schema_version": 2, "kind": "transfer_profile", "gather_blocks": 16, )";
  const std::string busy = R"("busy_gather_blocks": 16, )";
  const auto damaged = GENERATE_COPY(values<Case>({
      {"", "JSON"},
      {"{}", "transfer profile"},
      {R"({"schema_version": 9, "kind": "transfer_profile"})", "schema_version"},
      {R"({"schema_version": 1, "kind": "transfer_profile"})", "busy"},
      {head + R"("samples": []})", "busy_gather_blocks"},
      {head + busy + R"("samples": []})", "samples"},
      {head + busy + R"("samples": [{"path": "teleport", "load": "idle", "direction": "h2d"}]})", "teleport"},
      {head + busy + R"("samples": [{"path": "batch", "load": "idle", "direction": "up"}]})", "direction"},
      {head + busy + R"("samples": [{"path": "batch", "load": "lazy", "direction": "h2d"}]})", "load"},
  }));
  const TemporaryDirectory scratch;
  const Outcome outcome =
      without_gpu(kRun + "--transfer-profile '" + scratch.write("profile.json", damaged.text) + "'");
  CAPTURE(damaged.text, outcome.err);
  CHECK(outcome.code == 2);
  CHECK(is_one_error(outcome));
  CHECK(contains(outcome.err, "profile.json"));
  CHECK(contains(outcome.err, damaged.named));
}

TEST_CASE("bench decode: dense attends as many sequences at a time as fit, engines keep near what is left", "[cli]") {
  // A sequence of 512 tokens is 512 KiB of keys and values.
  const Outcome outcome = without_gpu(
      "bench decode --device host --random-weights tiny --length 512 --batch 2 --kv-size 300K,600K,4M --steps 2 "
      "--warm-up 1 --threads 1 --methods 'dense;hybrid/sluice;near/sluice' -o json");
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  const json report = json::parse(outcome.out).at("results");
  const json rows = report.at("decode");
  REQUIRE(rows.size() == 9);
  const std::vector<int> at_once{0, 2, 0, 1, 2, 0, 2, 2, 2};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const json& row = rows.at(i);
    CAPTURE(row.dump());
    CHECK(row.at("at_once") == at_once[i]);
    CHECK(row.at("tokens_per_s").is_null() == (at_once[i] == 0));
    if (at_once[i] == 0) continue;
    CHECK(row.at("device_bytes").get<std::uint64_t>() <= row.at("kv_bytes").get<std::uint64_t>());
    const double rate = at_once[i] * 1e3 / row.at("tpot_p50_ms").get<double>();
    CHECK(row.at("tokens_per_s").get<double>() == Approx(rate));
  }
  CHECK(rows.at(7).at("near_hit_share").get<double>() == Approx(1.0));
  for (const json& row : report.at("room")) CHECK(row.at("most_sequences").is_number());
}
