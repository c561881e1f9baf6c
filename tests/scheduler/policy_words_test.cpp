// Policies that were built in code: all that is read of one is in its words.
#include <cmath>
#include <random>

#include "scheduler/policy/text.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/random_policy.hpp"

using namespace sluice;

TEST_CASE("whatever valid policy is built in code, what is read of it comes back from its words", "[policy_text]") {
  std::mt19937 rng(11);
  for (int i = 0; i < 3000; ++i) {
    const PolicySpec spec = test::random_policy(rng);
    CAPTURE(i, to_string(spec));
    PolicySpec again = parse_policy(to_string(spec));
    again.name = spec.name;
    REQUIRE(again == scheduler::what_is_read(spec));
  }
}

TEST_CASE("a share of pages stands beside a budget of tokens, and local tokens beside a bypass", "[policy_text]") {
  PolicySpec spec = parse_policy("pages:budget=64 | top_k=all");
  spec.pages.share = 0.5f;
  REQUIRE(to_string(spec) == "pages:budget=64,share=50% | top_k=all | near=0%,sinks=4,recent=128");
  REQUIRE(parse_policy("quest:budget=64,share=50%").pages.share == 0.5f);
  spec = parse_policy("exact | top_k=8 | bypass=sink:0.5,local=9");
  REQUIRE(spec.history.local_tokens == 9);
  REQUIRE(to_string(spec) == "exact | top_k=8 | near=0%,sinks=4,recent=128 | bypass=sink:0.5,local=9");
  REQUIRE(parse_policy("exact | top_k=8 | bypass=off,local=9").history == HistoryOptions{});
  spec = parse_policy("lfps:variance=off,growth=0.5");
  REQUIRE(std::isinf(spec.bypass_guards.variance));
  REQUIRE(spec.bypass_guards.growth == 0.5f);
  REQUIRE(to_string(spec).ends_with("| bypass=sink:0.85,variance=off,growth=0.5"));
  REQUIRE(parse_policy("exact | top_k=8 | bypass=0.5,variance=6,growth=1").bypass_guards == BypassGuards{});
  REQUIRE(parse_policy("exact | top_k=8 | bypass=off,growth=7").bypass_guards == BypassGuards{});
  spec = parse_policy("none");
  spec.near.share = -0.f;
  REQUIRE(parse_policy(to_string(spec)).near == spec.near);
}
