#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.hpp"
#include "runtime/background/forward_audit.hpp"
#include "runtime/far/far_question.hpp"
#include "runtime/far/rest.hpp"
#include "runtime/far/sequence_policy.hpp"
#include "runtime/far/shared_calls.hpp"
#include "scheduler/heap_bytes.hpp"
#include "sluice/step/forward_memory.hpp"

namespace sluice::runtime {

/// A row of a forward that the policy of its sequence chooses for, in layers that are not dense.
struct ChoosingRow {
  SequenceId sequence;
  std::shared_ptr<SequencePolicy> policy;
  std::uint32_t index = 0;    ///< among the rows that choose, or the teams
  std::uint32_t audited = 0;  ///< its place in the audit; those of a team's other rows follow
  ForwardRow window;        ///< as the device has it
  std::shared_ptr<ForwardAudit> audit{};  ///< null: the forward is not audited
};

/// What the far part of one list is once its policy has chosen: what the device has listed, then what was chosen.
struct ChosenList {
  std::uint64_t asked = 0;             ///< by this question
  std::vector<std::uint32_t> rows;     ///< as ForwardMemory::far_rows
  std::vector<std::uint32_t> members;  ///< [rows] bit h: query head h attends it; empty: all do
  std::vector<float> scores;           ///< [rows, group] or empty
  Bypass bypass;                       ///< of heads that attend none of what was selected, in no row of a team

  // Scratch.
  SelectionRow selected;
  std::vector<const std::byte*> keys;
  std::vector<const float*> scales;  ///< of these, if rows have some

  [[nodiscard]] std::uint64_t heap_bytes() const noexcept {
    return scheduler::heap_bytes(rows, members, scores, keys, scales, bypass.out, bypass.lse, selected.runs,
                                 selected.tokens, selected.members, selected.scores);
  }
};

/// The part of an answer that comes before attention: policies choose. The rows of a forward are told before its plan
/// goes to the device.
/// For a team of drafts its first row chooses, and gets what it would get alone. All heads of the rows behind it attend
/// what any of its heads chose; a head that all rows would bypass they bypass, each with a mass of its own.
/// Thread safety: `expect`, `forget` and `failure` by the calling thread; the others by any, where they say so.
class FarChoice {
 public:
  /// `timeout`: of each of a thread's waits for another that learns.
  FarChoice(const ForwardMemory& memory, const cpu::Kernels& kernels, std::chrono::milliseconds timeout);

  /// `after`: the forward that it builds on, from whose end on its rows' histories may propose.
  /// @throws Error{Errc::timeout} if a thread that proposed for one of kMostForwards before does not come back, and
  /// nothing was changed
  void expect(std::uint64_t forward, std::uint64_t after, std::vector<ChoosingRow> rows);
  /// It did not get to its end, and nothing of it is asked or answered any more. While no thread learns, unless it
  /// cannot have begun.
  void forget(std::uint64_t forward) noexcept;
  /// Why a policy could not choose in this forward or one before it that was not forgotten.
  struct Failure {
    std::uint64_t forward = 0;  ///< 0: none
    SequenceId sequence{};
    std::string reason;
  };
  [[nodiscard]] Failure failure(std::uint64_t forward);

  /// Item `item` of the choices that a question wants: the list that it is for. What cannot be chosen is not a number.
  /// For every item once, while the question stands; its count of far rows is then that of the list.
  std::uint32_t choose(const FarQuestion& question, std::uint32_t item) noexcept;
  /// What those that choose, a caller for each list, share with threads that have nothing to choose for.
  [[nodiscard]] SharedCalls& calls() noexcept { return calls_; }
  /// Whether a policy chooses for this list. While the question stands.
  [[nodiscard]] bool chooses(const FarQuestion& question, std::uint32_t list) const noexcept;
  /// The list that was chosen for, or null. While the question stands.
  [[nodiscard]] const ChosenList* find(std::uint64_t asked, std::uint32_t list) const noexcept;
  /// A chosen list has been attended: the rest of what its heads get.
  void complete(const FarQuestion& question, const ChosenList& chosen, std::uint32_t list) noexcept;

  /// Learns from forwards up to `good`, until nothing is left to be learnt (true) or `wanted()`. By any thread that has
  /// nothing to answer. A policy that rests (SequencePolicy::rest) is left out, and left to be learnt.
  template <class Wanted>
  [[nodiscard]] bool learn(std::uint64_t good, const Wanted& wanted);

  /// Whether something is left to be proposed for a forward up to `planned`, all before which got to their end as
  /// forward `good` did.
  [[nodiscard]] bool proposes(std::uint64_t good, std::uint64_t planned) const noexcept {
    return std::ranges::any_of(ahead_, [&](const Ahead& each) {
      return each.open(each.claims.load(std::memory_order_acquire), good, planned);
    });
  }
  /// Does so, layer by layer, until nothing is left or `wanted()`. By any thread that has nothing to answer. Returns
  /// whether it could: not while there is a Rest of all. A policy that rests by itself has no row in a forward that is
  /// under way, and nothing to propose.
  template <class Wanted>
  bool propose(std::uint64_t good, std::uint64_t planned, const Wanted& wanted);

  /// No thread learns or proposes for any policy, for the failure of a forward.  @throws Error{Errc::timeout} if one
  /// does not come back, and nothing was changed
  Rest rest(std::chrono::milliseconds timeout) { return {{std::shared_ptr<void>(), &work_}, timeout}; }

  /// Of the heap, that the lists hold. Only between forwards.
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept;
  /// That were chosen, and that the CPU attends.
  [[nodiscard]] std::uint64_t far_tokens() const noexcept { return far_tokens_.load(std::memory_order_relaxed); }
  /// Tokens that the device has listed as far, would fetch, and leaves to the CPU.
  [[nodiscard]] std::uint64_t kept_tokens() const noexcept { return kept_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t scored() const noexcept { return scored_.load(std::memory_order_relaxed); }

 private:
  /// What is to be proposed for a forward, claimed item by item, layers first. While some of it is not there the
  /// forward is under way, and its rows stay as they are.
  struct Ahead {
    static constexpr int kBits = 20;
    /// Number of the forward, 0: none; then its next item: claimed together, so that none of another forward is.
    std::atomic<std::uint64_t> claims{0};
    std::atomic<std::uint64_t> after{0};
    std::atomic<std::uint32_t> items{0};
    /// Threads that claim, or propose what they have claimed: of layers that nobody waits for, beyond the forward's
    /// end. Sequentially consistent with claims: who takes these back finds the thread, or the thread nothing to claim.
    std::atomic<std::uint32_t> busy{0};
    [[nodiscard]] bool open(std::uint64_t claim, std::uint64_t good, std::uint64_t planned) const noexcept {
      const std::uint64_t forward = claim >> kBits;
      return forward != 0 && forward <= planned && after.load(std::memory_order_relaxed) <= good &&
             item_of(claim) < items.load(std::memory_order_relaxed);
    }
    [[nodiscard]] static std::uint32_t item_of(std::uint64_t claim) noexcept {
      return static_cast<std::uint32_t>(claim & ((std::uint64_t{1} << kBits) - 1));
    }
  };
  void propose_item(std::uint64_t forward, std::uint32_t item) noexcept;
  /// Whether the CPU chooses for a row in a layer: if its history was to propose, once it has.
  [[nodiscard]] bool asks(const ChoosingRow& row, std::uint32_t layer) const noexcept;

  /// A thread claims, or proposes, for Ahead::busy.
  class Claiming {
   public:
    explicit Claiming(std::atomic<std::uint32_t>& threads) noexcept : threads_(threads) { ++threads_; }
    ~Claiming() { --threads_; }
    Claiming(const Claiming&) = delete;
    Claiming& operator=(const Claiming&) = delete;

   private:
    std::atomic<std::uint32_t>& threads_;
  };
  struct Place {
    const ChoosingRow* row = nullptr;
    std::uint32_t kv_head = 0;
  };
  [[nodiscard]] Place place_of(std::uint64_t forward, std::uint32_t layer, std::uint32_t item) const noexcept;
  void choose_for(const FarQuestion& question, const Place& place, ChosenList& chosen);
  /// Far rows of the device, and what was selected, one after the other.
  void list(const FarQuestion& question, const Place& place, ChosenList& chosen) const;
  void score(std::uint32_t layer, std::uint32_t list, std::uint32_t kv_head, ChosenList& chosen) const;
  /// Of a list that is complete, for all rows of a team.
  void note(const FarQuestion& question, const Place& place, const ChosenList& chosen) const;
  /// Whether what was chosen is for the device to fetch.
  [[nodiscard]] bool hand_over(std::uint32_t list, ChosenList& chosen) noexcept;
  void write_chosen(std::uint32_t list, ChosenList& chosen, ForwardChosen& header) const noexcept;
  void note_failure(std::uint64_t forward, SequenceId sequence, const char* reason) noexcept;
  [[nodiscard]] std::uint32_t list_of(const Place& place) const noexcept {
    return place.row->index * memory_.shape.kv_heads + place.kv_head;
  }
  /// Of all rows that are known; none if there is no memory for that.
  [[nodiscard]] std::vector<std::shared_ptr<SequencePolicy>> policies() noexcept;

  const ForwardMemory& memory_;
  const cpu::Kernels& kernels_;
  const std::chrono::milliseconds timeout_;
  Workplace work_;  ///< of threads that learn or propose
  struct Rows {
    std::uint64_t forward = 0;
    std::vector<ChoosingRow> rows;  ///< by index
  };
  std::array<Rows, kMostForwards> rows_;  ///< by forward % kMostForwards
  std::array<Ahead, kMostForwards> ahead_;  ///< likewise
  std::vector<ChosenList> lists_;         ///< [decode_rows, kv_heads]
  SharedCalls calls_;                     ///< likewise
  std::atomic<bool> used_{false};         ///< there has been a row
  std::atomic<std::uint64_t> far_tokens_{0};
  std::atomic<std::uint64_t> kept_{0};
  std::atomic<std::uint64_t> scored_{0};
  std::mutex mutex_;  ///< of `rows_` but where a question stands, and of what follows
  std::vector<Failure> failures_;
};

template <class Wanted>
bool FarChoice::learn(std::uint64_t good, const Wanted& wanted) {
  if (!used_.load(std::memory_order_relaxed)) return true;
  const Workplace::Visit visit(work_);
  bool all = visit.goes_on();
  for (const auto& policy : policies()) {
    const Workplace::Visit learning(policy->lessons());
    for (std::uint32_t head = 0; head < memory_.layer_heads() && learning.goes_on(); ++head) {
      if (!visit.goes_on() || wanted()) return false;
      policy->learn(head / memory_.shape.kv_heads, head % memory_.shape.kv_heads, good);
    }
    all = all && learning.goes_on();
  }
  return all;
}

template <class Wanted>
bool FarChoice::propose(std::uint64_t good, std::uint64_t planned, const Wanted& wanted) {
  const Workplace::Visit visit(work_);
  if (!visit.goes_on()) return false;
  for (Ahead& each : ahead_) {
    std::uint64_t claim = each.claims.load(std::memory_order_acquire);
    while (each.open(claim, good, planned)) {
      if (!visit.goes_on()) return false;
      if (wanted()) return true;
      const Claiming proposing(each.busy);
      if (!each.claims.compare_exchange_weak(claim, claim + 1)) continue;
      propose_item(claim >> Ahead::kBits, Ahead::item_of(claim));
      claim = each.claims.load(std::memory_order_acquire);
    }
  }
  return true;
}

}  // namespace sluice::runtime
