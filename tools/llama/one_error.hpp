#pragma once

#include <filesystem>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "sluice/error.hpp"

namespace sluice::tools {

/// Calls `body`. What the standard library throws in its own types, for want of memory or threads or for a path that
/// cannot be looked at, leaves as Error; everything else as it is.
/// @param action  for the message: "load the model"
template <class Body>
decltype(auto) as_one_error(const char* action, Body&& body) {
  const auto cannot = [&](const std::string& why) { return std::string("cannot ") + action + ": " + why; };
  try {
    return body();
  } catch (const std::bad_alloc&) {
    throw Error(Errc::out_of_capacity, cannot("out of memory; free some, or use a smaller model or a shorter prompt"));
  } catch (const std::length_error&) {
    throw Error(Errc::out_of_capacity, cannot("more memory is needed than can be addressed; use a smaller model"));
  } catch (const std::filesystem::filesystem_error& e) {
    throw Error(Errc::io, cannot(std::string(e.what()) + "; use a path that you may read"));
  } catch (const std::system_error& e) {
    throw Error(
        Errc::out_of_capacity,
        cannot(std::string(e.what()) + "; use fewer threads, or raise the limit of processes (ulimit -u) or memory"));
  }
}

}  // namespace sluice::tools
