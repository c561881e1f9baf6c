#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/far/host_kv.hpp"
#include "runtime/far/rest.hpp"
#include "runtime/far/shared_calls.hpp"
#include "scheduler/layer_policy.hpp"
#include "sluice/policy.hpp"
#include "sluice/step/forward_memory.hpp"

namespace sluice::runtime {

/// The policies of one sequence, one per layer, which choose on the CPU. Every KV head of a layer has its own state: it
/// chooses in a forward, and learns from that once the forward is known to have got to its end, before it chooses
/// again: in between if a thread has time, else then.
/// Thread safety: any for different heads; `choose` of one head by one thread at a time.
class SequencePolicy {
 public:
  /// `blocks`: of the sequence, in order. Those behind the prompt are read where they are: they do not move, and do not
  /// change while there is something to choose or to learn.
  SequencePolicy(const PolicySpec& spec, const ForwardMemory& memory, const std::vector<std::uint32_t>& blocks);

  /// Another one that has learnt what this one has, on its own: for a sequence that begins with the same tokens, whose
  /// blocks it reads once it is told which. While no thread chooses or learns, and nothing is left to be learnt.
  [[nodiscard]] std::shared_ptr<SequencePolicy> clone() const;
  /// As `blocks` of the constructor.
  void read_from(const std::vector<std::uint32_t>& blocks) noexcept { blocks_ = blocks.data(); }

  [[nodiscard]] const std::uint32_t* blocks() const noexcept { return blocks_; }
  /// The scores that come with a choice are not what its keys would give.
  [[nodiscard]] bool corrects_scores() const noexcept { return corrects_scores_; }
  /// Something could not be learnt: it is to begin again.
  [[nodiscard]] bool spoilt() const noexcept { return spoilt_.load(std::memory_order_relaxed); }

  /// What is known of a prompt when its first token is decoded: the queries of its newest tokens lie in rows
  /// [tail, tail + room) of ForwardMemory::tails, position p in row tail + p % room.
  struct Prompt {
    std::uint32_t tokens = 0;
    std::uint32_t queries = 0;  ///< of the newest tokens
    std::uint32_t tail = 0;
    std::uint32_t room = 0;
  };
  /// What comes before anything is chosen: a look at the prompt by each head of each layer, once, by any threads. What
  /// it reads does not change meanwhile. Then `begun`.
  void look(const Prompt& prompt, std::uint32_t layer_head);
  void begun() noexcept { prompt_blocks_ = {}; }

  /// What a row asks for, or the first row of a team for all of it. Behind queries of a KV head are those of the rows
  /// behind it.
  struct Asked {
    std::uint64_t forward = 0;
    std::uint32_t layer = 0;
    std::uint32_t kv_head = 0;
    ForwardRow row;            ///< whose tokens are visible; of a team, those before it and the first of its own
    std::uint32_t drafts = 1;  ///< Bucket::drafts: rows of a KV head's queries, wanted or not
    const float* q = nullptr;  ///< of all KV heads: [kv_heads, drafts, group, head_dim]
    const float* rehearsed = nullptr;               ///< likewise; null: there are none
    std::span<const std::uint32_t> ranked_pages{};  ///< [group, page_picks]
    /// Of all KV heads if only these are wanted: [group, pages] of each, `page_scores_stride` behind the one before.
    const float* page_scores = nullptr;
    std::uint64_t page_scores_stride = 0;
    std::chrono::milliseconds timeout{1'000};  ///< of a wait for a thread that learns
    SharedCaller caller{};                     ///< for what is much to read
  };
  /// Chooses, having learnt all that there is to learn.  @throws Error{Errc::timeout} if a thread that does so does not
  /// come back.
  void choose(const Asked& asked, SelectionRow& row, Bypass& bypass, scheduler::SelectCounters& counters);
  /// Writes down what the history of a head proposes for the row of a forward, having learnt all that there is to learn
  /// from forwards before it, which got to their end. What the device then chooses is chosen once more, from
  /// ForwardMemory::proposed_q, when there is something to learn from it.
  void propose(std::uint64_t forward, std::uint32_t layer, std::uint32_t kv_head, const ForwardRow& row,
               std::chrono::milliseconds timeout) noexcept;
  /// Where threads learn for it that do so when they have time.
  [[nodiscard]] Workplace& lessons() noexcept { return lessons_; }
  /// None of these learns for it while the result lives. For a sequence that no forward
  /// in flight refers to: nobody chooses or proposes for it either, and others go on.
  /// @throws Error{Errc::timeout} if one does not come back, and nothing was changed
  static Rest rest(const std::shared_ptr<SequencePolicy>& policy, std::chrono::milliseconds timeout) {
    return {{policy, &policy->lessons_}, timeout};
  }

  /// Learns what a head chose in a forward up to `good`, unless another thread does.
  void learn(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t good) noexcept;
  /// Learns what all heads chose in forwards up to `good`. While no thread learns.
  void learn_all(std::uint64_t good) noexcept;
  /// What was chosen in `forward` came to nothing, and is not to be learnt any more. While no thread learns.
  void forget(std::uint64_t forward) noexcept;
  /// Whether `truncate` to that many tokens can be: see LayerPolicy::can_truncate.
  [[nodiscard]] bool can_truncate(std::uint32_t tokens) const noexcept;
  /// As if nothing had ever been chosen with more than `tokens` visible tokens. While no thread chooses or learns. Each
  /// head takes its steps back when it chooses next, by the thread that it does so on.
  void truncate(std::uint32_t tokens) noexcept;
  /// There are no more than `tokens` tokens now, which nothing that stays was chosen behind: what heads have still to
  /// take back ends there, too. While no thread chooses or proposes; others may learn.
  void keep_at_most(std::uint32_t tokens) noexcept;
  /// Of the heap: what each head held when it last began, chose or learnt.
  [[nodiscard]] std::uint64_t heap_bytes() const noexcept;
  /// Nothing is learnt any more, by any thread, and all is freed. Only between forwards, while no thread learns.
  void close() noexcept;

 private:
  /// Number of the forward whose choice is to be learnt from, or 0; with kBusy, a thread does that.
  using Lesson = std::atomic<std::uint64_t>;
  static constexpr std::uint64_t kBusy = std::uint64_t{1} << 63;
  struct HeadState {
    Lesson lesson{0};
    std::uint32_t tokens = 0;    ///< that were visible when it chose
    std::uint32_t keep = kNone;  ///< of these, and of those before; kNone: all
    ForwardRow ahead{};          ///< `proposed` is not 0: the device chose for this row, and the head has not yet
    std::atomic<std::uint64_t> heap_bytes{0};
  };

  class Layer;
  SequencePolicy(const SequencePolicy& other, std::vector<std::unique_ptr<scheduler::LayerPolicy>> layers);
  [[nodiscard]] HeadState& state_of(std::uint32_t layer, std::uint32_t kv_head) noexcept {
    return heads_[layer * memory_.shape.kv_heads + kv_head];
  }
  /// The keys and values of a head, `tokens` of which there are.
  [[nodiscard]] HostKv reader(std::uint32_t layer, std::uint32_t kv_head, const std::uint32_t* blocks,
                              std::uint32_t tokens) const;
  void begin_head(const Prompt& prompt, std::uint32_t layer, std::uint32_t kv_head);
  /// Calls visit(head, layer policy, kv_head) for every head of a layer that chooses.
  template <class Visit>
  void for_each_head(const Visit& visit) const;
  /// All that there is to learn has been, and what was taken back is forgotten.
  void catch_up(HeadState& mine, std::uint32_t layer, std::uint32_t kv_head, std::uint64_t forward,
                std::chrono::milliseconds timeout);
  /// What the device chose.
  void choose_again(HeadState& state, std::uint32_t layer, std::uint32_t kv_head, HostKv& kv);
  void learn_now(HeadState& state, std::uint32_t layer, std::uint32_t kv_head) noexcept;
  /// By the thread that learns or chooses for the head.
  void weigh(std::uint32_t layer, std::uint32_t kv_head) noexcept;

  const ForwardMemory& memory_;
  const std::uint32_t* blocks_;
  std::vector<std::uint32_t> prompt_blocks_;  ///< its own: a thread that is lost may read them for longer than any call
  bool corrects_scores_;
  bool copies_open_page_;
  std::vector<std::unique_ptr<scheduler::LayerPolicy>> layers_;  ///< null: attends everything
  std::vector<HeadState> heads_;                                 ///< [layers, kv_heads]
  std::atomic<bool> spoilt_{false};
  Workplace lessons_;
};

}  // namespace sluice::runtime
