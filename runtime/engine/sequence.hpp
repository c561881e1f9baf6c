#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/background/job.hpp"
#include "runtime/engine/programs.hpp"
#include "runtime/far/sequence_policy.hpp"
#include "runtime/kv/page_list.hpp"
#include "runtime/kv/prefix_cache.hpp"
#include "scheduler/clusters/cluster_schedule.hpp"
#include "sluice/engine.hpp"
#include "sluice/policy.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice::runtime {

/// A policy that gets to know the prompt of its sequence, which does not change meanwhile.
struct PromptLook {
  std::shared_ptr<Job> job{};  ///< null: none does
  std::shared_ptr<SequencePolicy> policy{};
};

/// What an engine knows of a sequence.
struct Sequence {
  PolicySpec spec;
  std::vector<PageList> lists{};    ///< of each stack of layers
  std::uint32_t sparse_layers = 0;  ///< where its rows choose
  std::uint32_t tokens = 0;         ///< that all layers have
  std::uint32_t planned = 0;        ///< and those of forwards in flight
  /// First token of which layers with windows have rows, where that is within a page: parked with smaller pages.
  std::uint32_t first_kept = 0;
  /// Where the queries of its prompt's newest tokens lie, if its policy chooses on the CPU.
  struct Tail {
    std::uint32_t slot = kNone;  ///< kNone: it does not
    std::uint32_t begin = 0;     ///< positions [begin, end) have theirs there
    std::uint32_t end = 0;
  } tail{};
  /// Clusters that the device makes of its keys, if its policy chooses among them there.
  struct Clusters {
    std::uint32_t slot = kNone;  ///< kNone: it does not
    scheduler::ClusterSchedule schedule{};
    std::uint32_t made = 0;  ///< tokens in clusters that the device has made, or will have when it runs on

    void forget() noexcept { schedule.forget(), made = 0; }
    void truncate(std::uint32_t tokens) noexcept {
      schedule.truncate(tokens);
      made = std::min(made, schedule.clustered());
    }
  } clusters{};
  std::uint32_t prompt_end = 0;  ///< position behind the newest token that was not decoded
  /// Null until a token behind the prompt is decoded.
  std::shared_ptr<SequencePolicy> policy{};
  std::uint32_t policy_tokens = 0;   ///< that there were when it looked at the prompt
  std::uint32_t policy_end = 0;      ///< and behind the newest that it has chosen for
  std::uint32_t policy_chose = 0;    ///< and with the newest token that it has chosen for itself; 0: there is none
  std::uint64_t policy_forward = 0;  ///< and the newest forward then
  PromptLook look{};                 ///< of a policy to come
  PrefillBook bets{};  ///< where its prompts choose blocks of keys, if the engine finds that out
  std::unique_ptr<AuditReport> audit{};  ///< null until something was audited
  std::vector<std::uint32_t> watched{};  ///< tokens, ascending
  /// What its tokens are, if the caller says so.
  struct Names {
    std::vector<std::int32_t> ids{};  ///< of its first tokens, also of some that are still to come
    PrefixPlace known{};              ///< how far its pages are in the prefix cache
    std::uint32_t sparse = kNone;     ///< first token that was decoded without attending everything
  } names{};

  /// The list of the first stack, which says where the device has all of them.
  [[nodiscard]] PageList& pages() noexcept { return lists.front(); }
  [[nodiscard]] const PageList& pages() const noexcept { return lists.front(); }
  /// Of each stack those of all its pages.
  [[nodiscard]] std::vector<std::vector<std::uint32_t>> blocks() const {
    std::vector<std::vector<std::uint32_t>> all;
    for (const PageList& list : lists) all.push_back(list.blocks());
    return all;
  }
  /// Blocks that it holds.
  [[nodiscard]] std::uint64_t held_blocks() const noexcept {
    std::uint64_t held = 0;
    for (const PageList& list : lists) held += list.held().size();
    return held;
  }
  /// Of the heap, that its policies hold.
  [[nodiscard]] std::uint64_t policy_bytes() const noexcept {
    return (policy ? policy->heap_bytes() : 0) + (look.policy ? look.policy->heap_bytes() : 0);
  }
  /// Its policy chooses no more. While no thread learns; the same of the next.
  void drop_policy() noexcept;
  /// It is left with `left` tokens: its policy forgets what it has learnt from others, or all if it cannot tell.
  void shorten_policy(std::uint32_t left) noexcept;
  void end_policy_at(std::uint32_t left) noexcept;
  /// Tokens [planned, planned + count) come, with the queries of the last `queries` of them. `room`: for queries.
  void extend_tail(std::uint32_t count, std::uint32_t queries, std::uint32_t room) noexcept;
  /// Where the queries of a token of this item go; kNone: nowhere.
  [[nodiscard]] std::uint32_t tail_row(const PlanItem& item, std::uint32_t token, std::uint32_t room) const noexcept;
  /// Whether a token that it decodes does not attend everything.
  [[nodiscard]] bool leaves_out() const noexcept { return sparse_layers != 0 && !spec.uses(Source::all); }
};

}  // namespace sluice::runtime
