// Large allocations, each failing once: callers see Error and nothing else, and nothing ends the process.

#include "sluice/engine.hpp"
#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/failing_new.hpp"
#include "tests/tools/llama_model_files.hpp"
#include "tools/llama/engine_session.hpp"
#include "tools/llama/model.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::TemporaryDirectory;
using sluice::test::TinyModel;

/// Smaller allocations do not fail one by one: nlohmann's destructor makes some and could not tell.
constexpr std::size_t kLarge = 512;

/// No memory for the large allocation after `count` others of this thread, if it happens while this lives.
struct Shortage {
  explicit Shortage(long count) { test::fail_own_allocation(count, kLarge); }
  ~Shortage() { test::fail_own_allocation(-1); }
};

/// Runs `call` with its first, second, third, ... allocation failing until it succeeds; it is told which.  @return how
/// often it failed, always with Error
template <class Call>
int failures_of(const Call& call) {
  for (int failed = 0;; ++failed) {
    CAPTURE(failed);
    try {
      call(failed);
      return failed;
    } catch (const Error& error) {
      const std::string message = error.what();
      REQUIRE(error.code() == Errc::out_of_capacity);
      REQUIRE(message.find(';') != std::string::npos);
    }
  }
}

EngineOptions options_of(const Model& model) {
  EngineOptions options;
  options.policies = {parse_policy("full")};
  options.shape = model.config().shape();
  options.host_bytes = 1 << 20;
  options.near_bytes = 1 << 18;
  options.largest = {.decode_rows = 1, .prefill_rows = 64, .prefills = 1, .unbounded = true};
  options.threads = 1;
  return options;
}

}  // namespace

TEST_CASE("a model that finds no memory while it loads is an Error, whichever large allocation fails",
          "[llama][memory]") {
  const TemporaryDirectory scratch;
  TinyModel files;
  files.config["num_hidden_layers"] = 1;
  std::erase_if(files.tensors, [](const auto& tensor) { return tensor.first.starts_with("model.layers.1."); });
  files.write(scratch.path());
  CHECK(failures_of([&](int which) {
          const Shortage shortage(which);
          const Model model(scratch.path(), {.threads = 1});
        }) > 10);
}

TEST_CASE("a prompt and a step that find no memory are Errors", "[llama][memory]") {
  const TemporaryDirectory scratch;
  TinyModel().write(scratch.path());
  const Model model(scratch.path(), {.threads = 1});
  const std::vector<int> prompt = {1, 2, 3};
  CHECK(failures_of([&](int which) {
          sluice::Engine engine(options_of(model));
          EngineSession session(model, engine, nullptr, parse_policy("full"));
          const Shortage shortage(which);
          session.prefill(prompt);
          session.decode(4);
        }) > 0);
}
