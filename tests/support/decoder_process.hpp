#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "tests/support/decoding.hpp"

/// A process that decodes lines until it is told to stop, and says what it does on a pipe, a line of text each.
namespace sluice::test {

/// What such a process does: decodes until the other end of `stop` is closed, and reports to `report`. Never throws.
void decode_for_parent(const EngineRig& rig, EngineOptions options, const std::vector<DecodedLine>& lines,
                       DecodingHooks hooks, int stop, int report) noexcept;
/// Likewise, that it could not even begin.
void report_failure(const std::string& reason, int report) noexcept;

/// The parent's end. No wait is without a deadline, and whoever gives it up ends the process.
class DecoderProcess {
 public:
  /// `body` runs in a new process, which ends when it returns; it may become another program instead.
  explicit DecoderProcess(const std::function<void(int stop, int report)>& body);
  ~DecoderProcess();
  DecoderProcess(const DecoderProcess&) = delete;
  DecoderProcess& operator=(const DecoderProcess&) = delete;

  /// Waits until it has enqueued so many more forwards than it had said when this was called.
  /// @throws std::runtime_error if it says that something is wrong, ends or is late
  void await_forwards(std::uint64_t count, std::chrono::milliseconds timeout);
  /// Stops it, and lets it go on after `span`.
  void suspend(std::chrono::milliseconds span) const;
  /// Ends it at once, whatever it does, and waits until it is gone.
  void kill(std::chrono::milliseconds timeout);
  /// Lets it finish.  @throws as await_forwards
  DecodingReport finish(std::chrono::milliseconds timeout);

 private:
  using Time = std::chrono::steady_clock::time_point;
  /// What it says next, or nothing if it does not until `end`.
  bool read_line(Time end, std::string& line);
  /// As said in a line; throws if that is bad news.
  void take(const std::string& line);
  bool await_exit(Time end) noexcept;

  int stop_ = -1;
  int report_ = -1;
  pid_t process_ = -1;
  int status_ = 0;  ///< of its end
  std::string unread_;
  std::uint64_t forwards_ = 0;  ///< enqueued, as it has said
  bool done_ = false;
  DecodingReport told_;
};

}  // namespace sluice::test
