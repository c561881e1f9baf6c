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
  CHECK(report.at("config").at("graphs") == "auto");
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
    CHECK(row.at("forwards") > 0);
    CHECK(row.at("replayed_forwards") == 0);  // Forwards of a CPU are no graphs, and nothing is said about it.
    CHECK(row.at("ttft_p99_ms") >= row.at("ttft_p50_ms"));
    CHECK(row.at("tbt_p99_ms") >= row.at("tbt_p50_ms"));
  }
  CHECK(rows[0].at("policy") == "full");
  CHECK(rows[0].at("largest_batch") == 3);
  CHECK(rows[5].at("policy") == "lfps");
}

TEST_CASE("bench serve goes on where its file takes no rows", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string out = scratch.file("out");
  // Nothing that is not empty can be written, but to a pipe.
  const Outcome outcome =
      sluice::test::shell("{ (ulimit -f 0; '" + sluice::test::cli_path() + "' " + kServe +
                          "--prompt 40 --answer 6 --batch 3 --rates 0,200 --policies full -o json --output '" +
                          scratch.file("result.json") + "'; echo \"code $?\"); } | cat >'" + out + "'");
  CAPTURE(outcome.err);
  const std::string printed = sluice::test::read_file(out);
  CAPTURE(printed);
  REQUIRE(printed.ends_with("code 1\n"));
  CHECK(json::parse(printed.substr(0, printed.rfind("code 1"))).at("results").at("serve").size() == 2);
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

TEST_CASE("bench serve serves a policy in the placement that its name says", "[cli]") {
  const json rows = rows_of(
      "--prompt 400 --spread 0 --answer 12 --rates 0 --batch 2 --near-size 1M --policies "
      "'psa;stream/psa;hybrid/psa;stream/sluice' --fetch-share 0.5");
  REQUIRE(rows.size() == 4);
  CHECK(rows[1].at("policy") == "stream/psa");
  CHECK(rows[0].at("near_hit_share") == rows[2].at("near_hit_share"));  // --placement says hybrid.
  for (const json& row : rows) {
    CAPTURE(row.dump());
    CHECK(row.at("answer_tokens") == 72);
    // In `hybrid` the CPU attends what it chose in place.
    CHECK((row.at("near_hit_share") > 0.0) == (std::string(row.at("policy")).starts_with("stream/")));
  }
  // What is attended does not depend on who does.
  CHECK(rows[1].at("attended_share") == rows[0].at("attended_share"));
  CHECK(rows[2].at("attended_share") == rows[0].at("attended_share"));
}

TEST_CASE("bench serve holds dense attention to the device memory that it is given", "[cli]") {
  // Keys and values of a token, 2 layers and KV heads of 64, take 1 KiB: 256 tokens, and 160 for each request.
  const TemporaryDirectory scratch;
  const std::string lengths =
      "--lengths '" + scratch.write("lengths.csv", "150,10\n") + "' --rates 0 --prefill-chunk 32 ";
  const json rows = rows_of(lengths + "--kv-size 512K --host-size 960K --policies 'dense;streaming:recent=8'");
  REQUIRE(rows.size() == 2);
  const json &dense = rows[0], &streaming = rows[1];
  CHECK(dense.at("room_tokens") == 512);
  CHECK(dense.at("largest_batch") == 3);
  CHECK(dense.at("attended_share") == 1.0);
  CHECK(dense.at("near_hit_share") > 0.9);
  CHECK(streaming.at("room_tokens") == 960);
  CHECK(streaming.at("largest_batch") == 6);
  CHECK(streaming.at("attended_share") < 0.5);
  for (const json& row : rows) {
    CHECK(row.at("answer_tokens") == 60);
    CHECK(row.at("refused") == 0);
    CHECK(row.at("unfinished") == 0);
    CHECK(row.at("held").is_null());
  }
  const std::string two = "--lengths '" + scratch.write("two.csv", "150,10\n600,10\n") + "' --rates 0 ";
  const json refused = rows_of(two + "--kv-size 512K --policies dense")[0];
  CHECK(refused.at("refused") == 3);
  CHECK(refused.at("answer_tokens") == 30);
}

TEST_CASE("bench serve serves a whole model", "[cli]") {
  const json report = sluice::test::json_of(
      "bench serve --random-weights tiny --threads 2 --requests 5 --prompt 90 --answer 7 --rates 0 --prefill-chunk 64 "
      "--policies 'dense;arkvale;psa' --kv-size 1M --structure query_aware");
  CHECK(report.at("config").at("random_weights") == "tiny");
  CHECK(report.at("config").at("head_dim") == 64);
  const json& rows = report.at("results").at("serve");
  REQUIRE(rows.size() == 3);
  for (const json& row : rows) {
    CHECK(row.at("answer_tokens") == rows[0].at("answer_tokens"));
    CHECK(row.at("computed_prompt_tokens") == row.at("prompt_tokens"));
    CHECK(row.at("chunk_p50_ms") > 0.0);
    CHECK(row.at("unfinished") == 0);
  }
}

TEST_CASE("bench serve finds the highest rate that holds its limits", "[cli]") {
  const std::string load = "--prompt 40 --answer 6 --rates 300,100,200 --policies 'full;sluice' ";
  const json easy = report_of(load + "--tbt-limit 10000 --queue-limit 100 --bisect").at("results");
  CHECK(easy.at("serve").size() == 4);
  for (const json& row : easy.at("serve")) CHECK(row.at("held") == true);
  REQUIRE(easy.at("held").size() == 2);
  for (const json& row : easy.at("held")) {
    CHECK(row.at("rate_per_s") == 300.0);
    CHECK(row.at("speedup_over_first") == 1.0);
  }
  const json hard = report_of(load + "--tbt-limit 0.0001 --bisect").at("results");
  CHECK(hard.at("serve").size() == 4);
  for (const json& row : hard.at("serve")) {
    CHECK(row.at("held") == false);
    CHECK(row.at("answer_tokens") < easy.at("serve")[0].at("answer_tokens"));  // Given up when that was certain.
    CHECK(row.at("unfinished") > 0);
  }
  CHECK(hard.at("held")[0].at("rate_per_s").is_null());
  CHECK(report_of(load + "--tbt-limit 0.0001").at("results").at("serve").size() == 6);  // Every rate without --bisect.
  CHECK_FALSE(report_of(load).at("results").contains("held"));
}

TEST_CASE("bench serve leaves a run when its time is over, and the next one finds nothing of it", "[cli]") {
  const json rows =
      rows_of("--prompt 3000 --spread 0 --answer 400 --rates 100,1000,10 --seconds 0.1 --prefill-chunk 64");
  REQUIRE(rows.size() == 3);
  for (const json& row : rows) CHECK(row.at("seconds") < 1.0);
  CHECK(rows[1].at("unfinished") > 0);
  CHECK(rows[1].at("requests") > 3 * rows[0].at("requests").get<int>());
  CHECK(rows[2].at("requests") < 5);
  CHECK(rows[2].at("preemptions") == 0);
  CHECK(rows[2].at("largest_batch") <= rows[2].at("requests"));
}

TEST_CASE("a policy that fails does not take the others of bench serve along", "[cli]") {
  // Two near pages hold a request of psa, whose pages have 32 tokens, and none of others.
  const std::string few =
      kServe + "--prompt 40 --spread 0 --answer 4 --rates 0 -o json --policies 'full;psa' --near-pages ";
  const Outcome one = sluice::test::sluice(few + "2");
  CAPTURE(one.out, one.err);
  CHECK(one.code == 1);
  CHECK(contains(one.err, "full: request 0"));
  const json rows = json::parse(one.out).at("results").at("serve");
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].at("policy") == "psa");
  CHECK(rows[0].at("unfinished") == 0);
  const Outcome none = sluice::test::sluice(few + "1");
  CHECK(none.code == 1);
  CHECK(none.out.empty());
}

TEST_CASE("bench serve has the rows that it has finished in its file", "[cli]") {
  const TemporaryDirectory scratch;
  const std::string file = scratch.file("rows.json");
  // The second run waits for its requests for an hour, and is killed.
  const Outcome outcome = sluice::test::shell("'" + sluice::test::cli_path() + "' " + kServe +
                                              "--prompt 40 --answer 4 --rates 0,0.001 -o json --output '" + file +
                                              "' & for i in $(seq 300); do [ ! -s '" + file +
                                              "' ] || break; sleep 0.1; done; kill -9 $!; wait $!; true");
  CHECK(outcome.code == 0);
  const json report = json::parse(sluice::test::read_file(file));
  REQUIRE(report.at("results").at("serve").size() == 1);
  CHECK(report.at("results").at("serve")[0].at("unfinished") == 0);
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
                        {"--policies nowhere/psa", "nowhere"},
                        {"--policies stream/", "policy"},
                        {"--q-heads 7", "q_heads"},
                        {"--host-size 8K", "--host-size", 1},
                        {"--near-pages 1", "near pages", 1},
                        {"--policies 'dense'", "--kv-size"},
                        {"--kv-size 4K --policies dense", "--kv-size 4K", 1},
                        {"--kv-size 4K --policies sluice", "--kv-size 4K", 1},
                        {"--bisect", "--tbt-limit"},
                        {"--graphs on", "graphs are asked for, and this runs on the CPU", 3},
                        {"--graphs on --random-weights tiny", "graphs are asked for, and this runs on the CPU", 3},
                        {"--graphs often", "--graphs"},
                        {"--bisect --tbt-limit 1 --rates 0,1", "--rates"},
                        {"--structure none", "none"},
                        {"--random-weights tiny --model x", "--model"},
                        {"--random-weights none", "none"},
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
