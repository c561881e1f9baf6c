#include <memory>
#include <vector>

#include "cpu/forward/forward_verbs.hpp"
#include "tests/cpu/stage_support.hpp"
#include "tests/support/stages_under_test.hpp"

namespace sluice::test {
namespace {

/// Stages compute before they return, in ordinary memory.
class CpuUnderTest final : public StagesUnderTest {
 public:
  tools::Stages& stages() override { return stages_; }
  ForwardVerbs& forward_verbs() override { return verbs_; }
  Stream* stream() override { return nullptr; }
  std::byte* memory(std::uint64_t bytes) override {
    return blocks_.emplace_back(bytes / sizeof(Line) + 1).front().bytes;
  }
  void finish() override {}

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  tools::HostStages stages_{{.workers = workers(3)}};
  cpu::ForwardVerbs verbs_{workers(3)};
  std::vector<std::vector<Line>> blocks_;
};

}  // namespace

std::unique_ptr<StagesUnderTest> stages_under_test() { return std::make_unique<CpuUnderTest>(); }

}  // namespace sluice::test
