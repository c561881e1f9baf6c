#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "cpu/device/host_device.hpp"
#include "cpu/device/host_stream.hpp"
#include "sluice/error.hpp"
#include "tests/support/errors.hpp"

namespace sluice::cpu {

/// Two threads for all tests of the host device.
inline std::shared_ptr<const Workers> workers() {
  static const auto pool = std::make_shared<const Workers>(Topology(), WorkersOptions{.threads = 2});
  return pool;
}

/// Far enough for a machine that does much else; only a defect gets there.
inline Deadline soon() { return deadline_after(std::chrono::seconds(60)); }

/// Enqueues any function, as a backend's verb would be.
inline void call(Stream& stream, std::function<void()> run) {
  dynamic_cast<HostStream&>(stream).enqueue("verb", std::move(run));
}

template <class T>
Copy copy_of(T& to, const T& from) {
  return {
      .to = reinterpret_cast<std::byte*>(&to), .from = reinterpret_cast<const std::byte*>(&from), .bytes = sizeof(T)};
}

using test::code_of;
using test::synchronize_error;

/// Blocks its stream until opened; opens itself when it goes, so that no test hangs.
class Gate {
 public:
  explicit Gate(Stream& stream) { stream.wait(flag_, 1); }
  ~Gate() { open(); }
  void open() { flag_.signal(1); }

 private:
  Flag flag_;
};

}  // namespace sluice::cpu
