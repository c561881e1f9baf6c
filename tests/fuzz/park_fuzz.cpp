// Parked sequences: what is refused changes nothing in the engine, and what is resumed can be parked again, is resumed
// as the same then, and leaves nothing behind. As they come, and with checksums that are right.

#include <memory>
#include <string_view>
#include <vector>

#include "sluice/engine.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "tests/support/park_seal.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr std::string_view kModel = "model";

/// The engine that the seeds were parked by. All that it may keep of sequences that have ended is nothing.
Engine& engine() {
  static const auto engine = [] {
    EngineOptions options{.shape = {.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16},
                          .page_tokens = 8,
                          .kv_dtype = DType::f32,
                          .host_bytes = 64 * KiB,
                          .policies = {parse_policy("full"), parse_policy("lfps")},
                          .largest = {.decode_rows = 1, .unbounded = true},
                          .sequences = 2,
                          .cpu_sequences = 2,
                          .prefix_bytes = 0,
                          .threads = 1,
                          .pin_threads = false};
    auto built = std::make_unique<Engine>(options);
    const std::int32_t id = 1;
    built->end(built->begin(parse_policy("full:near=0"), std::span(&id, 1)));  // What names take is there.
    return built;
  }();
  return *engine;
}

bool same(const EngineMemoryUse& a, const EngineMemoryUse& b) {
  return a.host() == b.host() && a.device() == b.device() && a.far_pages_used == b.far_pages_used &&
         a.far_pages_cached == b.far_pages_cached;
}

std::vector<std::byte> parked(SequenceId id) {
  std::vector<std::byte> area(engine().park_bytes(id, kModel));
  FUZZ_REQUIRE(engine().park(id, area, kModel) == area.size());
  return area;
}

void check(std::span<const std::byte> bytes) {
  const EngineMemoryUse before = engine().memory();
  SequenceId id{};
  if (accepts([&] { id = engine().resume(bytes, kModel); })) {
    const std::uint32_t tokens = engine().tokens(id);
    FUZZ_REQUIRE(tokens <= engine().options().largest.max_tokens);
    const std::vector<std::byte> area = parked(id);
    engine().end(id);
    id = engine().resume(area, kModel);
    FUZZ_REQUIRE(engine().tokens(id) == tokens);
    FUZZ_REQUIRE(parked(id) == area);
    engine().end(id);
  }
  FUZZ_REQUIRE(same(engine().memory(), before));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text = text_of(data, size);
  const auto* const from = reinterpret_cast<const std::byte*>(text.data());
  std::vector<std::byte> bytes(from, from + text.size());
  check(bytes);
  seal(bytes);
  check(bytes);
  return 0;
}
