#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cpu/device/host_device.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/engine.hpp"
#include "tests/soak/alone.hpp"
#include "tests/soak/faults.hpp"
#include "tests/soak/model.hpp"

namespace sluice::test {

/// An engine and a device, by what they do differently. All else follows from the seed of a round.
struct MachineKind {
  const char* name = "";
  std::uint32_t number = 0;      ///< of its own, the same for ever: a part of the seed of its rounds
  bool at_once = false;          ///< no stream: calls return when they are done; the engine brings its own device
  bool crowded = false;          ///< fewer blocks than its sequences want
  bool prompts = false;          ///< prompts choose blocks
  bool audits = false;
  bool stalls = false;   ///< threads that answer are too late at times
  bool learns = false;   ///< only policies that remember what they have attended
  bool breaks = false;   ///< its device finds no memory at times, also while it takes a plan
  bool deep = false;     ///< as many forwards in flight as there may be
  bool windows = false;  ///< some layers have a window
  bool kept = false;     ///< one engine for all rounds; otherwise each round has its own
};
[[nodiscard]] std::span<const MachineKind> machine_kinds();

/// Rounds of traffic on one kind of engine.
class Machine {
 public:
  /// `workers` compute for `faults`.
  Machine(const MachineKind& kind, std::shared_ptr<const cpu::Workers> workers, std::shared_ptr<Faults> faults,
          const Pool& pool);
  ~Machine();

  /// A round is a function of the seed, up to what threads do; a kept engine is one of `kept_seed`. All sequences have
  /// left at its end.
  /// @throws Failure; sluice::Error that no call may throw
  RoundStats run(std::uint64_t seed, std::uint64_t kept_seed);
  [[nodiscard]] const MachineKind& kind() const noexcept { return kind_; }

 private:
  void build(std::uint64_t seed);
  void destroy();

  MachineKind kind_;
  std::shared_ptr<const cpu::Workers> workers_;
  const Pool& pool_;
  cpu::HostDevice memory_;  ///< of tensors; never fails
  std::shared_ptr<Faults> faults_;
  std::vector<std::string> policies_;
  std::shared_ptr<cpu::HostDevice> device_;  ///< null: the engine's own
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Alone> alone_;  ///< null until it is wanted
};

/// A process that is stopped for longer has not timed out: deadlines measure time in which it ran.
inline constexpr std::chrono::milliseconds kSoakTimeout{10'000};

}  // namespace sluice::test
