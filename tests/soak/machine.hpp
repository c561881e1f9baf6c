#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/host_device.hpp"
#include "sluice/runtime.hpp"
#include "tests/runtime/toy.hpp"

namespace sluice::test {

/// A device and a runtime on it, by what they do differently.
struct MachineKind {
  const char* name = "";
  std::uint32_t number = 0;      ///< of its own, the same for ever: a part of the seed of its rounds
  bool embedded = false;         ///< the runtime brings its own device
  bool separate_memory = false;  ///< as a GPU has it
  bool ordered = false;          ///< calls return once they are queued
  PlacementMode placement = PlacementMode::hybrid;
  std::uint32_t near_pages = 400;
  std::uint32_t audit_every = 0;
};
[[nodiscard]] std::span<const MachineKind> machine_kinds();

/// Something went wrong that may not; the message says what.
class Failure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What one round did.
struct RoundStats {
  std::uint64_t steps = 0;      ///< decode steps, each of one sequence through all layers
  std::uint64_t checked = 0;    ///< rows that were compared with dense attention in float64
  std::uint64_t sequences = 0;  ///< that joined, and left
  std::uint64_t errors = 0;     ///< calls that failed by an injected fault, and were repeated or gave sequences up
  std::uint64_t refused = 0;    ///< calls for which there was no room
  double seconds = 0.0;         ///< in calls of decode steps
};

/// Sequences that join, get prompts, decode and leave, round after round on one runtime.
class Machine {
 public:
  Machine(const MachineKind& kind, std::shared_ptr<const cpu::Workers> workers, std::span<const Toy> toys);

  /// A round is a function of the seed, up to what threads do. All sequences have left at its end.
  /// @throws Failure; sluice::Error that no call may throw
  RoundStats run(std::uint64_t seed);
  [[nodiscard]] const MachineKind& kind() const noexcept { return kind_; }
  /// Destroys the runtime and builds it again.
  void rebuild();

 private:
  MachineKind kind_;
  std::shared_ptr<const cpu::Workers> workers_;
  std::span<const Toy> toys_;
  std::shared_ptr<cpu::HostDevice> device_;  ///< null: embedded
  std::unique_ptr<Runtime> runtime_;
};

inline constexpr AttentionShape kSoakShape{.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
inline constexpr std::uint32_t kSoakTokens = 512;
/// A process that is stopped for longer has not timed out: deadlines measure time in which it ran.
inline constexpr std::chrono::milliseconds kSoakTimeout{5000};

}  // namespace sluice::test
