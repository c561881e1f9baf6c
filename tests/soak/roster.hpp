#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/soak/model.hpp"
#include "tests/soak/staging.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {

/// An engine, and how it is driven.
struct Driven {
  Engine& engine;
  const Pool& pool;
  Ground& ground;
  std::span<const std::string> policies;  ///< that it serves
  std::uint64_t seed = 0;
  std::uint64_t turns = 0;                     ///< at which sequences come and go, and a forward begins
  std::chrono::microseconds longest_delay{0};  ///< of the device; 0: none
  std::function<void(const Sequence&)> compare_alone;
  std::function<void()> trouble{};  ///< makes a forward fail, perhaps; empty: none does but by the caller's slips
  std::function<void()> calm{};     ///< no call fails from now on; empty: none does
};

/// Waits until the stream has done everything, whether or not it could.
/// @throws Failure if something failed that may not
void drain(const Driven& driven);

/// The sequences that live, in the engine and in the model of it, and all that is done to them between forwards.
class Roster {
 public:
  Roster(const Driven& driven, Random& random, RoundStats& stats);

  [[nodiscard]] std::vector<std::unique_ptr<Sequence>>& all() noexcept { return sequences_; }
  [[nodiscard]] std::size_t size() const noexcept { return sequences_.size(); }
  /// One that rests; null if there is none.
  [[nodiscard]] Sequence* resting();

  /// False if the engine says that there is no room.
  bool begin();
  void fork(Sequence& parent, bool under_its_own_policy);
  void truncate(Sequence& sequence, std::uint32_t tokens);
  /// How many tokens a resting sequence may be left with; more often those that policies of the CPU can go back to.
  [[nodiscard]] std::uint32_t draw_shorter(const Sequence& sequence);
  /// Nothing may be in flight.
  void import(Sequence& sequence);
  void end(Sequence& sequence);
  void watch(Sequence& sequence);
  /// It leaves the engine for memory, where it waits.
  void park(Sequence& sequence);
  /// One of those that wait comes back, if there is room; it is sampled and goes on as one that stayed.
  void resume();
  /// Calls that are refused, and change nothing.
  void misuse(Sequence& sequence);

  /// Whether some layers have windows.
  [[nodiscard]] bool windowed() const noexcept { return !driven_.engine.options().windows.empty(); }
  /// Whether there are blocks for these.
  [[nodiscard]] bool has_room(std::span<const PlanItem> items) const;
  /// Their tokens are planned from now on.
  void plan(Sequence& sequence, std::vector<std::uint32_t> tokens, bool prefill, std::uint32_t drafts);
  /// The device has refused a plan of these: blocks that they would go on in are theirs.
  void plan_in_vain(std::span<const PlanItem> items);
  /// A plan of these came to nothing: their policies may have begun again for it.
  void note_begun(std::span<const PlanItem> items);
  /// What was planned for it has come to its end.
  void settle(const Sequence& sequence);
  [[nodiscard]] std::vector<std::uint32_t> draw(std::uint32_t count);

  /// The engine says what the model says.
  void check();

 private:
  struct Parked {
    std::unique_ptr<Sequence> sequence;
    std::vector<std::byte> area;
    std::uint32_t passed = 0;  ///< pages that layers with windows had not any more
  };
  /// In an engine that has pages of another size it is the same.
  void visit_elsewhere(const Parked& parked);
  /// `shorter` has the first `tokens` tokens of a sequence: whether its policy has begun again may not be known.
  static void note_shorter(const Sequence& sequence, std::uint32_t tokens, Sequence& shorter);
  [[nodiscard]] std::uint64_t stack_bytes() const noexcept;  ///< of a block
  [[nodiscard]] std::uint64_t blocks() const noexcept;
  [[nodiscard]] bool has_slot(const PolicySpec& spec) const;
  Sequence& add(SequenceId id, Sequence sequence);
  void import_layers(const Sequence& sequence, std::span<const std::uint32_t> tokens, std::uint32_t queries,
                     std::uint32_t layers);
  void check_stats();
  void check_audit(const Sequence& sequence) const;

  const Driven& driven_;
  Random& random_;
  RoundStats& stats_;
  Staging staging_;
  PageModel pages_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<Parked> parked_;
  EngineStats last_{};
};

}  // namespace sluice::test
