// Lengths up to which everything is attended: what is advised, and what rows make of it.
#include "scheduler/plan/dense_advice.hpp"

#include <string>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "sluice/policy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;

namespace {

constexpr AttentionShape kModel{.layers = 4, .q_heads = 32, .kv_heads = 8, .head_dim = 128};

std::uint32_t advised(const std::string& policy, const AttentionShape& shape = kModel, DType dtype = DType::bf16) {
  return advised_dense_tokens(parse_policy(policy), shape, dtype);
}

std::string complaint(const std::string& policy) {
  try {
    (void)parse_policy(policy);
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

}  // namespace

TEST_CASE("short sequences are advised to be attended whole, longer ones the more heads share keys", "[plan][dense]") {
  const std::uint32_t tokens = advised("sluice");
  REQUIRE(tokens >= 128 + 4 + 4 * 64);  // Which would all be attended anyway.
  REQUIRE(tokens < 4096);
  REQUIRE(advised("exact | int4 | top_k=256") > tokens);
  REQUIRE(advised("exact | int4 | top_k=16 | near=0,sinks=0,recent=16") < tokens);
  REQUIRE(advised("sluice", {.layers = 4, .q_heads = 64, .kv_heads = 8, .head_dim = 128}) > tokens);
  // Half as much to read of a row, and as many rows to estimate.
  REQUIRE(advised("sluice", {.layers = 4, .q_heads = 32, .kv_heads = 8, .head_dim = 64}) > tokens);
  REQUIRE(advised("sluice", kModel, DType::fp8_e4m3) > tokens);
}

TEST_CASE("where a choice keeps nearly all, everything is attended, however long", "[plan][dense]") {
  REQUIRE(advised("exact | int4 | top_k=50%") == kMostDenseTokens);
}

TEST_CASE("no length is advised for what is not chosen by all keys' copies", "[plan][dense]") {
  const std::string policy = GENERATE("full", "streaming", "quest", "twilight", "lfps", "topk", "tactic",
                                      "clusters | int4 | fitted=0.9", "exact | int4 | top_p=0.9");
  CAPTURE(policy);
  REQUIRE(advised(policy) == 0);
}

TEST_CASE("a row attends everything up to the policy's length, and chooses beyond", "[plan][dense]") {
  const PolicySpec plain = parse_policy("sluice");
  const PolicySpec cut = parse_policy("sluice | dense=0,until=1000");
  REQUIRE(cut.dense_tokens == 1000);
  const RowShape shape = row_shape(kModel, 16);
  for (const std::uint32_t tokens : {1u, 131u, 999u, 1000u}) {
    const ForwardRow row = forward_row(cut, tokens, shape);
    REQUIRE(row.whole());
    REQUIRE(!row.ranks());
    REQUIRE(row.tokens == tokens);
  }
  const ForwardRow row = forward_row(cut, 1001, shape);
  REQUIRE(!row.whole());
  REQUIRE(row.picks == forward_row(plain, 1001, shape).picks);
  REQUIRE(row.sink_end == 4);
  // Drafts behind 999 tokens: the first of them sees 1,000.
  REQUIRE(forward_team(cut, 999, 4, shape).whole());
  REQUIRE(forward_team(cut, 1000, 4, shape).ranks());
}

TEST_CASE("lists have room for what is attended whole", "[plan][dense]") {
  const PolicySpec cut = parse_policy("sluice | dense=0,until=1000");
  const RowShape shape = row_shape(kModel, 16);
  const ForwardNeeds needs = forward_needs(cut, 100'000, shape);
  REQUIRE(needs.window == 1000);
  REQUIRE(!needs.bucket.unbounded);
  const ForwardLimits enough{.shape = shape, .max_window = 1000};
  REQUIRE(forward_unserved(cut, needs.bucket, enough).empty());
  const ForwardLimits less{.shape = shape, .max_window = 999};
  REQUIRE(forward_unserved(cut, needs.bucket, less).find("max_window is 999") != std::string::npos);
  REQUIRE(forward_unserved(cut, {.unbounded = true}, less).empty());
}

TEST_CASE("the length is part of a policy's text", "[plan][dense][policy]") {
  const PolicySpec cut = parse_policy("quest | dense=2,every=3,until=500");
  REQUIRE(cut.dense_layers == 2);
  REQUIRE(cut.dense_every == 3);
  REQUIRE(cut.dense_tokens == 500);
  PolicySpec again = parse_policy(to_string(cut));
  again.name = cut.name;
  REQUIRE(again == cut);
  // Policies that the CPU chooses for see every token; others have nothing to choose.
  for (const char* policy : {"lfps", "topk", "psa", "full", "streaming", "clusters | int4 | fitted=0.9"}) {
    CAPTURE(policy);
    REQUIRE(complaint(std::string(policy) + " | dense=0,until=500").find("drop until") != std::string::npos);
  }
}
