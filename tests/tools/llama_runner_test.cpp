// Sessions that share a runner, and logits that stay in its buffers until they are asked for, on the host.
#include <memory>
#include <optional>

#include "tests/tools/llama_engine_cases.hpp"
#include "tests/tools/llama_failure.hpp"

using namespace sluice;
using namespace sluice::tools;
using sluice::test::failure_of;
using sluice::test::golden_cases;
using sluice::test::max_abs_diff;

namespace {

constexpr float kTolerance = 2e-3f;

const Model& testbed_model() {
  static const Model model(test::testbed(), {.threads = 2});
  return model;
}

EngineOptions options_of(std::uint32_t rows) {
  EngineOptions options = test::engine_options(testbed_model(), DType::f32, 512);
  options.largest.decode_rows = rows;
  return options;
}

std::vector<float> copied(std::span<const float> logits) { return {logits.begin(), logits.end()}; }

}  // namespace

TEST_CASE("logits of a session are its own while others use the buffers", "[llama][engine][runner]") {
  const auto cases = golden_cases();
  sluice::Engine engine(options_of(2), nullptr);
  const auto runner = std::make_shared<Runner>(testbed_model(), engine, nullptr);
  EngineSession one(runner, parse_policy("full"));
  CHECK(one.logits().empty());
  CHECK(failure_of([&] { (void)one.best(); }).code == Errc::invalid_argument);
  one.prefill(cases[0].prompt);
  EngineSession two(runner, parse_policy("full"));
  two.prefill(cases[1].prompt);
  CHECK(max_abs_diff(one.logits(), cases[0].logits) < kTolerance);
  CHECK(max_abs_diff(two.logits(), cases[1].logits) < kTolerance);
  for (std::size_t step = 0; step < 4; ++step) {
    CHECK(one.best() == cases[0].greedy[step]);
    CHECK(two.best() == cases[1].greedy[step]);
    one.decode(cases[0].greedy[step]);
    two.decode(cases[1].greedy[step]);
    CHECK(one.best() == argmax(one.logits()));
  }
  // As with a runner of its own.
  EngineSession alone(testbed_model(), engine, nullptr, parse_policy("full"));
  alone.prefill(cases[0].prompt);
  for (std::size_t step = 0; step < 4; ++step) alone.decode(cases[0].greedy[step]);
  CHECK(max_abs_diff(alone.logits(), one.logits()) == 0.f);
}

TEST_CASE("a fork has its parent's logits, whichever of them goes on", "[llama][engine][runner]") {
  const auto golden = golden_cases().at(0);
  sluice::Engine engine(options_of(1), nullptr);
  std::optional<EngineSession> parent(std::in_place, testbed_model(), engine, nullptr, parse_policy("full"));
  parent->prefill(golden.prompt);
  EngineSession fork(*parent, parse_policy("full"));
  if (GENERATE(false, true)) {
    parent->decode('a');
  } else {
    parent.reset();
  }
  CHECK(fork.best() == golden.greedy.front());
  CHECK(max_abs_diff(fork.logits(), golden.logits) < kTolerance);
  fork.decode(golden.greedy.front());
  CHECK(fork.best() == golden.greedy.at(1));
}

TEST_CASE("logits of a batch outlive its other sessions, and the one whose buffers they are in",
          "[llama][engine][runner]") {
  const auto cases = golden_cases();
  sluice::Engine engine(options_of(2), nullptr);
  auto lead = std::make_unique<EngineSession>(testbed_model(), engine, nullptr, parse_policy("full"));
  EngineSession other(testbed_model(), engine, nullptr, parse_policy("full"));
  lead->prefill(cases[0].prompt);
  other.prefill(cases[1].prompt);
  decode_batch(std::vector<EngineSession*>{lead.get(), &other}, std::vector<int>{lead->best(), other.best()});
  SECTION("which goes on") { lead->decode(lead->best()); }
  SECTION("which ends") { lead.reset(); }
  CHECK(other.best() == cases[1].greedy.at(1));
  CHECK(argmax(other.logits()) == other.best());
}

TEST_CASE("a step that finds no room loses no logits", "[llama][engine][runner]") {
  EngineOptions options = options_of(1);
  options.host_bytes = 8 * MiB;  // 8 layers, 2 KV heads, 2 * 64 floats: 1,024 tokens
  sluice::Engine engine(options, nullptr);
  EngineSession session(testbed_model(), engine, nullptr, parse_policy("full"));
  session.prefill(std::vector<int>(1024, 'a'));
  const bool copied_before = GENERATE(false, true);
  const std::vector<float> before = copied_before ? copied(session.logits()) : std::vector<float>();
  const int best = session.best();
  CHECK(failure_of([&] { session.decode('a'); }).code == Errc::out_of_capacity);
  CHECK(session.best() == best);
  CHECK(argmax(session.logits()) == best);
  if (copied_before) CHECK(max_abs_diff(before, session.logits()) == 0.f);
}

TEST_CASE("graphs are refused on the CPU, and left out where nobody insists", "[llama][runner]") {
  sluice::Engine engine(options_of(3), nullptr);
  const auto failure =
      failure_of([&] { (void)std::make_shared<Runner>(testbed_model(), engine, nullptr, Graphs::on); });
  CHECK(failure.code == Errc::unsupported);
  CHECK(test::mentions(failure.message, {"CPU", "auto"}));
  const Runner runner(testbed_model(), engine, nullptr);
  CHECK_FALSE(runner.graphs());
  CHECK(runner.decoding(3).decode_rows == 3);  // Padding would cost what tokens do.
  for (const Graphs graphs : {Graphs::automatic, Graphs::on, Graphs::off})
    CHECK(parse_graphs(to_string(graphs), "--graphs") == graphs);
  const auto unknown = failure_of([] { (void)parse_graphs("yes", "--graphs"); });
  CHECK(unknown.code == Errc::invalid_argument);
  CHECK(test::mentions(unknown.message, {"--graphs", "yes", "auto, on, off"}));
}
