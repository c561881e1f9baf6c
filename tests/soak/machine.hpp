#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/engine.hpp"
#include "tests/soak/alone.hpp"
#include "tests/soak/faults.hpp"
#include "tests/soak/ground.hpp"
#include "tests/soak/model.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {

/// An engine and a device, by what they do differently. All else follows from the seed of a round.
struct MachineKind {
  const char* name = "";
  std::uint32_t number = 0;      ///< of its own, the same for ever: a part of the seed of its rounds
  bool at_once = false;          ///< no stream, where it can be: calls return when they are done
  bool crowded = false;          ///< fewer blocks than its sequences want
  bool prompts = false;          ///< prompts choose blocks
  bool audits = false;
  bool stalls = false;   ///< threads that answer are too late at times
  bool learns = false;   ///< only policies that remember what they have attended
  bool breaks = false;   ///< its device finds no memory at times, also while it takes a plan
  bool refuses = false;  ///< its device refuses plans and layers at times
  bool starves = false;  ///< its threads find no memory at times
  bool deep = false;     ///< as many forwards in flight as there may be
  bool windows = false;  ///< some layers have a window
  bool kept = false;     ///< one engine for all rounds; otherwise each round has its own
};
[[nodiscard]] std::span<const MachineKind> machine_kinds();

/// Rounds of traffic on one kind of engine.
class Machine {
 public:
  /// `faults` are those of `world`.
  Machine(const MachineKind& kind, World& world, std::shared_ptr<Faults> faults, const Pool& pool);
  ~Machine();

  /// A round is a function of the seed, up to what threads do; a kept engine is one of `kept_seed`. All sequences have
  /// left at its end.
  /// @param turns  see Driven
  /// @throws Failure; sluice::Error that no call may throw
  RoundStats run(std::uint64_t seed, std::uint64_t kept_seed, std::uint64_t turns);
  /// After a failure: the next round begins anew.
  void abandon() { destroy(); }
  [[nodiscard]] const MachineKind& kind() const noexcept { return kind_; }

 private:
  /// @return how often it failed
  std::uint64_t build(std::uint64_t seed);
  void destroy();
  void make_trouble(Random& random);

  MachineKind kind_;
  World& world_;
  const Pool& pool_;
  std::shared_ptr<Faults> faults_;
  std::vector<std::string> policies_;
  std::unique_ptr<Ground> ground_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Alone> alone_;  ///< null until it is wanted
};

}  // namespace sluice::test
