#pragma once

#include <string>

#include "sluice.h"
#include "sluice/error.hpp"

/// What all functions of sluice.h have in common: no exception leaves them.
namespace sluice::capi {

/// Status of the exception that is being handled, whose text becomes the calling thread's last error.
[[nodiscard]] sluice_status caught() noexcept;

template <class Call>
[[nodiscard]] sluice_status guarded(const Call& call) noexcept {
  try {
    call();
    return SLUICE_OK;
  } catch (...) {
    return caught();
  }
}

inline void require(bool holds, const std::string& message) {
  if (!holds) throw Error(Errc::invalid_argument, message);
}

/// `what` names the argument of the function.
inline void require_pointer(const void* pointer, const char* what) {
  if (pointer == nullptr)
    throw Error(Errc::invalid_argument, std::string(what) + " is null; give it the address that sluice.h says");
}

}  // namespace sluice::capi
