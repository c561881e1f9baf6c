#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>

#include "sluice/device.hpp"
#include "sluice/step/forward_verbs.hpp"
#include "tests/support/problem.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::test {

/// A device's stages and what they need, for the cases that every device has to pass: those of tests/stages are
/// compiled into one test executable per device.
class StagesUnderTest {
 public:
  virtual ~StagesUnderTest() = default;
  [[nodiscard]] virtual tools::Stages& stages() = 0;
  /// Of the same device.
  [[nodiscard]] virtual ForwardVerbs& forward_verbs() = 0;
  /// Null of the CPU's.
  [[nodiscard]] virtual Stream* stream() = 0;
  [[nodiscard]] bool is_cpu() { return stream() == nullptr; }
  /// Memory that the device's kernels and the test read and write alike, 64-byte aligned, with arbitrary contents;
  /// valid as long as this object.
  [[nodiscard]] virtual std::byte* memory(std::uint64_t bytes) = 0;
  /// Returns when all stages are done and what they wrote can be read.
  virtual void finish() = 0;

  [[nodiscard]] bool supports(const AttentionShape& shape, const PageLayout& layout) {
    return stages().unsupported_reasons(shape, layout).empty();
  }
  template <class T>
  [[nodiscard]] std::span<T> array(std::size_t count, const T& value = {}) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::span<T> all(reinterpret_cast<T*>(memory(count * sizeof(T))), count);
    std::fill(all.begin(), all.end(), value);
    return all;
  }
  /// Scratch of a task, as stages want it aligned, of no use to whoever reads it before it is written.
  [[nodiscard]] std::byte* scratch(std::uint64_t bytes) {
    constexpr std::uint64_t kAlignment = 256;
    const std::span<std::byte> all = array(bytes + kAlignment, std::byte{0xff});
    const auto address = reinterpret_cast<std::uintptr_t>(all.data());
    return all.data() + (kAlignment - address % kAlignment) % kAlignment;
  }
  template <class Range>
  [[nodiscard]] auto copy_of(const Range& range) {
    const auto copy = array<std::remove_cvref_t<decltype(*std::begin(range))>>(std::size(range));
    std::copy(std::begin(range), std::end(range), copy.begin());
    return copy;
  }
};

/// The one device of this executable. Its memory is this object's alone.
[[nodiscard]] std::unique_ptr<StagesUnderTest> stages_under_test();

/// A problem's queries and pages in the memory of a device; the frames are those of the problem.
struct Placed {
  const float* q = nullptr;
  KvView kv;
  const std::uint32_t* device_frames = nullptr;  ///< a copy of kv.frames that kernels read
};

[[nodiscard]] inline Placed place(StagesUnderTest& under_test, const Problem& problem) {
  Placed placed{
      .q = under_test.copy_of(std::span(problem.q(), problem.options().group * problem.options().head_dim)).data(),
      .kv = problem.kv(),
      .device_frames = under_test.copy_of(problem.frames()).data()};
  placed.kv.base = under_test.copy_of(problem.memory()).data();
  return placed;
}

inline constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

}  // namespace sluice::test
