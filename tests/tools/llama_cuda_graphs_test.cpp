// Forwards that decode, replayed from graphs, against the same ones enqueued.
#include <memory>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/tools/llama_cuda_support.hpp"
#include "tests/tools/llama_decode.hpp"
#include "tests/tools/llama_engine_cases.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tools/llama/engine_session.hpp"
#include "tools/llama/sampler.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::decode_greedily;
using sluice::test::golden_cases;
using sluice::test::GoldenCase;
using sluice::test::max_abs_diff;

constexpr float kTolerance = 0.08f;

const Model& testbed_model() {
  static const Model model(test::testbed(), {.threads = 1, .device = test::gpu()});
  return model;
}

EngineOptions options_of(std::uint32_t rows = 1) {
  EngineOptions options = test::engine_options(testbed_model(), DType::bf16, 512);
  options.largest.decode_rows = rows;
  options.host_bytes = 512 * MiB;
  return options;
}

std::shared_ptr<Runner> runner_of(sluice::Engine& engine, Graphs graphs) {
  return std::make_shared<Runner>(testbed_model(), engine, test::gpu(), graphs);
}

struct Decoded {
  std::vector<int> tokens;
  std::vector<float> logits;
  std::uint64_t replays = 0;
};

Decoded decoded(const EngineOptions& options, const std::string& policy, std::size_t count, Graphs graphs) {
  sluice::Engine engine(options, test::gpu());
  const auto runner = runner_of(engine, graphs);
  EngineSession session(runner, parse_policy(policy));
  session.prefill(golden_cases().at(1).prompt);
  Decoded all{.tokens = decode_greedily(session, count), .logits = {}, .replays = runner->replays()};
  all.logits.assign(session.logits().begin(), session.logits().end());
  return all;
}

}  // namespace

TEST_CASE("graphs decode what enqueued forwards do, while the sequence grows by pages", "[llama][gpu][graphs]") {
  EngineOptions options = options_of();
  options.near_bytes = GENERATE(0u, 2u) * MiB;
  const std::string policy = GENERATE("full", "sluice", "lfps", "quest");
  options.policies.push_back(parse_policy(policy));
  const Decoded want = decoded(options, policy, 70, Graphs::off);
  const Decoded got = decoded(options, policy, 70, Graphs::on);
  CAPTURE(policy, options.near_bytes);
  CHECK(want.replays == 0);
  CHECK(got.replays == 68);  // Of 69, but the first.
  CHECK(got.tokens == want.tokens);
  CHECK(max_abs_diff(got.logits, want.logits) < kTolerance);
}

TEST_CASE("the golden tokens come out of graphs, all but the first decoded one, and the likeliest are of the logits",
          "[llama][golden][gpu][graphs]") {
  sluice::Engine engine(options_of(), test::gpu());
  const auto runner = runner_of(engine, Graphs::automatic);
  REQUIRE(runner->graphs());
  std::uint64_t decodes = 0;
  for (const GoldenCase& golden : golden_cases()) {
    EngineSession session(runner, parse_policy("full"));
    session.prefill(golden.prompt);
    std::vector<int> tokens;
    while (tokens.size() < golden.greedy.size()) {
      tokens.push_back(session.best());
      CHECK(session.best() == argmax(session.logits()));
      session.decode(tokens.back());
      ++decodes;
    }
    CHECK(tokens == golden.greedy);
  }
  // Longer prompts make the buffers anew, and the graphs with them.
  CHECK(runner->replays() + golden_cases().size() >= decodes);
  CHECK(runner->replays() < decodes);
}

TEST_CASE("forwards of as many rows that attend otherwise have graphs of their own", "[llama][gpu][graphs]") {
  const auto stream = test::gpu()->create_stream("test");
  Activations work;
  work.stream = stream.get();
  std::uint32_t layers = 0;
  const auto attend = [&](const AttentionCall&) { ++layers; };
  // How many layers were enqueued, or captured.
  const auto decode = [&](std::uint32_t variant) {
    const PlacedToken token{.token = 1, .position = 0};
    Likeliest best;
    work.variant = variant;
    layers = 0;
    testbed_model().decode({&token, 1}, attend, work, Launch::graph);
    testbed_model().likeliest(work, {&best, 1});
    return layers;
  };
  const std::uint32_t all = testbed_model().config().num_hidden_layers;
  for (const std::uint32_t variant : {0u, 512u}) {
    CAPTURE(variant);
    CHECK(decode(variant) == all);
    CHECK(decode(variant) == all);  // Captured, and replayed from now on.
    CHECK(decode(variant) == 0);
  }
  CHECK(decode(0) == 0);
  CHECK(work.replays == 5);
}

TEST_CASE("two sessions that share graphs take turns, and keep their logits", "[llama][gpu][graphs]") {
  const auto cases = golden_cases();
  sluice::Engine engine(options_of(2), test::gpu());
  const auto runner = runner_of(engine, Graphs::on);
  EngineSession one(runner, parse_policy("full"));
  EngineSession two(runner, parse_policy("sluice"));
  one.prefill(cases[0].prompt);
  two.prefill(cases[1].prompt);
  CHECK(max_abs_diff(one.logits(), cases[0].logits) < kTolerance);  // Asked for when others are in the buffers.
  std::vector<int> tokens_of_one, tokens_of_two;
  for (int step = 0; step < 12; ++step) {
    tokens_of_one.push_back(one.best());
    one.decode(tokens_of_one.back());
    tokens_of_two.push_back(two.best());
    two.decode(tokens_of_two.back());
    CHECK(one.best() == argmax(one.logits()));
  }
  CHECK(runner->replays() >= 20);
  const std::vector<int>& greedy = cases[0].greedy;
  const std::size_t same = std::min(greedy.size(), tokens_of_one.size());
  CHECK(std::vector<int>(tokens_of_one.begin(), tokens_of_one.begin() + static_cast<std::ptrdiff_t>(same)) ==
        std::vector<int>(greedy.begin(), greedy.begin() + static_cast<std::ptrdiff_t>(same)));
}

TEST_CASE("batches of changing size are padded to few graphs, and decode what their sessions would alone",
          "[llama][gpu][graphs]") {
  const auto cases = golden_cases();
  const std::size_t most = 7;
  sluice::Engine engine(options_of(8), test::gpu());
  const auto runner = runner_of(engine, GENERATE(Graphs::on, Graphs::off));
  CHECK(runner->decoding(1).decode_rows == 1);
  CHECK(runner->decoding(3).decode_rows == 4);
  CHECK(runner->decoding(5).decode_rows == 8);
  std::vector<std::unique_ptr<EngineSession>> sessions;
  for (std::size_t i = 0; i < most; ++i) {
    sessions.push_back(std::make_unique<EngineSession>(runner, parse_policy("full")));
    sessions.back()->prefill(cases[i % cases.size()].prompt);
  }
  std::vector<std::vector<int>> outputs(most);
  const auto step = [&](std::size_t count) {
    std::vector<EngineSession*> batch;
    std::vector<int> tokens;
    for (std::size_t i = 0; i < most && batch.size() < count; ++i) {
      if (outputs[i].size() == cases[i % cases.size()].greedy.size()) continue;
      batch.push_back(sessions[i].get());
      outputs[i].push_back(sessions[i]->best());
      tokens.push_back(outputs[i].back());
    }
    if (!batch.empty()) decode_batch(batch, tokens);
    return !batch.empty();
  };
  for (const std::size_t count : {7u, 5u, 6u, 1u, 3u, 2u, 1u, 4u, 7u}) (void)step(count);
  while (step(most)) {
  }
  for (std::size_t i = 0; i < most; ++i) CHECK(outputs[i] == cases[i % cases.size()].greedy);
  CHECK((runner->replays() > 0) == runner->graphs());
}

TEST_CASE("forwards that were cancelled, or had no plan, leave graphs and sequences as they were",
          "[llama][gpu][graphs]") {
  const GoldenCase golden = golden_cases().at(1);
  sluice::Engine engine(options_of(), test::gpu());
  const auto runner = runner_of(engine, Graphs::on);
  EngineSession session(runner, parse_policy("full"));
  session.prefill(golden.prompt);
  std::vector<int> tokens;
  for (std::size_t step = 0; step < golden.greedy.size(); ++step) {
    tokens.push_back(session.best());
    const Bucket bucket = runner->decoding(1);
    const PlanItem item{.sequence = session.sequence()};
    if (step % 3 == 1) engine.cancel(engine.plan({&item, 1}, bucket, runner->stream()));
    if (step % 3 == 2) {  // A replay that nobody planned: NaN, and nothing is appended.
      const std::vector<PlacedToken> placed = {{.token = tokens.back(), .position = session.tokens()}};
      runner->decode(
          placed,
          [&](const AttentionCall& call) {
            engine.attend(bucket, call.layer, call.q, call.k, call.v, call.out, runner->stream());
          },
          bucket);
      CHECK(runner->take(1).front()->best().token == -1);
    }
    session.decode(tokens.back());
  }
  CHECK(tokens == golden.greedy);
  CHECK(session.tokens() == golden.prompt.size() + tokens.size());
}

TEST_CASE("an error while a forward is captured passes, and the next forward is enqueued", "[llama][gpu][graphs]") {
  Activations work;
  work.stream = &test::gpu_stream();
  const std::vector<PlacedToken> token = {{256, 0}};
  const auto forward = [&](bool fails) {
    testbed_model().decode(
        token,
        [&](const AttentionCall&) {
          if (fails) throw Error(Errc::timeout, "on purpose");
        },
        work, Launch::graph);
    Likeliest best;
    testbed_model().likeliest(work, {&best, 1});
    return best.token;
  };
  const int want = forward(false);
  CHECK(test::failure_of([&] { (void)forward(true); }).code == Errc::timeout);
  CHECK(forward(false) == want);
  CHECK(work.replays == 0);
}

TEST_CASE("buffers that grow between forwards have new graphs", "[llama][gpu][graphs]") {
  const auto cases = golden_cases();
  sluice::Engine engine(options_of(2), test::gpu());
  const auto runner = runner_of(engine, Graphs::on);
  EngineSession one(runner, parse_policy("full"));
  one.prefill(std::vector<int>(cases[0].prompt.begin(), cases[0].prompt.end()));
  std::vector<int> tokens;
  const auto go_on = [&](std::size_t count) {
    for (std::size_t i = 0; i < count && tokens.size() < cases[0].greedy.size(); ++i) {
      tokens.push_back(one.best());
      one.decode(tokens.back());
    }
  };
  go_on(4);
  CHECK(runner->replays() == 3);
  EngineSession two(runner, parse_policy("full"));
  two.prefill(std::vector<int>(500, 'a'));
  go_on(4);
  CHECK(runner->replays() == 6);
  go_on(cases[0].greedy.size());
  CHECK(tokens == cases[0].greedy);
}

TEST_CASE("tokens that are audited are enqueued, the others are replayed", "[llama][gpu][graphs]") {
  const GoldenCase golden = golden_cases().at(1);
  EngineOptions options = options_of();
  options.largest.audit = true;
  sluice::Engine engine(options, test::gpu());
  const auto runner = runner_of(engine, Graphs::on);
  EngineSession session(runner, parse_policy("full"));
  session.audit_every(4);
  session.prefill(golden.prompt);
  CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
  const std::uint64_t decodes = golden.greedy.size() - 1, audits = (decodes + 3) / 4;
  CHECK(runner->replays() == decodes - audits - 1);
  CHECK(engine.audit(session.sequence()).tokens == audits);
}

TEST_CASE("graphs that are asked for are refused where the calling thread waits", "[llama][gpu][graphs]") {
  EngineOptions options = options_of();
  options.handover = Handover::host;
  sluice::Engine engine(options, test::gpu());
  const auto failure = test::failure_of([&] { (void)runner_of(engine, Graphs::on); });
  CHECK(failure.code == Errc::unsupported);
  CHECK(test::mentions(failure.message, {"handover host", "auto"}));
  const auto runner = runner_of(engine, Graphs::automatic);
  CHECK_FALSE(runner->graphs());
  EngineSession session(runner, parse_policy("full"));
  const GoldenCase golden = golden_cases().at(0);
  session.prefill(golden.prompt);
  CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
  CHECK(runner->replays() == 0);
}
