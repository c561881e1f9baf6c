#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/capi/small_engine.hpp"

/// An admission of C, and what its calls take and give.
namespace sluice::test::capi {

inline constexpr std::size_t kMost = 3;  ///< requests that run at once
using Ids = std::vector<std::uint64_t>;

struct DestroyAdmission {
  void operator()(sluice_admission* admission) const { sluice_admission_destroy(admission); }
};
using AdmissionPointer = std::unique_ptr<sluice_admission, DestroyAdmission>;

/// `windows`: layers with windows beside others.
[[nodiscard]] inline sluice_admission_options options_of_c(bool windows = false) {
  sluice_admission_options options;
  require_ok(sluice_admission_options_init(&options, sizeof options));
  options.decode_rows = kMost;
  options.prefill_rows = 20;
  options.prefills = 2;
  options.cpu_sequences = 1;
  options.page_tokens = 4;
  options.pages = 9;
  options.watermark_pages = 1;
  options.near_pages = 5;
  options.near_pages_per_sequence = 2;
  options.slowdown = 2.0;
  if (!windows) return options;
  options.pages = 31;
  options.page_blocks = 2;
  options.window_blocks = 3;
  options.window_pages = 4;
  options.window_resting_pages = 1;
  return options;
}

[[nodiscard]] inline AdmissionPointer create(const sluice_admission_options& options) {
  sluice_admission* admission = nullptr;
  require_ok(sluice_admission_create(&options, &admission));
  return AdmissionPointer(admission);
}

/// A list of requests that a call fills.
struct List {
  std::uint64_t ids[kMost] = {};
  std::size_t count = kMost;
  [[nodiscard]] Ids get() const { return {ids, ids + count}; }
};

[[nodiscard]] inline sluice_request request(std::uint64_t id, std::uint32_t prompt, std::uint32_t most,
                                            std::uint32_t on_cpu = 0) {
  return {sizeof(sluice_request), prompt, most, on_cpu, id};
}

}  // namespace sluice::test::capi
