#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sluice.h"
#include "tests/support/catch.hpp"

/// What tests of the C interface have in common.
namespace sluice::test::capi {

/// A struct of sluice.h with its size, and nothing else.
template <class T>
[[nodiscard]] T sized() {
  T value{};
  value.struct_size = sizeof value;
  return value;
}

inline void require_ok(sluice_status status) {
  INFO(sluice_last_error());
  REQUIRE(status == SLUICE_OK);
}

struct DestroyEngine {
  void operator()(sluice_engine* engine) const { sluice_engine_destroy(engine); }
};
using EnginePointer = std::unique_ptr<sluice_engine, DestroyEngine>;

[[nodiscard]] inline EnginePointer create(const sluice_engine_options& options) {
  sluice_engine* engine = nullptr;
  require_ok(sluice_engine_create(&options, &engine));
  return EnginePointer(engine);
}

/// A tensor with room for its own sizes.
struct CTensor {
  sluice_tensor tensor{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;

  CTensor(void* data, std::vector<std::int64_t> sizes, std::uint8_t code = SLUICE_TYPE_FLOAT, std::uint8_t bits = 32)
      : shape(std::move(sizes)) {
    tensor.data = data;
    tensor.device.device_type = SLUICE_DEVICE_CPU;
    tensor.ndim = static_cast<std::int32_t>(shape.size());
    tensor.dtype.code = code;
    tensor.dtype.bits = bits;
    tensor.dtype.lanes = 1;
    tensor.shape = shape.data();
  }
  CTensor(const CTensor&) = delete;
  CTensor& operator=(const CTensor&) = delete;

  void set_strides(std::vector<std::int64_t> steps) {
    strides = std::move(steps);
    tensor.strides = strides.data();
  }
  [[nodiscard]] const sluice_tensor* get() const { return &tensor; }
};

/// The call fails with this status, and a text of its own that has all these words.
template <class Call>
void check_fails(const Call& call, sluice_status want, const std::vector<std::string>& words) {
  sluice_engine_options options;
  (void)sluice_engine_options_init(&options, 4999);  // A text that no other call has, so that it shows if it stays.
  const std::string before = sluice_last_error();
  const sluice_status got = call();
  const std::string text = sluice_last_error();
  INFO(sluice_status_name(got) << ": " << text);
  CHECK(got == want);
  CHECK(text != before);
  CHECK(text.size() > 20);
  for (const std::string& word : words) {
    CAPTURE(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

}  // namespace sluice::test::capi
