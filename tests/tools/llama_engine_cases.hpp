#pragma once

#include <string>

#include "sluice/engine.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_decode.hpp"
#include "tests/tools/llama_golden.hpp"
#include "tools/llama/engine_session.hpp"

namespace sluice::test {

/// Room for one prompt of 2,048 tokens and its answer.
inline EngineOptions engine_options(const tools::Model& model, DType kv_dtype, std::uint32_t chunk) {
  EngineOptions options;
  options.shape = model.config().shape();
  options.kv_dtype = kv_dtype;
  options.host_bytes = 64 * MiB;
  options.largest = {.decode_rows = 1, .prefill_rows = chunk, .prefills = 1, .max_tokens = 2400, .unbounded = true};
  options.max_picks = 2400;
  options.cpu_sequences = 1;
  options.prefill_window = 512;
  options.threads = 2;
  options.pin_threads = false;
  return options;
}

/// The same tokens and logits must come out wherever keys and values are, and however the prompt is cut.
inline void check_golden_on_engine(const tools::Model& model, const std::shared_ptr<Device>& device,
                                   const EngineOptions& options, const std::string& policy, float tolerance) {
  sluice::Engine engine(options, device);
  const auto cases = golden_cases();
  REQUIRE(cases.size() == 3);
  for (const GoldenCase& golden : cases) {
    CAPTURE(golden.prompt.size(), policy, options.page_tokens, options.near_bytes, options.largest.prefill_rows);
    tools::EngineSession session(model, engine, device, parse_policy(policy));
    session.prefill(golden.prompt);
    CHECK(session.tokens() == golden.prompt.size());
    CHECK(max_abs_diff(session.logits(), golden.logits) < tolerance);
    CHECK(decode_greedily(session, golden.greedy.size()) == golden.greedy);
  }
  CHECK(engine.memory().far_pages_used == 0);
}

}  // namespace sluice::test
