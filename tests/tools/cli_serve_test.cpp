// `sluice bench serve`: what is served, whatever the times are.
#include <string>

#include <nlohmann/json.hpp>

#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"
#include "tests/tools/cli_report.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::TemporaryDirectory;

namespace {

const std::string kServe = "bench serve --shape testbed --layers 2 --threads 2 --requests 6 ";

json report_of(const std::string& arguments) { return sluice::test::json_of(kServe + arguments); }

json rows_of(const std::string& arguments) { return report_of(arguments).at("results").at("serve"); }

}  // namespace

TEST_CASE("bench serve gives every request its tokens, under every policy and rate", "[cli]") {
  const json report = report_of("--prompt 40 --answer 6 --batch 3 --rates 0,200 --policies 'full;sluice;lfps'");
  CHECK(report.at("command") == "bench serve");
  CHECK(report.at("config").at("device") == "host");
  CHECK(report.at("config").at("rates") == json({0.0, 200.0}));
  const json rows = report.at("results").at("serve");
  REQUIRE(rows.size() == 6);
  for (const json& row : rows) {
    CAPTURE(row.dump());
    CHECK(row.at("requests") == 6);
    CHECK(row.at("preemptions") == 0);
    CHECK(row.at("largest_batch") <= 3);
    CHECK(row.at("prompt_tokens") == rows[0].at("prompt_tokens"));  // The load is the same.
    CHECK(row.at("answer_tokens") == rows[0].at("answer_tokens"));
    CHECK(row.at("computed_prompt_tokens") == row.at("prompt_tokens"));
    for (const char* const time : {"seconds", "answer_tokens_per_s", "ttft_p50_ms", "tbt_p50_ms"})
      CHECK(row.at(time) > 0.0);
    CHECK(row.at("ttft_p99_ms") >= row.at("ttft_p50_ms"));
    CHECK(row.at("tbt_p99_ms") >= row.at("tbt_p50_ms"));
  }
  CHECK(rows[0].at("policy") == "full");
  CHECK(rows[0].at("largest_batch") == 3);
  CHECK(rows[5].at("policy") == "lfps");
}

TEST_CASE("bench serve takes lengths from a file, and preempts where memory is short", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string lengths = "--lengths '" + scratch.write("lengths.csv", "prompt,answer\r\n32,40\r\n\n17,1\n") +
                              "' --rates 0 --policies full --prefill-chunk 64 ";
  const json all = rows_of(lengths)[0];
  CHECK(all.at("prompt_tokens") == 3 * (32 + 17));
  CHECK(all.at("answer_tokens") == 3 * (40 + 1));
  CHECK(all.at("preemptions") == 0);
  CHECK(all.at("largest_batch") == 6);
  // A page of 16 tokens, keys and values of 2 bytes, 2 layers and KV heads of 64; a request wants 5 of them at most.
  const json few = rows_of(lengths + "--host-size " + std::to_string(8 * 2 * 16 * 2 * 2 * 2 * 64))[0];
  CHECK(few.at("preemptions") > 0);
  CHECK(few.at("computed_prompt_tokens") > few.at("prompt_tokens"));
  CHECK(few.at("answer_tokens") == all.at("answer_tokens"));
  CHECK(few.at("forwards") > all.at("forwards"));
  const json paced = rows_of(lengths + "--slowdown 1.5")[0];  // Chunks begin with less than all rows.
  CHECK(paced.at("forwards") >= all.at("forwards"));
  CHECK(paced.at("answer_tokens") == all.at("answer_tokens"));
  const json near = rows_of(lengths + "--near-pages 5 --near-pages-per-request 2")[0];
  CHECK(near.at("largest_batch") == 2);
  CHECK(near.at("answer_tokens") == all.at("answer_tokens"));
}

TEST_CASE("bench serve refuses what it cannot serve, by name", "[cli]") {
  struct Case {
    std::string arguments;
    std::string named;
    int code = 2;
  };
  const TemporaryDirectory scratch;
  const auto file = [&](const std::string& name, const std::string& bytes) {
    return "--lengths '" + scratch.write(name, bytes) + "'";
  };
  const Case cases[] = {{"--rates ''", "--rates"},
                        {"--policies nosuch", "nosuch"},
                        {"--q-heads 7", "q_heads"},
                        {"--host-size 8K", "--host-size", 1},
                        {"--near-pages 1", "near pages", 1},
                        {"--lengths '" + scratch.file("none") + "'", "none"},
                        {file("empty", "prompt,answer\n"), "no lengths"},
                        {file("words", "1,2\nprompt,answer\n"), "words, line 2"},
                        {file("one", "1,2\n\n3\n"), "one, line 3"},
                        {file("zero", "0,2\n"), "zero, line 1"}};
  for (const Case& wrong : cases) {
    const Outcome outcome = sluice::test::sluice(kServe + wrong.arguments);
    CAPTURE(wrong.arguments, outcome.out, outcome.err);
    CHECK(outcome.code == wrong.code);
    CHECK(is_one_error(outcome));
    CHECK(contains(outcome.err, wrong.named));
  }
}
