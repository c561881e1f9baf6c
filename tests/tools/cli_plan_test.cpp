// `sluice plan`: figures that can be worked out by hand, and what fits.
#include "tests/tools/cli_plan.hpp"

using nlohmann::json;
using sluice::test::contains;
using sluice::test::is_one_error;
using sluice::test::Outcome;
using sluice::test::plans::machine;
using sluice::test::plans::Planner;

TEST_CASE("plan: dense attention takes what its bytes take on the lanes that it uses") {
  Planner planner;
  // 8 KV heads * 32,768 tokens * 512 bytes: 134 MB per layer. Half is near, at 1,000 GB/s; half far, at 100.
  const json row = planner.rows("--policies full --length 32K --near-hits 0.5 --layers 2")[0];
  REQUIRE(row.at("bottleneck") == "cpu");
  const double bytes = 8.0 * 32768 * 512;
  REQUIRE(row.at("cpu_us").get<double>() == Approx(0.5 * bytes / 100e3).epsilon(0.01));
  REQUIRE(row.at("layer_us").get<double>() == Approx(0.5 * bytes / 100e3).epsilon(0.05));
  REQUIRE(row.at("token_ms").get<double>() == Approx(2e-3 * row.at("layer_us").get<double>()));
  // Against everything in device memory.
  REQUIRE(row.at("speedup_over_dense").get<double>() ==
          Approx(bytes / 1000e3 / row.at("layer_us").get<double>()).epsilon(0.001));
  const json near = planner.rows("--policies full --length 32K --near-hits 1 --layers 2")[0];
  REQUIRE(near.at("bottleneck") == "device");
  REQUIRE(near.at("layer_us").get<double>() < 0.25 * row.at("layer_us").get<double>());
  const json stream = planner.rows("--policies full --length 32K --layers 2 --placements stream")[0];
  REQUIRE(stream.at("bottleneck") == "link");
  REQUIRE(stream.at("cpu_us") == 0.0);
}

TEST_CASE("plan: a whole model reads its weights, once for a batch") {
  Planner planner;
  // Read at 1,000 GB/s, in ms. Of Llama-3.1-8B 6,979,321,856 of 8 billion parameters are in layers, 525,336,576 in the
  // head.
  const auto weights_ms = [&](const std::string& flags) {
    const json row = planner.rows("--length 8K " + flags)[0];
    return row.at("model_ms").get<double>() - row.at("token_ms").get<double>();
  };
  const double layers = 2 * 6'979'321'856.0 / 1e9, head = 2 * 525'336'576.0 / 1e9;
  CHECK(weights_ms("") == Approx(layers + head));
  CHECK(weights_ms("--rows 4") == Approx(layers + head));
  CHECK(weights_ms("--gpus 2") == Approx((layers + head) / 2));
  CHECK(weights_ms("--layers 8") == Approx(layers / 4 + head));
  CHECK(weights_ms("--device-gbps 500") == Approx(2 * (layers + head)));
  CHECK(weights_ms("--shape llama-3.1-70b") == Approx(2 * 69.5e9 / 1e9).epsilon(0.001));
  CHECK(weights_ms("--shape testbed") == Approx(2 * 13'492'224 / 1e9));
}

TEST_CASE("plan: a budget of far tokens is written behind policies, printed, and bounds what the CPU reads") {
  Planner planner;
  const std::string flags = "--policies 'sluice | top_k=1%;twilight | dense=0' --length 32K --layers 2 --near-hits 0";
  const json free = planner.rows(flags);
  const json far = planner.rows(flags + " --far 4096");
  REQUIRE(free.size() == 2);
  for (std::size_t i = 0; i < free.size(); ++i) {
    CAPTURE(i);
    REQUIRE(free[i].at("far_budget_tokens").is_null());
    REQUIRE(far[i].at("far_budget_tokens") == 4096);
    REQUIRE(far[i].at("policy") == free[i].at("policy").get<std::string>() + " | far=4096");
    // Of 4,096 tokens, and of sinks and recent ones.
    REQUIRE(far[i].at("cpu_us").get<double>() < (4096 + 8 * 140) * 512 / 100e3 + 1.0);
    REQUIRE(far[i].at("cpu_us").get<double>() < free[i].at("cpu_us").get<double>());
  }
  REQUIRE(planner.rows(flags + " --far 'max(64, 1%)'")[0].at("far_budget_tokens") == 2621);
  const json advised = planner.rows(flags + " --far auto");
  REQUIRE(advised[0].at("policy") ==
          "sluice | top_k=1% | far=" + std::to_string(advised[0].at("far_budget_tokens").get<std::uint64_t>()));
  // As other commands are advised, which do not know what was measured of the policy.
  const auto of_quest = [&](const std::string& more) {
    return planner.rows("--policies quest --length 64K --far auto" + more)[0].at("far_budget_tokens");
  };
  REQUIRE(of_quest("") == of_quest(" --near-hits 50%"));
  const json none = planner.rows("--policies 'full;magicpig;none' --length 8K --layers 1 --far auto");
  for (const json& row : none) REQUIRE(row.at("far_budget_tokens").is_null());
  for (const char* const wrong : {"--policies full --far 9", "--far 0", "--far some", "--far 101%"}) {
    const Outcome outcome = planner.run(wrong);
    CAPTURE(wrong, outcome.err);
    REQUIRE(outcome.code == 2);
    REQUIRE(is_one_error(outcome));
  }
}

TEST_CASE("plan: kernels cost what the machine says") {
  Planner planner;
  json slow = machine();
  const char* const flags = "--policies sluice --length 8K --near-hits 1 --layers 4";
  const double before = planner.rows(flags, slow)[0].at("layer_us").get<double>();
  slow["stages"] = {{"score", {{"fixed_us", 50.0}, {"share", 1.0}}}};
  slow["forward_us"] = 40.0;
  REQUIRE(planner.rows(flags, slow)[0].at("layer_us").get<double>() == Approx(before + 50.0 + 40.0 / 4).epsilon(0.01));
  slow["stages"]["score"]["share"] = 0.5;  // 8 KV heads * 8,192 keys * 68 bytes, at 500 GB/s instead of 1,000.
  REQUIRE(planner.rows(flags, slow)[0].at("layer_us").get<double>() ==
          Approx(before + 60.0 + 8.0 * 8192 * 68 / 1000e3).epsilon(0.01));
}

TEST_CASE("plan: batches cost what the machine says of them, and dense attention of one is one launch") {
  Planner planner;
  json on = machine();
  on["stages"] = {{"score", {{"fixed_us", 50.0}, {"share", 1.0}}}};
  on["dense"] = {{"fixed_us", 1000.0}, {"share", 1.0}};
  const std::string flags = "--policies sluice --length 8K --near-hits 1 --layers 4 --rows ";
  const auto layer_us = [&](const char* rows) {
    return planner.rows(flags + rows, on)[0].at("layer_us").get<double>();
  };
  const double alone = layer_us("1"), together = layer_us("4");
  on["batch"] = {{"rows", 4}, {"stages", {{"score", {{"fixed_us", 90.0}, {"share", 1.0}}}}}};
  REQUIRE(layer_us("1") == Approx(alone));
  REQUIRE(layer_us("4") == Approx(together + 40.0).epsilon(0.001));
  REQUIRE(layer_us("8") > layer_us("4"));
  const auto dense_us = [&](const char* rows) {
    const json row = planner.rows(flags + rows, on)[0];
    return row.at("speedup_over_dense").get<double>() * row.at("layer_us").get<double>();
  };
  REQUIRE(dense_us("4") == Approx(1000.0 + 4 * 8.0 * 8192 * 512 / 1000e3).epsilon(0.001));
}

TEST_CASE("plan: policies cost what the machine says of those that choose alike") {
  Planner planner;
  json on = machine();
  const auto layer_us = [&](const std::string& policy, const char* more = "") {
    return planner.rows("--policies '" + policy + "' --length 8K --near-hits 1 --layers 4 " + more, on)[0]
        .at("layer_us")
        .get<double>();
  };
  const std::string pages = "quest:budget=2048 | dense=0", tokens = "sluice";
  const double pages_before = layer_us(pages), tokens_before = layer_us(tokens), four = layer_us(pages, "--rows 4");
  const json rank{{"rank", {{"fixed_us", 50.0}, {"share", 1.0}}}};
  on["policies"] = {{{"policy", "quest"}, {"stages", rank}}};
  REQUIRE(layer_us(pages) > pages_before + 49.0);
  REQUIRE(layer_us(tokens) == Approx(tokens_before));
  on["batch"] = {{"rows", 4}, {"stages", json::object()}};
  on["policies"][0]["batch"] = {{"stages", {{"rank", {{"fixed_us", 80.0}, {"share", 1.0}}}}}};
  REQUIRE(layer_us(pages, "--rows 4") > four + 79.0);
  // What the CPU reads to choose: 8 KV heads * 8,192 keys * 256 bytes, at 100 GB/s, of which a fourth.
  on["policies"] = {{{"policy", "topk"}, {"stages", json::object()}, {"scored", 0.0}}};
  const double unread = layer_us("topk");
  on["policies"][0]["scored"] = 0.25;
  REQUIRE(layer_us("topk") == Approx(unread + 0.25 * 8 * 8192 * 256 / 100e3).epsilon(0.001));
}

TEST_CASE("plan: with all tokens near nothing is far, and device memory has them") {
  Planner planner;
  const json rows = planner.rows("--policies sluice --length 8K --layers 2 --placements hybrid,near");
  REQUIRE(rows[1].at("placement") == "near");
  REQUIRE(rows[1].at("cpu_us") == 0.0);
  REQUIRE(rows[1].at("device_bytes").get<double>() > 2.0 * 8192 * 8 * 512);
  REQUIRE(rows[0].at("device_bytes").get<double>() < 0.5 * rows[1].at("device_bytes").get<double>());
  const Outcome refused = planner.run("--policies 'sluice;psa' --placements near");
  REQUIRE(refused.code == 3);
  REQUIRE(is_one_error(refused));
  REQUIRE(contains(refused.err, "psa"));
}

TEST_CASE("plan: what the options change") {
  Planner planner;
  const std::string base = "--policies 'exact | int4 | top_p=0.9 | near=0' --length 32K ";
  const double slow = planner.rows(base + "--cpu-gbps 10")[0].at("token_ms");
  const double fast = planner.rows(base + "--cpu-gbps 1000")[0].at("token_ms");
  REQUIRE(slow > 5 * fast);
  const double few = planner.rows(base + "--attended 2%")[0].at("cpu_us");
  const double many = planner.rows(base + "--attended 4%")[0].at("cpu_us");
  REQUIRE(many == Approx(2 * few).epsilon(0.05));
  const json batches = planner.rows(base + "--rows 1,4 --placements hybrid,stream");
  REQUIRE(batches.size() == 4);
  REQUIRE(batches[1].at("host_bytes").get<double>() > 3.9 * batches[0].at("host_bytes").get<double>());
}

TEST_CASE("plan: the most that fits does, and one more does not") {
  Planner planner;
  for (const std::string policy : {"sluice", "quest", "lfps"}) {
    CAPTURE(policy);
    const std::string base = "--policies " + policy + " --weights 2G ";
    const json row = planner.rows(base + "--length 16K")[0];
    const unsigned rows = row.at("most_rows"), tokens = row.at("most_tokens");
    REQUIRE(rows > 1);
    const auto fits = [&](unsigned count, unsigned length) {
      return planner.rows(base + "--rows " + std::to_string(count) + " --length " + std::to_string(length))[0]
          .at("fits")
          .get<bool>();
    };
    REQUIRE(fits(rows, 16384));
    REQUIRE_FALSE(fits(rows + 1, 16384));
    REQUIRE(fits(1, tokens));
    REQUIRE_FALSE(fits(1, tokens + 64));
  }
  json tiny = machine();
  tiny["device_bytes"] = 1 << 20;
  const json none = planner.rows("--length 16K", tiny)[0];
  REQUIRE(none.at("fits") == false);
  REQUIRE(none.at("most_rows") == 0);
}

TEST_CASE("plan: memory by component is that of the engine, and of its policy") {
  Planner planner;
  const Outcome outcome = planner.run("--policies 'sluice;quest;lfps' --length 8K --rows 2 --near 10%");
  REQUIRE(outcome.code == 0);
  const json results = json::parse(outcome.out).at("results");
  for (std::size_t i = 0; i < 3; ++i) {
    const json& whole = results.at("plan")[i];
    const json& parts = results.at("memory")[i];
    CAPTURE(parts.dump());
    const double kv = parts.at("kv_bytes");
    REQUIRE(kv == 2.0 * 8192 * 131'072);
    const auto share = [&](const char* key) { return parts.at(key).get<double>(); };
    REQUIRE(kv * (share("near_share") + share("codes_share") + share("digests_share") + share("buffers_share")) ==
            Approx(whole.at("device_bytes").get<double>()));
    REQUIRE(kv * (1.0 + share("pinned_share") + share("policies_share")) ==
            Approx(whole.at("host_bytes").get<double>()));
    REQUIRE(share("near_share") == Approx(0.1).epsilon(0.03));  // Whole pages.
    REQUIRE((share("digests_share") > 0.0) == (i == 1));
    REQUIRE((share("policies_share") > 0.0) == (i == 2));
  }
}

TEST_CASE("plan: what lies near is what was measured of the policy, no more than there is room for, or what is asked") {
  Planner planner;
  const auto hits = [&](const std::string& flags) {
    const json row = planner.rows(flags)[0];
    return std::pair{row.at("near_hits").get<double>(), row.at("near_hits_from").get<std::string>()};
  };
  using Hits = std::pair<double, std::string>;
  CHECK(hits("--policies sluice --length 32K") == Hits{0.97, "measured"});
  CHECK(hits("--policies 'exact | int4 | top_k=64' --length 32K") == Hits{0.5, "guess"});
  CHECK(hits("--policies quest --length 64K") == Hits{0.96, "measured"});
  CHECK(hits("--policies twilight --length 64K --attended 1%") == Hits{0.98, "measured"});
  CHECK(hits("--policies 'tactic | int4' --length 32K --attended 2%") == Hits{0.5, "guess"});
  CHECK(hits("--policies sluice --length 32K --near-hits 10%") == Hits{0.1, "given"});
  CHECK(hits("--policies sluice --length 32K --placements near --near-hits 10%") == Hits{1.0, "all near"});
  // 1,024 tokens of 16-token pages for each of four heads, of which about 55% are apart, and 5% of 8,192 tokens near.
  const Hits quest = hits("--policies quest --length 8K --near 5%");
  CHECK(quest.second == "room");
  CHECK(quest.first == Approx(0.05 * 8192 / (0.55 * 4096)).epsilon(0.02));
  const Hits window = hits("--policies streaming --length 8K --near 5%");
  CHECK(window.second == "room");
  CHECK(window.first == Approx(0.05 * 8192 / 1024).epsilon(0.01));
  CHECK(hits("--policies streaming --length 64K").first == 1.0);
  CHECK(hits("--policies full --length 32K --near 10%").first == Approx(0.1));
  // A budget of far tokens counts whoever has written it.
  const Hits cut = hits("--policies 'quest | far=2048' --length 64K --near 1%");
  CHECK(cut.second == "measured");
  CHECK(hits("--policies quest --length 64K --near 1% --far 2048") == cut);
  CHECK(hits("--policies quest --length 64K --near 1%").second == "room");
  // The CPU attends what it chooses where it is, and the device what it fetches.
  CHECK(hits("--policies lfps --length 32K --near-hits 90%") == Hits{0.0, "in place"});
  CHECK(hits("--policies lfps --length 32K --placements stream --near 10%") == Hits{0.8, "measured"});
}

TEST_CASE("plan: a few far rows of a list ask no thread, more of them, or those of many sequences, do") {
  Planner planner;
  const auto cpu_us = [&](const std::string& flags) {
    return planner.rows(flags)[0].at("cpu_us").get<double>();
  };
  // The default draws 256 tokens for each of four heads, a few of which are far.
  CHECK(cpu_us("--policies sluice --length 32K") == 0.0);
  CHECK(cpu_us("--policies sluice --length 32K --near-hits 70%") > 0.0);
  CHECK(cpu_us("--policies sluice --length 32K --rows 8") > 0.0);
  // Two rows of the largest clusters fill the device: near rows are attended by a kernel of their own.
  CHECK(cpu_us("--policies sluice --length 32K --rows 2") > 0.0);
  CHECK(cpu_us("--policies sluice --length 32K --fetch-share 50%") > 0.0);
  // What attends everything somewhere, and longer sequences, attend near rows in other kernels.
  CHECK(cpu_us("--policies 'sluice | dense=2' --length 32K") > 0.0);
  CHECK(cpu_us("--policies sluice --length 128K") == 0.0);
  CHECK(cpu_us("--policies sluice --length 256K --near-hits 99.9%") > 0.0);
  // Of some 300 tokens 15% are more than a thread block has room for, and no more than two have.
  CHECK(cpu_us("--policies sluice --length 3K --near-hits 85%") > 0.0);
  CHECK(cpu_us("--policies sluice --length 32K --near-hits 98%") == 0.0);
  CHECK(cpu_us("--policies quest --length 64K") > 0.0);  // Pages are attended by another kernel.
}
