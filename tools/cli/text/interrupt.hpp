#pragma once

#include <signal.h>

#include <array>
#include <exception>

namespace sluice::tools {

/// While it lives, the first Ctrl-C, or SIGTERM, is taken down instead of ending the process: long work stops at its
/// next call of stop_if_interrupted, and what is finished can be reported. The second one, a quarter of a second later
/// or more, ends the process at once. What was ignored, as Ctrl-C behind nohup, stays ignored. One at a time.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  std::array<struct sigaction, 2> before_{};  ///< of SIGINT and of SIGTERM
};

/// Ends long work from within. Caught where the finished part is.
struct Interrupted final : std::exception {
  [[nodiscard]] const char* what() const noexcept override { return "interrupted"; }
};

/// Since the newest scope began.
[[nodiscard]] bool interrupted() noexcept;
/// @throws Interrupted
void stop_if_interrupted();

}  // namespace sluice::tools
