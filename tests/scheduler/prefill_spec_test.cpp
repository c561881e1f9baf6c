// Specs of prefill, the geometry of its blocks, and their text.

#include <limits>
#include <string>

#include "sluice/prefill.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tests/scheduler/complaints.hpp"

using namespace sluice;
using scheduler::test::complaint_of;
using scheduler::test::expect;

namespace {

std::string refusal(const FlexPrefillSpec& flex) {
  return complaint_of([&] { validate(PrefillSpec{.mode = PrefillMode::flexprefill, .flex = flex}); });
}

}  // namespace

TEST_CASE("prefill modes are parsed and named", "[scheduler][prefill]") {
  for (const PrefillMode mode : {PrefillMode::full, PrefillMode::flexprefill, PrefillMode::automatic,
                                 PrefillMode::streaming, PrefillMode::minference}) {
    REQUIRE(parse_prefill_mode(to_string(mode)) == mode);
  }
  REQUIRE(parse_prefill_mode("auto") == PrefillMode::automatic);
  for (const char* wrong : {"", "Full", "automatic", "flexprefill ", "dense"}) {
    CAPTURE(wrong);
    const std::string quoted = '"' + std::string(wrong) + '"';
    expect(complaint_of([&] { (void)parse_prefill_mode(wrong); }),
           {quoted.c_str(), "full, flexprefill, auto, streaming, minference"});
  }
}

TEST_CASE("a prefill spec in range is valid", "[scheduler][prefill]") {
  REQUIRE(refusal({}).empty());
  REQUIRE(refusal({.gamma = 1.f, .tau = 1.f, .min_budget = 0}).empty());
  REQUIRE(refusal({.gamma = std::numeric_limits<float>::min(), .tau = 0.f}).empty());
  REQUIRE(refusal({.min_budget = 512, .max_budget = 512}).empty());
  REQUIRE(refusal({.min_budget = 4'000'000'000u}).empty());
  validate(PrefillSpec{});
}

TEST_CASE("a prefill spec out of range is refused by the name of its field", "[scheduler][prefill]") {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float gamma : {0.f, -0.5f, 1.001f, kNan}) {
    CAPTURE(gamma);
    expect(refusal({.gamma = gamma}), {"gamma is ", "(0, 1]"});
  }
  for (const float tau : {-0.01f, 1.5f, kNan}) {
    CAPTURE(tau);
    expect(refusal({.tau = tau}), {"tau is ", "[0, 1]"});
  }
  expect(refusal({.min_budget = 1'024, .max_budget = 512}),
         {"max_budget of 512 tokens is less than min_budget of 1024", "raise it"});
  // The first field that breaks its range is the one that is named.
  expect(refusal({.gamma = 0.f, .tau = 9.f}), {"gamma"});
}

TEST_CASE("patterns of MInference are parsed, and sizes of windows checked", "[scheduler][prefill]") {
  for (const HeadPattern pattern :
       {HeadPattern::vertical_slash, HeadPattern::a_shape, HeadPattern::block_sparse, HeadPattern::best})
    REQUIRE(parse_head_pattern(to_string(pattern)) == pattern);
  expect(complaint_of([] { (void)parse_head_pattern("slash"); }),
         {"\"slash\"", "vertical_slash, a_shape, block_sparse, best"});
  const auto refused = [](PrefillSpec spec) { return complaint_of([&] { validate(spec); }); };
  expect(refused({.mode = PrefillMode::streaming, .streaming = {.window = 0}}), {"streaming: window is 0"});
  expect(refused({.mode = PrefillMode::minference, .minference = {.a_shape = {.window = 0}}}),
         {"a_shape: window is 0"});
  expect(refused({.mode = PrefillMode::minference, .minference = {.blocks = 0}}), {"blocks is 0"});
  expect(refused({.mode = PrefillMode::minference, .minference = {.pattern = static_cast<HeadPattern>(9)}}),
         {"pattern is 9"});
  REQUIRE(refused({.mode = PrefillMode::streaming, .streaming = {.sinks = 0, .window = 1}}).empty());
}

TEST_CASE("a window touches the blocks of its oldest token's query", "[scheduler][prefill]") {
  STATIC_REQUIRE(window_offsets(1) == 1);
  STATIC_REQUIRE(window_offsets(2) == 2);
  STATIC_REQUIRE(window_offsets(129) == 2);
  STATIC_REQUIRE(window_offsets(130) == 3);
  REQUIRE(dense_prompt_tokens({}) == std::numeric_limits<std::uint32_t>::max());
  REQUIRE(dense_prompt_tokens({.mode = PrefillMode::flexprefill, .flex = {.min_budget = 512}}) == 512);
  REQUIRE(dense_prompt_tokens({.mode = PrefillMode::streaming}) == kPrefillBlock);
}

TEST_CASE("blocks of a chunk lie on the grid of positions", "[scheduler][prefill]") {
  STATIC_REQUIRE(prefill_blocks(0, 0) == 0);
  STATIC_REQUIRE(prefill_blocks(500, 0) == 0);
  STATIC_REQUIRE(prefill_blocks(0, 1) == 1);
  STATIC_REQUIRE(prefill_blocks(0, 128) == 1);
  STATIC_REQUIRE(prefill_blocks(0, 129) == 2);
  STATIC_REQUIRE(prefill_blocks(127, 2) == 2);
  STATIC_REQUIRE(prefill_blocks(127, 1) == 1);
  STATIC_REQUIRE(prefill_blocks(100, 300) == 4);
  STATIC_REQUIRE(prefill_mask_words(0) == 0);
  STATIC_REQUIRE(prefill_mask_words(1) == 1);
  STATIC_REQUIRE(prefill_mask_words(32 * 128) == 1);
  STATIC_REQUIRE(prefill_mask_words(32 * 128 + 1) == 2);
  for (std::uint32_t first = 0; first < 400; first += 7) {
    for (std::uint32_t count = 1; count < 400; count += 11) {
      std::uint32_t touched = 1;
      for (std::uint32_t i = first + 1; i < first + count; ++i) touched += i % kPrefillBlock == 0 ? 1u : 0u;
      REQUIRE(prefill_blocks(first, count) == touched);
    }
  }
}
