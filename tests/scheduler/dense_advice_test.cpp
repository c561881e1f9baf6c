// Lengths up to which everything is attended, as advised.
#include "scheduler/plan/dense_advice.hpp"

#include <string>

#include "sluice/policy.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::scheduler;

namespace {

constexpr AttentionShape kModel{.layers = 4, .q_heads = 32, .kv_heads = 8, .head_dim = 128};

std::uint32_t advised(const std::string& policy, const AttentionShape& shape = kModel, DType dtype = DType::bf16) {
  return dense_tokens_of_cpu(parse_policy(policy), shape, dtype);
}

}  // namespace

TEST_CASE("short sequences are advised to be attended whole, longer ones the more heads share keys", "[plan][dense]") {
  const std::string few = "exact | int4 | top_k=64";
  const std::uint32_t tokens = advised(few);
  REQUIRE(tokens >= 128 + 4 + 4 * 64);  // Which would all be attended anyway.
  REQUIRE(tokens < 4096);
  REQUIRE(advised("exact | int4 | top_k=256") > tokens);
  REQUIRE(advised("exact | int4 | sample=256") == advised("exact | int4 | top_k=256"));
  REQUIRE(advised("exact | int4 | top_k=16 | near=0,sinks=0,recent=16") < tokens);
  REQUIRE(advised(few, {.layers = 4, .q_heads = 64, .kv_heads = 8, .head_dim = 128}) > tokens);
  // Half as much to read of a row, and as many rows to estimate.
  REQUIRE(advised(few, {.layers = 4, .q_heads = 32, .kv_heads = 8, .head_dim = 64}) > tokens);
  REQUIRE(advised(few, kModel, DType::fp8_e4m3) > tokens);
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

TEST_CASE("a device attends whole what it reads while it would choose", "[plan][dense]") {
  const PageLayout near{.head_dim = 128, .dtype = DType::bf16};
  REQUIRE(dense_tokens_of_device(kModel, near, 0.0, 1) == 0);  // Without a rate there is no advice.
  const std::uint32_t tokens = dense_tokens_of_device(kModel, near, 4096.0, 1);
  REQUIRE(tokens == 40'000);  // 4 KiB each, in 40 us.
  REQUIRE(dense_tokens_of_device(kModel, near, 2048.0, 1) == tokens / 2);
  REQUIRE(dense_tokens_of_device({.layers = 4, .q_heads = 32, .kv_heads = 4, .head_dim = 128}, near, 4096.0, 1) ==
          2 * tokens);
  REQUIRE(dense_tokens_of_device(kModel, near, 1e9, 1) == kMostDenseTokens);
}

TEST_CASE("each of many sequences is attended whole up to where choosing for all pays", "[plan][dense]") {
  const PageLayout near{.head_dim = 128, .dtype = DType::bf16};
  std::uint32_t fewer = dense_tokens_of_device(kModel, near, 4096.0, 1);
  for (const std::uint32_t rows : {2u, 16u, 64u, 1024u}) {
    CAPTURE(rows);
    const std::uint32_t tokens = dense_tokens_of_device(kModel, near, 4096.0, rows);
    REQUIRE(tokens < fewer);
    REQUIRE(tokens >= 7'200);  // What a list takes to choose, however many there are.
    fewer = tokens;
  }
}
