#pragma once

#include <vector>

#include "tests/soak/flight.hpp"
#include "tests/soak/roster.hpp"

namespace sluice::test {

/// Continuous batching on one engine: sequences of all policies arrive at random times, get prompts and prefixes,
/// decode tokens and drafts in mixed forwards, several of which are in flight, fork, are cut, given up and end;
/// forwards fail, are taken back and come again. What the engine says is held against the model of it after each step.
class Traffic {
 public:
  explicit Traffic(const Driven& driven);

  /// @throws Failure; sluice::Error that no call may throw
  void run();
  /// Ends what is left.
  void leave();
  [[nodiscard]] const RoundStats& stats() const noexcept { return stats_; }

 private:
  // Between forwards.
  void arrive();
  void depart();
  void change();
  void import(Sequence& sequence);
  void give_up(Sequence& sequence);
  void cut_drafts();

  // Forwards.
  void step();
  /// False if there was nothing to plan, or no room.
  bool start(Slip slip, bool audit);
  [[nodiscard]] Bucket draw_bucket(bool audit);
  void fill(Flight& flight, std::vector<PlanItem>& items, std::vector<std::vector<std::uint32_t>>& tokens);
  [[nodiscard]] std::uint32_t rows_for(Sequence& sequence, const Bucket& left, std::uint32_t max_tokens, bool prefill);
  bool plan(Flight& flight, const std::vector<PlanItem>& items);
  void enqueue(const Flight& flight);
  /// A forward that its caller does not enqueue as it was planned, and what comes of it.
  void slip();
  void replay_without_plan();
  void audit();
  void complete(std::size_t index);
  void land_all();
  void cancel(std::size_t index);

  void succeed(const Flight& flight);
  void fail(const Flight& flight, const std::string& why);
  /// The row of a forward that failed is right up to some layer, and has no output from there on. `broken`: see
  /// ForwardStatus.
  void require_no_more(const Flight& flight, const Part& part, std::uint32_t row, bool broken) const;
  /// Its tokens never were. `ran`: threads may have learnt from them.
  void retract(const Flight& flight, bool ran);
  [[nodiscard]] Flight take(std::size_t index);
  [[nodiscard]] std::uint32_t free_tensors() const;
  [[nodiscard]] bool any_doomed() const noexcept;

  Driven driven_;
  Random random_;
  RoundStats stats_;
  Roster roster_;
  std::vector<ForwardTensors> tensors_;  ///< as many as may be in flight, and one
  std::vector<Flight> flights_;          ///< in the order of their plans
  std::uint64_t finished_ = 0;           ///< the newest forward that was finished, and got to its end
  std::uint64_t unplanned_ = 0;          ///< replays without a plan
  std::uint32_t waiting_ = 0;            ///< sequences that have arrived and found no room
  double next_arrival_ = 0.0;            ///< in steps from now
};

}  // namespace sluice::test
