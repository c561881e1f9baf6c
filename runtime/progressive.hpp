#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cpu/workers.hpp"
#include "runtime/residency.hpp"
#include "runtime/step_buffers.hpp"
#include "scheduler/policy/page_order.hpp"
#include "sluice/backend.hpp"
#include "sluice/device.hpp"
#include "sluice/progress.hpp"

namespace sluice::runtime {

/// Progressive attention on the device (PSA section 3.3): in every turn each KV head that has not attended enough takes
/// the next pages of its order. Pages that are near are attended where they are; the others get slots of the near pool,
/// where they stay until they are the least recent, or pass through staging memory if no slot can be had.
///
///   link    | copy turn 0 | copy turn 1 | copy turn 2 ...
///   device                | attend, verify turn 0 | attend, verify turn 1 ...
///   host                                          ^ reads the verdicts of turn 0, issues turn 2
///
/// The host issues a turn when it knows the verdicts of the one kInFlight before it, not when it happens to see them:
/// which pages are attended does not depend on timing. A head that has enough has therefore up to kInFlight - 1 turns
/// more queued than it needs; they only add coverage, and are counted as overshoot.
///
/// A turn costs tens of microseconds whatever it brings, so turns grow: beyond their first pages they take a share of
/// what the head has visited, and the first two take half and a quarter of what it needed in the last step, which is
/// about what it needs again. The verdict on a turn is that on one large microbatch, which quantises where a head stops
/// and changes nothing else, unless the rule looks at the last microbatch alone: there a turn is a microbatch.
class Progressive {
 public:
  struct Parts {
    Device& device;
    Stream& stream;  ///< the device's
    TransferEngine& link;
    Residency& residency;
    const StepBuffers& buffers;
    const cpu::Workers& workers;
    std::byte* staging = nullptr;
    std::uint32_t staging_pages = 0;  ///< at least kInFlight
    std::chrono::milliseconds timeout{};
  };
  Progressive(const AttentionShape& shape, const PageLayout& layout, const Parts& parts)
      : shape_(shape), layout_(layout), parts_(parts) {}

  /// Makes room for `batch` sequences whose microbatches have up to `microbatch` pages.
  void reserve(std::uint32_t batch, std::uint32_t microbatch);

  /// Attends for those of `heads` that are progressive: appends to their parts and tells what was visited. The page
  /// scores must have come, and near attention must have been queued.
  /// @param scores  of all heads, see HeadContext::page_scores
  /// @throws Error{Errc::device} if a copy or a verb failed, Error{Errc::timeout}; the step may be repeated.
  void run(std::span<HeadWork> heads, std::span<const std::span<const float>> scores);

  /// Time that the last run has spent waiting for verdicts.
  [[nodiscard]] Clock::duration waited() const noexcept { return waited_; }

  /// Waits for the pages that the last turns of the last run brought, which are pinned until then. Before anything else
  /// claims slots, and before their sequences go.
  void settle(Deadline deadline);

 private:
  static constexpr std::uint32_t kInFlight = 2;
  /// Turns whose partials are kept apart until they are folded into one.
  static constexpr std::uint32_t kFold = 8;
  /// Visited pages per page that the next turn takes: what a head visits beyond its need is about twice that share.
  static constexpr std::uint32_t kGrowth = 8;
  /// Pages of a turn at most, unless a microbatch has more.
  static constexpr std::uint32_t kMostPages = 256;

  /// What one head attends in one turn. Staged pages are a task of their own, for they lie elsewhere.
  struct Pages {
    std::vector<PageRun> runs;  ///< by index into `frames`; whole pages first
    std::vector<std::uint32_t> frames;
    std::uint32_t whole = 0;
    void clear();
    void add_whole(const PageRun& run, std::uint32_t frame);
    void add_part(const PageRun& run, std::uint32_t frame);
  };
  struct Batch {
    Pages staged;
    Pages near;
    std::vector<std::uint32_t> hits;  ///< slots that were near already, pinned meanwhile
    std::uint32_t pages = 0;          ///< of the order
    std::uint32_t visits = 0;         ///< pages of the order up to the end of this turn
  };
  struct Head {
    HeadWork* work = nullptr;
    std::uint32_t index = 0;
    scheduler::PageOrder order;
    std::uint32_t turns = 0;  ///< that it took part in
    std::uint32_t visits = 0;  ///< pages of the order
    bool enough = false;
    std::uint32_t needed = 0;  ///< visits at the end of the turn that was enough
    std::uint32_t running = 0;   ///< which of the two running partials was written last
    std::vector<Partial> parts;  ///< of what was attended and not folded
    std::array<std::vector<Partial>, kInFlight> folding;
    std::array<Batch, kInFlight> batches;
    std::vector<PageRun> visited;
    std::uint32_t hit_tokens = 0;
  };
  /// One turn: what its queued work refers to.
  struct Turn {
    std::uint64_t tag = 0;
    std::vector<Head*> heads;
    std::vector<AttendTask> attends;
    std::vector<ProgressTask> verdicts;
    std::vector<MergeTask> folds;
    std::vector<PageMove> staged_moves;
    std::vector<std::pair<Sequence*, LayerState*>> moved;  ///< whose near pages are on their way
    std::unique_ptr<Event> staged;
    std::unique_ptr<Event> verified;
  };

  void begin(std::span<HeadWork> heads, std::span<const std::span<const float>> scores);
  void loop(Deadline deadline);
  [[nodiscard]] bool issue(std::uint64_t number);
  [[nodiscard]] std::uint32_t turn_pages(const Head& head) const noexcept;
  void gather(Head& head, std::uint32_t slot, Turn& turn, std::vector<PageMove>& moves);
  [[nodiscard]] bool place_next(Head& head, Batch& batch, std::uint32_t slot, Turn& turn, std::vector<PageMove>& moves);
  void bring(Head& last, Turn& turn, std::vector<PageMove>& moves);
  void queue_fold(Head& head, std::uint32_t slot, Turn& turn);
  void queue_pages(Head& head, std::uint32_t slot, Turn& turn);
  void queue(Turn& turn);
  void await(const Turn& turn, std::uint32_t slot, Deadline deadline);
  void retire(std::uint64_t number, Deadline deadline);
  void unpin_hits() noexcept;
  void finish();

  [[nodiscard]] std::uint64_t* verdict(std::uint32_t slot, const Head& head) const noexcept;
  [[nodiscard]] float* masses(std::uint32_t slot, const Head& head) const noexcept;
  [[nodiscard]] float* bounds(std::uint32_t slot, const Head& head) const noexcept;
  [[nodiscard]] Partial partial(std::uint32_t set, const Head& head) const noexcept;

  AttentionShape shape_;
  PageLayout layout_;
  Parts parts_;
  std::uint32_t room_ = 0;        ///< KV heads
  std::uint32_t most_pages_ = 0;  ///< of a turn of one head
  std::uint64_t tag_ = 0;
  Clock::duration waited_{};
  std::vector<Head> all_heads_;  ///< reused
  std::span<Head> heads_;        ///< of this step
  std::array<Turn, kInFlight> turns_;
  std::vector<std::pair<Sequence*, LayerState*>> unsettled_;
  std::unique_ptr<Buffer> states_;    // device [KV heads, group]
  std::unique_ptr<Buffer> masses_;    // device [kInFlight, KV heads, most_pages_ + 1, group]
  std::unique_ptr<Buffer> partials_;  // device [2 * kFold + 2] sets of out [query heads, head_dim], lse [query heads]
  std::unique_ptr<Buffer> verdicts_;  // pinned [kInFlight, KV heads]
  std::unique_ptr<Buffer> bounds_;    // pinned [kInFlight, KV heads, group]
};

}  // namespace sluice::runtime
