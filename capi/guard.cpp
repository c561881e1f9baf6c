#include "capi/guard.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string_view>
#include <system_error>

namespace sluice::capi {
namespace {

/// Of this size from the start: it must be there when no memory is. Longer texts lose their end.
constexpr std::size_t kMostText = 4096;
thread_local char last_error[kMostText] = "";

sluice_status failed(sluice_status status, std::string_view text) noexcept {
  const std::size_t size = std::min(text.size(), kMostText - 1);
  std::memcpy(last_error, text.data(), size);
  last_error[size] = '\0';
  return status;
}

sluice_status status_of(Errc code) noexcept {
  switch (code) {
    case Errc::invalid_argument: return SLUICE_INVALID_ARGUMENT;
    case Errc::out_of_capacity: return SLUICE_OUT_OF_CAPACITY;
    case Errc::unsupported: return SLUICE_UNSUPPORTED;
    case Errc::not_found: return SLUICE_NOT_FOUND;
    case Errc::corrupt: return SLUICE_CORRUPT;
    case Errc::io: return SLUICE_IO;
    case Errc::device: return SLUICE_DEVICE;
    case Errc::timeout: return SLUICE_TIMEOUT;
    case Errc::internal: break;
  }
  return SLUICE_INTERNAL;
}

sluice_status refused(const std::system_error& error) noexcept {
  try {
    return failed(SLUICE_OUT_OF_CAPACITY, std::string("the operating system refused a thread or another resource: ") +
                                              error.what() +
                                              "; raise its limit (ulimit -u, pids.max) or use fewer threads");
  } catch (...) {
    return failed(SLUICE_OUT_OF_CAPACITY, error.what());
  }
}

}  // namespace

sluice_status caught() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return failed(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(SLUICE_OUT_OF_CAPACITY,
                  "this process gets no more host memory; use less, or raise its limit (ulimit -v, memory.max)");
  } catch (const std::system_error& error) {
    return refused(error);
  } catch (const std::exception& error) {
    return failed(SLUICE_INTERNAL, error.what());
  } catch (...) {
    return failed(SLUICE_INTERNAL, "an exception that is no std::exception; please report this");
  }
}

}  // namespace sluice::capi

const char* sluice_last_error(void) { return sluice::capi::last_error; }

const char* sluice_status_name(sluice_status status) {
  switch (status) {
    case SLUICE_OK: return "ok";
    case SLUICE_INVALID_ARGUMENT: return to_string(sluice::Errc::invalid_argument);
    case SLUICE_OUT_OF_CAPACITY: return to_string(sluice::Errc::out_of_capacity);
    case SLUICE_UNSUPPORTED: return to_string(sluice::Errc::unsupported);
    case SLUICE_NOT_FOUND: return to_string(sluice::Errc::not_found);
    case SLUICE_CORRUPT: return to_string(sluice::Errc::corrupt);
    case SLUICE_IO: return to_string(sluice::Errc::io);
    case SLUICE_DEVICE: return to_string(sluice::Errc::device);
    case SLUICE_TIMEOUT: return to_string(sluice::Errc::timeout);
    case SLUICE_INTERNAL: return to_string(sluice::Errc::internal);
    default: return "unknown";
  }
}

uint32_t sluice_abi_version(void) { return SLUICE_ABI_VERSION; }
const char* sluice_version(void) { return SLUICE_VERSION; }
