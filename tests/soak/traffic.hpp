#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sluice/error.hpp"
#include "tests/soak/flight.hpp"
#include "tests/soak/roster.hpp"

namespace sluice::test {

/// Continuous batching on one engine: sequences of all policies arrive at random times, get prompts and prefixes,
/// decode tokens and drafts in mixed forwards, several of which are in flight, fork, are cut, given up and end;
/// forwards fail, are taken back and come again. What the engine says is held against the model of it after each step.
class Traffic {
 public:
  explicit Traffic(const Driven& driven);
  /// What was enqueued has run, if that can be.
  ~Traffic();
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;

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
  /// Makes it one of those that are recorded, perhaps.
  void draw_recorded(Flight& flight);
  void fill(Flight& flight, std::vector<PlanItem>& items, std::vector<std::vector<std::uint32_t>>& tokens);
  [[nodiscard]] std::uint32_t rows_for(Sequence& sequence, const Bucket& left, std::uint32_t max_tokens, bool prefill);
  bool plan(Flight& flight, const std::vector<PlanItem>& items);
  /// What came of it is nothing but that nothing was planned. False if it is something else.
  bool refused(const Error& error, const std::vector<PlanItem>& items);
  void make_room();
  /// False if the device refused: then it was taken back.
  bool enqueue(const Flight& flight);
  void enqueue_layers(const Flight& flight, std::uint32_t count);
  void enqueue_as(const Flight& flight);
  void enqueue_layer(std::uint32_t tensors, const Bucket& bucket, std::uint32_t layer, void* handle);
  /// Keeps the device, perhaps.
  void delay(void* handle);
  /// Recorded when it is wanted first; null where nothing is.
  [[nodiscard]] Recorded* recorded(std::uint32_t bucket, std::uint32_t tensors);
  /// A forward that its caller does not enqueue as it was planned, and what comes of it.
  void slip();
  void replay_without_plan();
  void audit();
  void complete(std::size_t index);
  void land_all();
  void cancel(std::size_t index);

  void succeed(const Flight& flight);
  /// Its outputs are there.
  void await_outputs(const Flight& flight) const;
  void fail(const Flight& flight, const std::string& why);
  /// A thread that chooses found no memory: this one and all behind the one that it was for were taken back.
  void retract_unchosen(Flight flight, const std::string& why);
  /// The row of a forward that failed is right up to some layer, and has no output from there on. `partly`: of the
  /// last of these there may be a part.
  void require_no_more(const Flight& flight, const Part& part, std::uint32_t row, bool partly) const;
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
  std::vector<std::unique_ptr<Event>> enqueued_;  ///< of what was enqueued last with each of these; empty: at once
  std::vector<Bucket> buckets_;                   ///< of tokens that are decoded, which are recorded
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::unique_ptr<Recorded>> recorded_;  ///< of bucket and tensors
  std::vector<Flight> flights_;          ///< in the order of their plans
  std::uint64_t finished_ = 0;           ///< the newest forward that was finished, and got to its end
  std::uint64_t unplanned_ = 0;          ///< replays without a plan
  std::uint32_t waiting_ = 0;            ///< sequences that have arrived and found no room
  double next_arrival_ = 0.0;            ///< in steps from now
};

}  // namespace sluice::test
