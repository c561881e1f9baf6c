// A model whose attention is planned forwards of an Engine, on the host.
#include "tests/tools/llama_engine_cases.hpp"
#include "tests/tools/llama_failure.hpp"

using namespace sluice;
using namespace sluice::tools;
using sluice::test::check_golden_on_engine;

namespace {

const Model& testbed_model() {
  static const Model model(test::testbed(), {.threads = 2});
  return model;
}

}  // namespace

TEST_CASE("the golden tokens come out of planned forwards", "[llama][golden][engine]") {
  struct Case {
    const char* policy;
    std::uint32_t chunk;
    std::uint32_t page_tokens;
    std::uint64_t near_bytes;
  };
  const auto& [policy, chunk, page_tokens, near_bytes] =
      GENERATE(values<Case>({{"full", 2048, 16, 0},
                             {"full", 100, 64, 64 * MiB},
                             {"exact | int4 | top_k=all | near=0", 100, 16, 2 * MiB},
                             {"exact | int4 | top_k=all | near=0", 2048, 64, 0},
                             {"exact | int4 | top_p=1 | near=0", 300, 32, 2 * MiB},
                             {"exact | top_k=all | near=0", 300, 16, 2 * MiB},
                             {"history+exact | top_k=all | near=0,sinks=4,recent=8", 100, 32, 0}}));
  EngineOptions options = test::engine_options(testbed_model(), DType::f32, chunk);
  options.page_tokens = page_tokens;
  options.near_bytes = near_bytes;
  check_golden_on_engine(testbed_model(), nullptr, options, policy, 2e-3f);
}

TEST_CASE("a session of an engine refuses calls out of order or range, and changes nothing", "[llama][engine]") {
  const Model& model = testbed_model();
  sluice::Engine engine(test::engine_options(model, DType::f32, 64), nullptr);
  EngineSession session(model, engine, nullptr, parse_policy("full"));
  const auto refused = [&](const auto& call) { return test::failure_of(call).code == Errc::invalid_argument; };
  CHECK(refused([&] { session.decode(1); }));
  CHECK(refused([&] { session.prefill({}); }));
  const std::vector<int> odd{1, -1};
  CHECK(refused([&] { session.prefill(odd); }));
  CHECK(session.tokens() == 0);
  const std::vector<int> prompt{1, 2, 3};
  session.prefill(prompt);
  CHECK(refused([&] { session.decode(-1); }));
  CHECK(session.tokens() == 3);
  session.decode(4);
  CHECK(session.tokens() == 4);

  EngineOptions other = test::engine_options(model, DType::f32, 64);
  other.largest.prefill_rows = other.largest.prefills = 0;
  sluice::Engine decodes(other, nullptr);
  CHECK(refused([&] { EngineSession(model, decodes, nullptr, parse_policy("full")); }));
  other = test::engine_options(model, DType::f32, 64);
  ++other.shape.layers;
  sluice::Engine deeper(other, nullptr);
  CHECK(refused([&] { EngineSession(model, deeper, nullptr, parse_policy("full")); }));
}
