#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "gpu/device/cuda_device.hpp"
#include "sluice/cuda.hpp"
#include "sluice/device.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/reference.hpp"
#include "tools/stages/stages.hpp"

/// What the tests of attention on the device share: everything lies in pinned memory, which both sides address.
namespace sluice::test {

class AttendFixture {
 public:
  AttendFixture()
      : device(make_cuda_device()), stream(device->create_stream("test")), stages_(tools::cuda_stages_of(*device)) {}

  /// Memory of both sides, kept until the fixture goes.
  template <class T>
  std::span<T> memory(std::size_t count) {
    buffers_.push_back(device->allocate_pinned(std::max<std::uint64_t>(count * sizeof(T), 16)));
    return {reinterpret_cast<T*>(buffers_.back()->data()), count};
  }
  template <class T>
  std::span<T> copy(std::span<const T> from) {
    const std::span<T> to = memory<T>(from.size());
    std::copy(from.begin(), from.end(), to.begin());
    return to;
  }
  /// The problem's cache: the same frames, the same poison between them.
  KvView kv(const Problem& problem) {
    KvView view = problem.kv();
    const std::uint64_t frames = std::uint64_t{*std::max_element(problem.frames().begin(), problem.frames().end())} + 1;
    view.base = copy(std::span<const std::byte>(view.base, frames * view.layout.page_bytes())).data();
    return view;
  }
  std::span<float> q(const Problem& problem) {
    return copy(std::span<const float>(problem.q(), std::size_t{problem.options().group} * problem.options().head_dim));
  }
  void wait() { stream->synchronize(deadline_after(std::chrono::seconds(30))); }
  tools::Stages& stages() { return *stages_; }

  std::shared_ptr<Device> device;
  std::unique_ptr<Stream> stream;

 private:
  std::shared_ptr<tools::Stages> stages_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

/// A partial in memory of both sides, NaN before it is written.
struct SharedPartial {
  SharedPartial(AttendFixture& fixture, const Problem& problem)
      : out(fixture.memory<float>(std::size_t{problem.options().group} * problem.options().head_dim)),
        lse(fixture.memory<float>(problem.options().group)) {
    std::fill(out.begin(), out.end(), std::numeric_limits<float>::quiet_NaN());
    std::fill(lse.begin(), lse.end(), std::numeric_limits<float>::quiet_NaN());
  }
  [[nodiscard]] Partial view() const { return {.out = out.data(), .lse = lse.data()}; }
  [[nodiscard]] bool same_bits(const SharedPartial& other) const {
    return std::memcmp(out.data(), other.out.data(), out.size_bytes()) == 0 &&
           std::memcmp(lse.data(), other.lse.data(), lse.size_bytes()) == 0;
  }
  std::span<float> out;
  std::span<float> lse;
};

inline AttendTask attend_task(AttendFixture& fixture, const Problem& problem, const SharedPartial& out) {
  AttendTask task;
  task.q = fixture.q(problem).data();
  task.kv = fixture.kv(problem);
  task.out = out.view();
  return task;
}

inline std::vector<std::uint32_t> all_tokens(std::uint32_t count) { return random_tokens(count, 2.0, 1); }

/// ||a - b|| / ||b||; infinite if anything is not finite.
inline double relative_l2(std::span<const float> a, std::span<const double> b) {
  double difference = 0.0;
  double norm = 1e-30;
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  const double ratio = std::sqrt(difference / norm);
  return a.size() == b.size() && std::isfinite(ratio) ? ratio : std::numeric_limits<double>::infinity();
}

/// Scores on the device carry 16 bits of the query, so they are off by up to some 2^-16 of the largest score, and a
/// weight by as much as its score. tolerance() is 2^-17.6 of it, rounded to float32's order.
inline double device_tolerance(const Problem& problem) { return 8 * tolerance(problem); }

inline void require_close(const SharedPartial& got, const Attention& expected, double within) {
  REQUIRE(relative_l2(got.out, expected.out) <= within);
  REQUIRE(max_abs_diff(got.lse, expected.lse) <= within);
}

}  // namespace sluice::test
