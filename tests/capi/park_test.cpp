// Sequences that leave an engine for memory or a file and come back, through the C interface.
#include <filesystem>

#include "tests/capi/small_engine.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice::test;
using namespace sluice::test::capi;

namespace {

constexpr const char* kModel = "a model";

/// Outputs of the next forward of a sequence, all layers.
std::vector<float> decoded(const SmallEngine& small, sluice_sequence sequence) {
  Tensors tensors;
  for (std::size_t i = 0; i < tensors.memory.size(); ++i) tensors.memory[i] = static_cast<float>(i * 7 % 13) - 6;
  sluice_plan_item item = small.item();
  item.sequence = sequence;
  std::uint64_t forward = 0;
  require_ok(sluice_engine_plan(small.engine, &item, 1, &small.bucket, nullptr, &forward));
  std::vector<float> out;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    require_ok(sluice_engine_attend(small.engine, &small.bucket, layer, tensors.q.get(), tensors.k.get(),
                                    tensors.v.get(), tensors.out.get(), nullptr, nullptr));
    const auto* const rows = static_cast<const float*>(tensors.out.tensor.data);
    out.insert(out.end(), rows, rows + kQHeads * kHeadDim);
  }
  require_ok(sluice_engine_finish(small.engine, forward));
  return out;
}

}  // namespace

TEST_CASE("a sequence is parked and resumed", "[capi][park]") {
  const SmallEngine small;
  for (int i = 0; i < 20; ++i) (void)decoded(small, small.sequence);
  std::uint64_t bytes = 0;
  require_ok(sluice_engine_park_bytes(small.engine, small.sequence, kModel, &bytes));
  std::vector<std::byte> area(bytes + 5);
  std::uint64_t written = 0;
  require_ok(sluice_engine_park_memory(small.engine, small.sequence, kModel, area.data(), area.size(), &written));
  REQUIRE(written == bytes);
  require_ok(sluice_engine_park_memory(small.engine, small.sequence, kModel, area.data(), bytes, nullptr));
  const TemporaryDirectory directory;
  const std::string path = directory.file("parked");
  require_ok(sluice_engine_park_file(small.engine, small.sequence, kModel, path.c_str()));
  REQUIRE(std::filesystem::file_size(path) == bytes);
  const std::vector<float> want = decoded(small, small.sequence);
  const SmallEngine other;
  require_ok(sluice_engine_end(other.engine, other.sequence));
  sluice_sequence sequences[2] = {};
  require_ok(sluice_engine_resume_memory(other.engine, area.data(), bytes, kModel, &sequences[0]));
  require_ok(sluice_engine_resume_file(other.engine, path.c_str(), kModel, &sequences[1]));
  for (const sluice_sequence sequence : sequences) {
    std::uint32_t tokens = 0;
    require_ok(sluice_engine_tokens(other.engine, sequence, &tokens));
    REQUIRE(tokens == 20);
    REQUIRE(decoded(other, sequence) == want);
  }
}

TEST_CASE("what cannot be parked or resumed is refused", "[capi][park][errors]") {
  const SmallEngine small;
  sluice_engine* const engine = small.engine;
  sluice_engine* const none = nullptr;
  const sluice_sequence s = small.sequence;
  std::uint64_t bytes = 7;
  sluice_sequence made = 7;
  std::vector<std::byte> area(10'000);
  const auto null = [](const std::string& name, const auto& call) {
    check_fails(call, SLUICE_INVALID_ARGUMENT, {name + " is null"});
  };
  null("engine", [&] { return sluice_engine_park_bytes(none, s, nullptr, &bytes); });
  null("engine", [&] { return sluice_engine_park_memory(none, s, nullptr, area.data(), area.size(), &bytes); });
  null("engine", [&] { return sluice_engine_park_file(none, s, nullptr, "parked"); });
  null("engine", [&] { return sluice_engine_resume_memory(none, area.data(), area.size(), nullptr, &made); });
  null("engine", [&] { return sluice_engine_resume_file(none, "parked", nullptr, &made); });
  null("bytes", [&] { return sluice_engine_park_bytes(engine, s, nullptr, nullptr); });
  null("area", [&] { return sluice_engine_park_memory(engine, s, nullptr, nullptr, 9, &bytes); });
  null("path", [&] { return sluice_engine_park_file(engine, s, nullptr, nullptr); });
  null("area", [&] { return sluice_engine_resume_memory(engine, nullptr, 9, nullptr, &made); });
  null("path", [&] { return sluice_engine_resume_file(engine, nullptr, nullptr, &made); });
  null("sequence", [&] { return sluice_engine_resume_memory(engine, area.data(), 9, nullptr, nullptr); });
  null("sequence", [&] { return sluice_engine_resume_file(engine, "parked", nullptr, nullptr); });
  check_fails([&] { return sluice_engine_park_bytes(engine, 99, nullptr, &bytes); }, SLUICE_NOT_FOUND,
              {"no sequence 99"});
  check_fails([&] { return sluice_engine_park_memory(engine, s, nullptr, area.data(), 9, &bytes); },
              SLUICE_OUT_OF_CAPACITY, {"9 bytes", "park_bytes"});
  check_fails([&] { return sluice_engine_park_file(engine, s, nullptr, "/no/such/place"); }, SLUICE_IO,
              {"/no/such/place"});
  check_fails([&] { return sluice_engine_resume_file(engine, "/no/such/file", nullptr, &made); }, SLUICE_NOT_FOUND,
              {"/no/such/file"});
  check_fails([&] { return sluice_engine_resume_memory(engine, area.data(), area.size(), nullptr, &made); },
              SLUICE_CORRUPT, {"no parked sequence"});
  CHECK(bytes == 7);
  CHECK(made == 7);
  require_ok(sluice_engine_park_memory(engine, s, kModel, area.data(), area.size(), &bytes));
  check_fails([&] { return sluice_engine_resume_memory(engine, area.data(), bytes, nullptr, &made); },
              SLUICE_INVALID_ARGUMENT, {"'a model'", "''"});
  require_ok(sluice_engine_resume_memory(engine, area.data(), bytes, kModel, &made));
}
