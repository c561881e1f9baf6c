#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "cpu/threads/workers.hpp"
#include "sluice/device.hpp"

namespace sluice::cpu {

/// How the host device fails on purpose. All choices come from `seed`, so a failure can be repeated.
struct FaultOptions {
  std::uint64_t seed = 0;
  /// Before each operation of a stream, sleep a random time up to this, inclusive; 0 = never.
  std::chrono::microseconds max_delay{0};
  /// Copies within one batch run in random order (they are unordered by contract).
  bool reorder_copies = false;
  /// Chance that one copy batch, one verb, one allocation or one registration fails. [0, 1] A failed batch
  /// has copied nothing or some of its copies, a failed verb was not executed.
  double fail_copy = 0.0;
  double fail_verb = 0.0;
  double fail_allocation = 0.0;
  double fail_registration = 0.0;
};

struct HostDeviceOptions {
  std::uint64_t memory_bytes = 0;                  ///< limit on `allocate`; 0 = none
  std::chrono::milliseconds flag_timeout{30'000};  ///< how long a stream waits for a host flag
  FaultOptions faults{};
  Handover handover = Handover::device;  ///< what Handover::automatic stands for; not itself `automatic`
};

/// The embedded default device: near memory is ordinary memory, streams are in-order queues on threads
/// of their own, verbs are computed by the shared workers. Same asynchrony and same contract as a
/// GPU, so that races show without one. A stream destroyed with work in its queue drops it; events and flags
/// that would have followed fail.
/// Thread safety: as Device. Destroy all streams, events and buffers first.
class HostDevice final : public Device {
 public:
  /// @throws Error{Errc::invalid_argument} naming the option that breaks its range.
  explicit HostDevice(std::shared_ptr<const Workers> workers, const HostDeviceOptions& options = {});
  ~HostDevice() override;

  [[nodiscard]] const DeviceInfo& info() const noexcept override;
  [[nodiscard]] sluice::ForwardVerbs* forward_verbs() noexcept override;
  [[nodiscard]] std::unique_ptr<Buffer> allocate(std::uint64_t bytes) override;
  [[nodiscard]] std::unique_ptr<Buffer> allocate_pinned(std::uint64_t bytes) override;
  [[nodiscard]] std::unique_ptr<Registration> register_host(std::span<std::byte> memory) override;
  [[nodiscard]] std::unique_ptr<Stream> create_stream(const std::string& name) override;
  [[nodiscard]] std::unique_ptr<Event> create_event() override;
  [[nodiscard]] bool lost() const noexcept override;

  /// Changes how the device fails from the next enqueued operation on; for tests that build in peace.
  /// Every stream then draws anew from the given seed.  @throws Error{Errc::invalid_argument}
  void inject(const FaultOptions& faults);
  /// Failures injected so far.
  [[nodiscard]] std::uint64_t injected_failures() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice::cpu
