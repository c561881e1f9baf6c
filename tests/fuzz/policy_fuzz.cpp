// Policies as text: what is accepted is valid, and its description is read back as the same policy.

#include <algorithm>

#include "scheduler/policy/budget.hpp"
#include "sluice/policy.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

bool is_share(double value) { return value >= 0.0 && value <= 1.0; }

void check(const PolicySpec& spec) {
  FUZZ_REQUIRE(!spec.name.empty());
  FUZZ_REQUIRE(accepts([&] { validate(spec); }));
  FUZZ_REQUIRE(unsupported_reasons(spec).empty());
  FUZZ_REQUIRE(is_share(spec.near.share) && is_share(spec.bypass_threshold) && is_share(spec.budget.share));
  FUZZ_REQUIRE(is_share(spec.pages.share) && is_share(spec.history.limit) && spec.budget.mass > 0.f);
  FUZZ_REQUIRE(is_share(spec.far.share));
  constexpr scheduler::RowShape kShape{.q_heads = 12, .kv_heads = 3};
  for (const std::uint32_t n : {0u, 1u, 1000u, 0x7fffffffu}) {
    FUZZ_REQUIRE(scheduler::budget_tokens(spec.budget, n) <= n);
    FUZZ_REQUIRE(scheduler::budget_tokens(spec.budget, n) >= std::min(n, 1u));
    FUZZ_REQUIRE(scheduler::budget_pages(spec.pages, n, 16) <= n);
    FUZZ_REQUIRE(scheduler::far_tokens_per_head(spec.far, n, kShape) <= n);
    FUZZ_REQUIRE(!spec.far.all() || scheduler::far_tokens_per_head(spec.far, n, kShape) == n);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  PolicySpec spec;
  if (!accepts([&] { spec = parse_policy(text_of(data, size)); })) return 0;
  check(spec);
  const std::string words = to_string(spec);
  PolicySpec again = parse_policy(words);
  FUZZ_REQUIRE(to_string(again) == words);
  again.name = spec.name;
  FUZZ_REQUIRE(again == spec);
  return 0;
}
