// A model whose attention is planned forwards of an Engine, on the host.
#include "tests/support/data.hpp"
#include "tests/tools/llama_engine_cases.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tools/llama/tasks.hpp"

using namespace sluice;
using namespace sluice::tools;
using sluice::test::check_golden_on_engine;

namespace {

const Model& testbed_model() {
  static const Model model(test::testbed(), {.threads = 2});
  return model;
}

/// The short prompt and one of the two long ones, by turns: the model reads a long one for seconds.
std::vector<test::GoldenCase> some_golden_cases(std::size_t turn) {
  const auto cases = test::golden_cases();
  return {cases.at(0), cases.at(1 + turn % 2)};
}

}  // namespace

TEST_CASE("the golden tokens come out of planned forwards", "[llama][golden][engine]") {
  struct Case {
    std::size_t turn;
    const char* policy;
    std::uint32_t chunk;
    std::uint32_t page_tokens;
    std::uint64_t near_bytes;
    PlacementMode placement;
  };
  constexpr PlacementMode hybrid = PlacementMode::hybrid, stream = PlacementMode::stream;
  const auto& [turn, policy, chunk, page_tokens, near_bytes, placement] =
      GENERATE(values<Case>({{0, "full", 2048, 16, 0, stream},
                             {1, "full", 100, 64, 64 * MiB, hybrid},
                             {0, "exact | int4 | top_k=all | near=0", 100, 16, 2 * MiB, hybrid},
                             {1, "exact | int4 | top_k=all | near=0", 2048, 64, 0, stream},
                             {0, "exact | int4 | top_p=1 | near=0", 300, 32, 2 * MiB, stream},
                             {1, "exact | top_k=all | near=0", 300, 16, 2 * MiB, hybrid},
                             {0, "infinigen:alpha=1000,most=100% | dense=1", 300, 16, 2 * MiB, hybrid},
                             {1, "history+exact | top_k=all | near=0,sinks=4,recent=8", 100, 32, 0, stream}}));
  EngineOptions options = test::engine_options(testbed_model(), DType::f32, chunk);
  options.largest.rehearsed = parse_policy(policy).rehearsed;
  options.page_tokens = page_tokens;
  options.near_bytes = near_bytes;
  options.placement = placement;
  check_golden_on_engine(testbed_model(), nullptr, options, policy, 2e-3f, some_golden_cases(turn));
}

TEST_CASE("an imported prompt decodes as the prefilled one did", "[llama][engine]") {
  // With chunks of 100 tokens the recorded queries span some.
  struct Case {
    const char* policy;
    DType dtype;
    std::uint32_t chunk;
  };
  const auto& [policy, dtype, chunk] = GENERATE(values<Case>({{"full", DType::bf16, 512},
                                                              {"streaming", DType::bf16, 100},
                                                              {"lfps", DType::bf16, 100},
                                                              {"sluice", DType::f32, 100},
                                                              {"infinigen", DType::bf16, 100}}));
  EngineOptions options = test::engine_options(testbed_model(), dtype, chunk);
  options.largest.rehearsed = parse_policy(policy).rehearsed;
  CAPTURE(policy, options.largest.prefill_rows, to_string(options.kv_dtype));
  test::check_imported(testbed_model(), nullptr, options, policy, 1e-3f);
}

TEST_CASE("a batch decodes as its sessions alone would", "[llama][engine]") {
  test::check_batch(testbed_model(), nullptr, test::engine_options(testbed_model(), DType::f32, 2048), 1);
}

TEST_CASE("a batch that cannot be is refused, and changes nothing", "[llama][engine]") {
  EngineOptions options = test::engine_options(testbed_model(), DType::f32, 64);
  options.largest.decode_rows = 2;
  sluice::Engine engine(options, nullptr);
  EngineSession one(testbed_model(), engine, nullptr, parse_policy("full"));
  EngineSession two(testbed_model(), engine, nullptr, parse_policy("full"));
  EngineSession three(testbed_model(), engine, nullptr, parse_policy("full"));
  const auto refused = [&](std::vector<EngineSession*> batch, std::vector<int> tokens) {
    return test::failure_of([&] { decode_batch(batch, tokens); }).code == Errc::invalid_argument;
  };
  CHECK(refused({&one, &two}, {'a', 'b'}));  // Without prompts.
  for (EngineSession* session : {&one, &two, &three}) session->prefill(std::vector<int>{256, 'a', 'b'});
  CHECK(refused({}, {}));
  CHECK(refused({&one, &one}, {'a', 'b'}));
  CHECK(refused({&one, &two}, {'a'}));
  CHECK(refused({&one, &two}, {'a', 999}));
  CHECK(refused({&one, &two, &three}, {'a', 'b', 'c'}));  // More than the engine has rows.
  decode_batch(std::vector<EngineSession*>{&one, &two}, std::vector<int>{'a', 'b'});
  CHECK(one.tokens() == 4);
  CHECK(two.tokens() == 4);
  CHECK(three.tokens() == 3);
}

TEST_CASE("the testbed answers its tasks under dense attention", "[llama][engine]") {
  sluice::Engine engine(test::engine_options(testbed_model(), DType::bf16, 2048), nullptr);
  for (const Task& task : read_tasks(test::test_data() + "/testbed/tasks.jsonl", testbed_model().config())) {
    EngineSession session(testbed_model(), engine, nullptr, parse_policy("full"));
    session.prefill(task.prompt);
    CAPTURE(task.name, task.length);
    CHECK(is_right(task, test::decode_greedily(session, task.answer.size())));
  }
}

TEST_CASE("progress counts every prompt token once", "[llama][engine]") {
  sluice::Engine engine(test::engine_options(testbed_model(), DType::f32, 100), nullptr);
  EngineSession session(testbed_model(), engine, nullptr, parse_policy("full"));
  std::vector<std::uint32_t> done;
  session.prefill(std::vector<int>(250, 'a'), [&](std::uint32_t tokens, std::uint32_t total) {
    done.push_back(tokens);
    CHECK(total == 250);
  });
  CHECK(done == std::vector<std::uint32_t>{100, 200, 250});
}

TEST_CASE("the golden tokens come out of a prompt whose blocks were chosen to hold all attention",
          "[llama][golden][engine]") {
  const std::uint32_t chunk = GENERATE(300u, 2048u);
  EngineOptions options = test::engine_options(testbed_model(), DType::f32, chunk);
  options.prefill = {.mode = PrefillMode::flexprefill, .flex = {.gamma = 1.f, .min_budget = 128}};
  check_golden_on_engine(testbed_model(), nullptr, options, "full", 2e-3f, some_golden_cases(chunk == 300));
}

TEST_CASE("a session that ran out of host memory ends, and its engine goes on", "[llama][engine]") {
  EngineOptions options = test::engine_options(testbed_model(), DType::f32, 2048);
  options.host_bytes = 8 * MiB;  // 8 layers, 2 KV heads, 2 * 64 floats: 1,024 tokens
  sluice::Engine engine(options, nullptr);
  {
    EngineSession session(testbed_model(), engine, nullptr, parse_policy("full"));
    CHECK(test::failure_of([&] { session.prefill(std::vector<int>(2000, 'a')); }).code == Errc::out_of_capacity);
    CHECK(session.tokens() == 0);
  }
  EngineSession next(testbed_model(), engine, nullptr, parse_policy("full"));
  next.prefill(std::vector<int>(500, 'a'));
  next.decode('a');
  CHECK(next.tokens() == 501);
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
