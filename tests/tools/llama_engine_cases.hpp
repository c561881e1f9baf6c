#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sluice/engine.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_named.hpp"
#include "tests/tools/llama_decode.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tools/llama/engine_session.hpp"
#include "tools/llama/sampler.hpp"

namespace sluice::test {

/// Room for one prompt of 2,048 tokens and its answer.
inline EngineOptions engine_options(const tools::Model& model, DType kv_dtype, std::uint32_t chunk) {
  EngineOptions options;
  options.shape = model.config().shape();
  options.kv_dtype = kv_dtype;
  options.host_bytes = 64 * MiB;
  options.largest = {.decode_rows = 1, .prefill_rows = chunk, .prefills = 1, .max_tokens = 2400, .unbounded = true};
  options.cpu_sequences = 1;
  options.prefill_window = 512;
  options.threads = 2;
  options.pin_threads = false;
  return named(options, {"exact | int4 | top_k=2400 | near=0,sinks=4,recent=508", kOnCpu, "full"});
}

/// The same tokens and logits must come out wherever keys and values are, and however the prompt is cut.
inline void check_golden_on_engine(const tools::Model& model, const std::shared_ptr<Device>& device,
                                   const EngineOptions& options, const std::string& policy, float tolerance,
                                   const std::vector<GoldenCase>& cases = golden_cases()) {
  sluice::Engine engine(options, device);
  REQUIRE(cases.size() >= 2);
  for (const GoldenCase& golden : cases) {
    CAPTURE(golden.prompt.size(), policy, options.page_tokens, options.near_bytes, options.largest.prefill_rows,
            to_string(options.placement));
    tools::EngineSession session(model, engine, device, parse_policy(policy));
    session.prefill(golden.prompt);
    CHECK(session.tokens() == golden.prompt.size());
    CHECK(max_abs_diff(session.logits(), golden.logits) < tolerance);
    CHECK(session.best() == tools::argmax(session.logits()));
    CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
  }
  CHECK(engine.memory().far_pages_used == 0);
}

/// A prompt that one session has read and recorded goes on in another one as it did there.
inline void check_imported(const tools::Model& model, const std::shared_ptr<Device>& device,
                           const EngineOptions& options, const std::string& policy, float tolerance) {
  const GoldenCase golden = golden_cases().at(1);
  tools::PromptCache prompt;
  std::vector<int> expected;
  std::vector<float> last_logits;
  {
    sluice::Engine engine(options, device);
    tools::EngineSession session(model, engine, device, parse_policy(policy));
    session.prefill(golden.prompt, {}, &prompt);
    expected = decode_greedily(session, 8);
    last_logits.assign(session.logits().begin(), session.logits().end());
  }
  CHECK(prompt.tokens() == golden.prompt.size());
  CHECK(std::vector<int>(prompt.ids().begin(), prompt.ids().end()) == golden.prompt);
  sluice::Engine engine(options, device);
  tools::EngineSession session(model, engine, device, parse_policy(policy));
  session.import_prompt(prompt);
  CHECK(session.tokens() == golden.prompt.size());
  CHECK(max_abs_diff(session.logits(), prompt.logits()) == 0.f);
  CHECK(decode_greedily(session, 8) == expected);
  CHECK(max_abs_diff(session.logits(), last_logits) < tolerance);
}

/// `copies` sessions of every golden prompt decode together what they decode alone.
inline void check_batch(const tools::Model& model, const std::shared_ptr<Device>& device, EngineOptions options,
                        std::size_t copies) {
  const auto cases = golden_cases();
  const std::size_t rows = copies * cases.size();
  options.largest.decode_rows = static_cast<std::uint32_t>(rows);
  options.host_bytes = 512 * MiB;
  sluice::Engine engine(options, device);
  std::vector<std::unique_ptr<tools::EngineSession>> sessions;
  std::vector<tools::EngineSession*> batch;
  for (std::size_t i = 0; i < rows; ++i) {
    sessions.push_back(std::make_unique<tools::EngineSession>(model, engine, device, parse_policy("full")));
    sessions.back()->prefill(cases[i % cases.size()].prompt);
    batch.push_back(sessions.back().get());
  }
  std::vector<int> tokens(rows);
  std::vector<std::vector<int>> outputs(rows);
  for (std::size_t step = 0; step < cases.front().greedy.size(); ++step) {
    for (std::size_t i = 0; i < rows; ++i) outputs[i].push_back(tokens[i] = batch[i]->best());
    tools::decode_batch(batch, tokens);
  }
  for (std::size_t i = 0; i < rows; ++i) {
    CHECK(outputs[i] == cases[i % cases.size()].greedy);
    CHECK(batch[i]->tokens() == cases[i % cases.size()].prompt.size() + outputs[i].size());
  }
}

}  // namespace sluice::test
