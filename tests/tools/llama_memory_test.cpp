// Large allocations, each failing once: callers see Error and nothing else, and nothing ends the process.
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "sluice/error.hpp"
#include "sluice/engine.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_model_files.hpp"
#include "tools/llama/model.hpp"
#include "tools/llama/engine_session.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using sluice::test::TemporaryDirectory;
using sluice::test::TinyModel;

/// Smaller allocations do not fail one by one: nlohmann's destructor makes some and could not tell.
constexpr std::size_t kLarge = 512;
/// Large allocations of this thread until one fails; negative: none does.
thread_local long allocations_left = -1;

/// No memory for the allocation after `count` others of this thread, if it happens while this lives.
struct Shortage {
  explicit Shortage(long count) { allocations_left = count; }
  ~Shortage() { allocations_left = -1; }
};

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (bytes >= kLarge && allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  void* memory = nullptr;
  if (::posix_memalign(&memory, alignment, bytes == 0 ? 1 : bytes) != 0) throw std::bad_alloc();
  return memory;
}

/// Runs `call` with its first, second, third, ... allocation failing until it succeeds.  @return how often it failed,
/// always with Error
template <class Call>
int failures_of(const Call& call) {
  for (int failed = 0;; ++failed) {
    CAPTURE(failed);
    try {
      const Shortage shortage(failed);
      call();
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
  options.shape = model.config().shape();
  options.host_bytes = 1 << 20;
  options.near_bytes = 1 << 18;
  options.largest = {.decode_rows = 1, .prefill_rows = 64, .prefills = 1, .unbounded = true};
  options.threads = 1;
  return options;
}

}  // namespace

// In pairs, so that sanitizers see no mismatch.
void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new[](std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

TEST_CASE("a model that finds no memory while it loads is an Error, whichever large allocation fails",
          "[llama][memory]") {
  const TemporaryDirectory scratch;
  TinyModel files;
  files.config["num_hidden_layers"] = 1;
  std::erase_if(files.tensors, [](const auto& tensor) { return tensor.first.starts_with("model.layers.1."); });
  files.write(scratch.path());
  CHECK(failures_of([&] { const Model model(scratch.path(), {.threads = 1}); }) > 10);
}

TEST_CASE("a prompt and a step that find no memory are Errors", "[llama][memory]") {
  const TemporaryDirectory scratch;
  TinyModel().write(scratch.path());
  const Model model(scratch.path(), {.threads = 1});
  const std::vector<int> prompt = {1, 2, 3};
  CHECK(failures_of([&] {
          const long left = std::exchange(allocations_left, -1);
          sluice::Engine engine(options_of(model));
          EngineSession session(model, engine, nullptr, parse_policy("full"));
          const Shortage shortage(left);
          session.prefill(prompt);
          session.decode(4);
        }) > 0);
}
