#include <memory>
#include <vector>

#include "cpu/backend/backend.hpp"
#include "tests/cpu/backend_cases.hpp"
#include "tests/support/backend_under_test.hpp"

namespace sluice::test {
namespace {

/// Verbs compute before they return, in ordinary memory.
class CpuUnderTest final : public BackendUnderTest {
 public:
  Backend& backend() override { return backend_; }
  Stream* stream() override { return nullptr; }
  std::byte* memory(std::uint64_t bytes) override {
    return blocks_.emplace_back(bytes / sizeof(Line) + 1).front().bytes;
  }
  void finish() override {}

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  cpu::Backend backend_{workers(3)};
  std::vector<std::vector<Line>> blocks_;
};

}  // namespace

std::unique_ptr<BackendUnderTest> backend_under_test() { return std::make_unique<CpuUnderTest>(); }

}  // namespace sluice::test
