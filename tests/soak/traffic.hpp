#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "sluice/runtime.hpp"
#include "tests/runtime/toy.hpp"
#include "tests/soak/machine.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {

struct TrafficOptions {
  bool ordered = false;
  std::uint32_t most_sequences = 4;
  std::uint64_t seed = 0;
  std::function<void()> stop_faults;  ///< of the device; not null
};

/// Random calls of one runtime: sequences of all policies join, get prompts and prefixes, decode in batches and leave.
/// Outputs are compared with dense attention in float64 where the policy attends everything; elsewhere they are finite.
class Traffic {
 public:
  Traffic(Runtime& runtime, std::span<const Toy> toys, const TrafficOptions& options);

  /// @throws Failure; sluice::Error that no call may throw
  RoundStats run();
  /// Ends what is left.
  void leave();

 private:
  struct Sequence {
    SequenceId id;
    std::string policy;
    bool dense = false;
    const Toy* toy = nullptr;
    std::uint32_t at = 0;  ///< tokens that all layers have
  };
  /// One row of an output, and what it should be.
  struct Row {
    std::string policy;
    bool dense = false;
    const Toy* toy = nullptr;
    std::uint32_t layer = 0;
    std::uint32_t token = 0;
    std::size_t call = 0;  ///< index into outputs_
    std::size_t offset = 0;
  };
  using Members = std::vector<Sequence*>;

  void join();
  void import(Sequence& sequence);
  void prompt();
  void decode();
  void leave_one();
  bool step(const Members& members);
  /// All layers of one chunk of each member, `counts` tokens long.
  bool chunk(const Members& members, const std::vector<std::uint32_t>& counts);

  /// Members that may take `tokens` more, a random few of them, at least one; empty if there is none.
  [[nodiscard]] Members some(std::uint32_t tokens);
  /// A buffer that stays until everything queued is done.
  float* keep(std::size_t floats);
  void expect(const Sequence& sequence, std::uint32_t layer, std::uint32_t token, const float* at);

  /// Repeats a call that an injected fault failed. False if there was no room for it, or if it was ordered, which
  /// leaves open whose work failed: then everybody has left.
  template <class Call>
  bool insist(Call&& call, const Members& members);
  void synchronize();
  void give_up(const Members& members);
  void end(SequenceId id);
  void check_outputs();

  Runtime& runtime_;
  std::span<const Toy> toys_;
  TrafficOptions options_;
  Random random_;
  RoundStats stats_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<std::vector<float>> outputs_;  ///< inputs, too
  std::vector<Row> rows_;
};

}  // namespace sluice::test
