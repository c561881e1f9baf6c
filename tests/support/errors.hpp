#pragma once

#include <stdexcept>

#include "sluice/device.hpp"
#include "sluice/error.hpp"

namespace sluice::test {

/// The code of the Error that `function` throws. It asserts nothing, so that any thread may call it.
template <class Function>
Errc code_of(Function&& function) {
  try {
    (void)function();
  } catch (const Error& error) {
    return error.code();
  }
  throw std::logic_error("nothing was thrown");
}

inline Errc synchronize_error(Stream& stream, Deadline deadline) {
  return code_of([&] { stream.synchronize(deadline); });
}

}  // namespace sluice::test
