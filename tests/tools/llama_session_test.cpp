#include <string>
#include <vector>

#include "sluice/runtime.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_decode.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tools/llama/sampler.hpp"
#include "tools/llama/session.hpp"
#include "tools/llama/tasks.hpp"
#include "tools/llama/tokenizer.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::decode_greedily;
using sluice::test::failure_of;
using sluice::test::GoldenCase;
using sluice::test::max_abs_diff;

/// One model for all tests: loading it is most of their time.
const Model& testbed_model() {
  static const Model model(test::testbed(), {.threads = 2});
  return model;
}

/// Room for two prompts of 2,048 tokens in float32.
RuntimeOptions golden_options() {
  RuntimeOptions options;
  options.shape = testbed_model().config().shape();
  options.kv_dtype = DType::f32;
  options.host_bytes = 64 * MiB;
  options.near_bytes = 64 * MiB;
  options.threads = 2;
  options.pin_threads = false;
  return options;
}

/// Prefills and decodes every golden prompt; the same tokens and logits must come out however KV is kept.
void check_golden(const RuntimeOptions& options, const std::string& policy, const PrefillSpec& prefill = {}) {
  Runtime runtime(options);
  const auto cases = test::golden_cases();
  REQUIRE(cases.size() == 3);
  for (const GoldenCase& golden : cases) {
    CAPTURE(golden.prompt.size(), policy, options.page_tokens, options.prefill_chunk, to_string(options.placement));
    Session session(testbed_model(), runtime, parse_policy(policy), prefill);
    session.prefill(golden.prompt);
    CHECK(session.tokens() == golden.prompt.size());
    CHECK(max_abs_diff(session.logits(), golden.logits) < 2e-3f);
    CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
    CHECK(session.tokens() == golden.prompt.size() + golden.greedy.size() - 1);
  }
}

/// The golden prompts, prefilled once for all tests that are about decoding.
const std::vector<PromptCache>& golden_prompts() {
  static const std::vector<PromptCache> prompts = [] {
    Runtime runtime(golden_options());
    std::vector<PromptCache> recorded;
    for (const GoldenCase& golden : test::golden_cases()) {
      Session session(testbed_model(), runtime, parse_policy("full"));
      session.prefill(golden.prompt, {}, &recorded.emplace_back());
    }
    return recorded;
  }();
  return prompts;
}

}  // namespace

TEST_CASE("the golden tokens come out at every page size and placement", "[llama][golden][session]") {
  RuntimeOptions options = golden_options();
  options.page_tokens = GENERATE(16u, 32u, 64u);
  options.placement =
      GENERATE(PlacementMode::hybrid, PlacementMode::stream, PlacementMode::near, PlacementMode::automatic);
  check_golden(options, "full");
}

TEST_CASE("the golden tokens come out of a prompt whose blocks were chosen to hold all attention",
          "[llama][golden][session]") {
  RuntimeOptions options = golden_options();
  options.prefill_chunk = GENERATE(300u, 512u, 4096u);
  check_golden(options, "full", {.mode = PrefillMode::flexprefill, .flex = {.gamma = 1.f, .min_budget = 128}});
}

TEST_CASE("the golden tokens come out at every near share and near pool", "[llama][golden][session]") {
  RuntimeOptions options = golden_options();
  options.page_tokens = GENERATE(16u, 64u);
  options.placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  options.near_bytes = GENERATE(4 * MiB, 12 * MiB, 64 * MiB);
  const char* policy = GENERATE("full:near=0", "full:near=1%", "full:near=10%", "full:near=50%", "full:near=100%");
  const auto cases = test::golden_cases();
  REQUIRE(golden_prompts().size() == 3);
  Runtime runtime(options);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    CAPTURE(i, policy, options.page_tokens, options.near_bytes, to_string(options.placement));
    Session session(testbed_model(), runtime, parse_policy(policy));
    session.import_prompt(golden_prompts()[i]);
    CHECK(max_abs_diff(session.logits(), cases[i].logits) < 2e-3f);
    CHECK(decode_greedily(session, cases[i].greedy.size()) == cases[i].greedy);
    const Stats stats = session.stats();
    CHECK(stats.attended_tokens == stats.dense_tokens);
  }
}

TEST_CASE("chunk size and promotion change no golden token", "[llama][golden][session]") {
  RuntimeOptions options = golden_options();
  options.prefill_chunk = GENERATE(100u, 4096u);
  options.promote_pages = GENERATE(0u, 64u);
  check_golden(options, "full:near=20%");
}

TEST_CASE("an imported prompt decodes as the prefilled one did", "[llama][session]") {
  RuntimeOptions options = golden_options();
  options.kv_dtype = GENERATE(DType::f32, DType::bf16);
  options.prefill_chunk = GENERATE(100u, 512u);  // 100: the recorded queries span chunks
  const char* policy = GENERATE("full", "streaming", "topk", "lfps", "sluice");
  const GoldenCase golden = test::golden_cases().at(1);
  CAPTURE(policy, options.prefill_chunk, to_string(options.kv_dtype));

  PromptCache prompt;
  std::vector<int> expected;
  std::vector<float> last_logits;
  {
    Runtime runtime(options);
    Session session(testbed_model(), runtime, parse_policy(policy));
    session.prefill(golden.prompt, {}, &prompt);
    expected = decode_greedily(session, 8);
    last_logits.assign(session.logits().begin(), session.logits().end());
  }
  CHECK(prompt.tokens() == golden.prompt.size());
  CHECK(std::vector<int>(prompt.ids().begin(), prompt.ids().end()) == golden.prompt);

  Runtime runtime(options);
  Session session(testbed_model(), runtime, parse_policy(policy));
  session.import_prompt(prompt);
  CHECK(session.tokens() == golden.prompt.size());
  CHECK(max_abs_diff(session.logits(), prompt.logits()) == 0.f);
  CHECK(decode_greedily(session, 8) == expected);
  CHECK(max_abs_diff(session.logits(), last_logits) < 1e-3f);
}

TEST_CASE("a batch decodes as its sessions alone would", "[llama][session]") {
  Runtime runtime(golden_options());
  const auto cases = test::golden_cases();
  std::vector<Session> sessions;
  std::vector<Session*> batch;
  std::vector<int> tokens;
  std::vector<std::vector<int>> outputs(cases.size());
  for (const GoldenCase& golden : cases) {
    auto& session = sessions.emplace_back(testbed_model(), runtime, parse_policy("full"));
    session.prefill(golden.prompt);
  }
  for (Session& session : sessions) batch.push_back(&session);
  tokens.resize(batch.size());
  for (std::size_t step = 0; step < cases.front().greedy.size(); ++step) {
    for (std::size_t i = 0; i < batch.size(); ++i) outputs[i].push_back(tokens[i] = argmax(batch[i]->logits()));
    decode_batch(batch, tokens);
  }
  for (std::size_t i = 0; i < cases.size(); ++i) CHECK(outputs[i] == cases[i].greedy);
}

TEST_CASE("the testbed answers needle and key-value tasks under dense attention", "[llama][session]") {
  RuntimeOptions options = golden_options();
  options.kv_dtype = DType::bf16;
  Runtime runtime(options);
  for (const TaskKind kind : {TaskKind::niah, TaskKind::niah_long, TaskKind::multikey, TaskKind::kv}) {
    for (const std::uint64_t seed : {1u, 2u}) {
      const Task task = make_task(kind, 2048, seed);
      Session session(testbed_model(), runtime, parse_policy("full"));
      session.prefill(ByteTokenizer::encode(task.prompt));
      const std::string output = ByteTokenizer::decode(decode_greedily(session, task.answer.size()));
      CAPTURE(to_string(kind), seed, task.answer, output);
      CHECK(solved(task, output));
    }
  }
}

TEST_CASE("progress counts every prompt token once", "[llama][session]") {
  RuntimeOptions options = golden_options();
  options.prefill_chunk = 100;
  Runtime runtime(options);
  Session session(testbed_model(), runtime, parse_policy("full"));
  std::vector<std::uint32_t> done;
  session.prefill(std::vector<int>(250, 'a'), [&](std::uint32_t tokens, std::uint32_t total) {
    done.push_back(tokens);
    CHECK(total == 250);
  });
  CHECK(done == std::vector<std::uint32_t>{100, 200, 250});
}

TEST_CASE("a session frees its sequence, a moved-from one does not", "[llama][session]") {
  Runtime runtime(golden_options());
  const std::uint32_t free_pages = runtime.info().host_pages_free;
  {
    Session session(testbed_model(), runtime, parse_policy("full"));
    session.prefill(std::vector<int>(100, 'a'));
    Session moved(std::move(session));
    CHECK(moved.tokens() == 100);
    moved.decode('b');
    CHECK(runtime.info().host_pages_free < free_pages);
    CHECK(failure_of([&] { session.decode('b'); }).code == Errc::invalid_argument);
  }
  CHECK(runtime.info().host_pages_free == free_pages);
}

TEST_CASE("calls out of order or range are refused and change nothing", "[llama][session]") {
  Runtime runtime(golden_options());
  const auto refused = [](const auto& call) { return failure_of(call).code == Errc::invalid_argument; };
  Session session(testbed_model(), runtime, parse_policy("full"));
  PromptCache prompt;
  CHECK(refused([&] { session.decode('a'); }));
  CHECK(refused([&] { session.prefill({}); }));
  CHECK(refused([&] { session.prefill(std::vector<int>{256, 320}); }));
  CHECK(refused([&] { session.prefill(std::vector<int>{-1}); }));
  CHECK(refused([&] { session.prefill(std::vector<int>(32769, 'a')); }));
  CHECK(refused([&] { session.import_prompt(prompt); }));
  CHECK(session.tokens() == 0);
  CHECK(session.logits().empty());

  const std::vector<int> text = {256, 'a', 'b'};
  session.prefill(text, {}, &prompt);
  CHECK(prompt.complete());
  CHECK(refused([&] { session.prefill(text, {}, &prompt); }));
  CHECK(refused([&] { session.import_prompt(prompt); }));
  CHECK(refused([&] { session.decode(320); }));
  session.prefill(text);  // without a recording, a prompt may come in parts
  CHECK(session.tokens() == 6);
  session.decode('c');
  CHECK(refused([&] { session.prefill(text); }));
  CHECK(session.tokens() == 7);

  Session other(testbed_model(), runtime, parse_policy("full"));
  other.prefill(text);
  const std::vector<Session*> twice = {&session, &session};
  const std::vector<Session*> both = {&session, &other};
  const std::vector<int> two = {'a', 'b'};
  CHECK(refused([&] { decode_batch(twice, two); }));
  CHECK(refused([&] { decode_batch(both, std::vector<int>{'a'}); }));
  CHECK(refused([&] { decode_batch(both, std::vector<int>{'a', 999}); }));
  decode_batch(both, two);
  CHECK(session.tokens() == 8);
  CHECK(other.tokens() == 4);

  RuntimeOptions shape = golden_options();
  shape.shape.layers = 4;
  Runtime wrong(shape);
  CHECK(refused([&] { const Session misfit(testbed_model(), wrong, parse_policy("full")); }));
}

TEST_CASE("a session that ran out of host memory refuses further work, its runtime goes on", "[llama][session]") {
  RuntimeOptions options = golden_options();
  options.host_bytes = 8 * MiB;  // 8 layers, 2 KV heads, 2 * 64 floats: 1,024 tokens
  options.near_bytes = 8 * MiB;
  Runtime runtime(options);
  {
    Session session(testbed_model(), runtime, parse_policy("full"));
    CHECK(failure_of([&] { session.prefill(std::vector<int>(2000, 'a')); }).code == Errc::out_of_capacity);
    CHECK(failure_of([&] { session.decode('a'); }).code == Errc::invalid_argument);
  }
  Session next(testbed_model(), runtime, parse_policy("full"));
  next.prefill(std::vector<int>(500, 'a'));
  next.decode('a');
  CHECK(next.tokens() == 501);
}
