#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

namespace sluice {

/// What went wrong, for code that reacts. The message is for people: it names the cause and the remedy.
enum class Errc {
  invalid_argument,  ///< An option, shape or call order breaks its documented range; the message names it.
  out_of_capacity,   ///< A pool sized at construction is full, or this process gets no more memory or threads.
  unsupported,       ///< Valid, but this build or device has no kernel for it.
  not_found,         ///< No such sequence, file or name.
  corrupt,           ///< A file contradicts itself or its companion (truncated, lying header, wrong shape).
  io,                ///< The operating system refused to read or write.
  device,            ///< An asynchronous copy, kernel or registration failed; the message carries the cause.
  timeout,           ///< A wait passed its deadline. The operation may be retried.
  internal,          ///< A defect of the library: an unforeseen exception. Please report it with its message.
};

/// Short stable name of a code, for machine-readable output. Never null.
[[nodiscard]] constexpr const char* to_string(Errc code) noexcept {
  switch (code) {
    case Errc::invalid_argument: return "invalid_argument";
    case Errc::out_of_capacity: return "out_of_capacity";
    case Errc::unsupported: return "unsupported";
    case Errc::not_found: return "not_found";
    case Errc::corrupt: return "corrupt";
    case Errc::io: return "io";
    case Errc::device: return "device";
    case Errc::timeout: return "timeout";
    case Errc::internal: return "internal";
  }
  return "unknown";
}

/// The one exception of the library. Thrown before anything is changed unless a function says otherwise.
class Error : public std::runtime_error {
 public:
  Error(Errc code, const std::string& message, std::source_location where = std::source_location::current())
      : std::runtime_error(message), code_(code), where_(where) {}

  [[nodiscard]] Errc code() const noexcept { return code_; }
  /// Where in the library the error was raised; for bug reports, not for users.
  [[nodiscard]] const std::source_location& where() const noexcept { return where_; }

 private:
  Errc code_;
  std::source_location where_;
};

}  // namespace sluice
