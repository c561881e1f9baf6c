#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/sequence.hpp"
#include "scheduler/layer_policy.hpp"
#include "scheduler/placement.hpp"
#include "sluice/backend.hpp"
#include "sluice/device.hpp"
#include "sluice/selection.hpp"
#include "sluice/shape.hpp"

namespace sluice::runtime {

/// One KV head of one sequence in the step that runs now. Reused from step to step.
struct HeadWork {
  Sequence* sequence = nullptr;
  LayerState* layer = nullptr;
  std::uint32_t row = 0;      ///< of the sequence in the batch
  std::uint32_t kv_head = 0;
  std::uint32_t tokens = 0;   ///< visible, the new one included
  std::uint32_t ranked = 0;   ///< pages ranked per query head; 0: none
  std::uint32_t scored_pages = 0;  ///< full pages whose scores the host gets; 0 unless the budget is progressive
  std::uint32_t pruned = 0;   ///< values per query head that the device scores to cut them; 0: none
  std::uint32_t open_rows = 0;  ///< tokens of the newest page: the last of these values, scored by their keys
  bool audited = false;       ///< the step's output is held against exact attention

  bool progressive = false;        ///< the device visits its pages, see Progressive
  std::uint32_t visited_near = 0;  ///< tokens visited there that were near already
  std::uint32_t needed_visits = 0;  ///< see HeadPages; kept there when the step is done, as one that fails is repeated

  scheduler::NearSet near;
  std::vector<PageRun> window;           ///< sinks and recent tokens, if no whole pages are attended near
  std::span<const PageRun> near_runs;    ///< what is attended near
  const std::uint32_t* near_frames = nullptr;  ///< slot of each page that near_runs name
  std::uint32_t near_tokens = 0;         ///< in near_runs
  std::vector<std::uint8_t> attended_near;  ///< near.pages as they were attended, if they may change before an audit

  SelectionRow selected;
  Bypass bypass;
  scheduler::SelectCounters counters;
  scheduler::Placement placement;
  std::vector<std::uint32_t> staged;     ///< [pages] staging slot or kNone
  std::vector<Partial> parts;            ///< what merge merges
  std::vector<float> seen;               ///< [far tokens, group] scores of a selection that deferred them

  [[nodiscard]] std::uint32_t mask_words() const noexcept { return (pruned + 31) / 32; }
  [[nodiscard]] HeadPages& pages() const noexcept { return layer->heads[kv_head]; }
};

/// Pages that travel and are attended together: one half of the staging memory.
struct FetchBatch {
  std::vector<PageMove> moves;
  std::vector<AttendTask> tasks;
};

/// Tasks that come behind the hand-over, so that the device may still read them when a queued step has returned.
struct LateTasks {
  std::vector<AttendTask> near;
  std::vector<MergeTask> merges;
  std::vector<MergeTask> audits;
  std::vector<FetchBatch> fetches;
};

/// Memory of a decode step, reserved when sequences begin. Arrays indexed by (batch row, query head) are
/// dense; `far_*` and `query` are pinned, `near_*` is device memory.
class StepBuffers {
 public:
  /// `audited`: the host reads the near partials, too.
  StepBuffers(Device& device, const AttentionShape& shape, std::uint32_t max_pages, bool audited);

  /// Makes room for `batch` sequences; `ranked_pages` per query head, 0 if no policy ranks.
  void reserve(std::uint32_t batch, std::uint32_t ranked_pages);
  /// Makes room for page scores that the host orders by; after `reserve`.
  void reserve_host_scores();
  /// Makes room for estimates of `tokens` tokens per query head, and for what is kept of them.
  void reserve_pruning(std::uint32_t tokens);
  /// Makes room for the partials of `batches` fetch batches.
  void reserve_fetch(std::uint32_t batches);

  /// The query for the CPU (pinned) and for verbs of the device (its own memory).
  [[nodiscard]] float* q(std::uint32_t row, std::uint32_t head) const noexcept { return at(query_, row, head); }
  [[nodiscard]] float* device_q(std::uint32_t row, std::uint32_t head) const noexcept { return at(device_query_, row, head); }
  [[nodiscard]] float* k(std::uint32_t row, std::uint32_t kv_head) const noexcept { return kv_at(key_, row, kv_head); }
  [[nodiscard]] float* v(std::uint32_t row, std::uint32_t kv_head) const noexcept { return kv_at(value_, row, kv_head); }
  [[nodiscard]] Partial near(std::uint32_t row, std::uint32_t head) const noexcept { return partial(near_, row, head); }
  [[nodiscard]] Partial far(std::uint32_t row, std::uint32_t head) const noexcept { return partial(far_, row, head); }
  [[nodiscard]] Partial fetched(std::uint32_t batch, std::uint32_t row, std::uint32_t head) const noexcept;
  /// The merged output in float32 and its lse, for audits.
  [[nodiscard]] float* merged_out(std::uint32_t row, std::uint32_t head) const noexcept { return at(merged_out_, row, head); }
  [[nodiscard]] float* merged_lse(std::uint32_t row, std::uint32_t head) const noexcept;
  /// Page scores, device memory [max_pages].
  [[nodiscard]] float* page_scores(std::uint32_t row, std::uint32_t head) const noexcept;
  /// The same for the host, pinned [group, pages] from the group's first head on.
  [[nodiscard]] float* host_page_scores(std::uint32_t row, std::uint32_t head) const noexcept;
  /// Ranked pages, pinned [ranked_pages]; heads of a group are `ranked_stride` apart.
  [[nodiscard]] std::uint32_t* ranked(std::uint32_t row, std::uint32_t head, std::uint32_t count) const noexcept;

  /// Estimates, device memory; heads of a group are as far apart as the verb writes them.
  [[nodiscard]] float* estimates(std::uint32_t row, std::uint32_t head) const noexcept;
  /// Masks of what is kept, pinned; heads of a group are `words` apart.
  [[nodiscard]] std::uint32_t* kept(std::uint32_t row, std::uint32_t head, std::uint32_t words) const noexcept;

  [[nodiscard]] std::uint32_t max_pages() const noexcept { return max_pages_; }

  // Task arrays that streams refer to: up to the hand-over, and behind it.
  std::vector<AppendTask> append_tasks;
  std::vector<AppendTask> write_tasks;
  std::vector<AttendTask> far_tasks;
  std::vector<ScorePagesTask> score_tasks;
  std::vector<TopKTask> top_k_tasks;
  std::vector<ScoreInt4Task> estimate_tasks;
  std::vector<TopPTask> top_p_tasks;
  LateTasks late;
  std::vector<std::unique_ptr<Event>> copied;    ///< [fetch batches]
  std::vector<std::unique_ptr<Event>> attended;  ///< [fetch batches]

 private:
  using Memory = std::unique_ptr<Buffer>;
  struct Ranking {
    Memory scores, ranked;  // device; pinned
  };
  struct Pruning {
    Memory estimates, kept;  // device; pinned
  };
  [[nodiscard]] Ranking allocate_ranking(std::uint64_t rows, std::uint32_t ranked_pages);
  [[nodiscard]] Pruning allocate_pruning(std::uint64_t rows, std::uint32_t tokens);
  [[nodiscard]] std::uint64_t rows() const noexcept { return std::uint64_t{batch_} * shape_.q_heads; }
  [[nodiscard]] float* at(const Memory& memory, std::uint32_t row, std::uint32_t head) const noexcept;
  [[nodiscard]] float* kv_at(const Memory& memory, std::uint32_t row, std::uint32_t kv_head) const noexcept;
  [[nodiscard]] Partial partial(const Memory& memory, std::uint32_t row, std::uint32_t head) const noexcept;

  Device& device_;
  AttentionShape shape_;
  std::uint32_t max_pages_;
  bool audited_;
  std::uint32_t batch_ = 0;
  std::uint32_t ranked_pages_ = 0;
  std::uint32_t pruned_tokens_ = 0;
  std::uint32_t fetch_room_ = 0;
  Memory query_, key_, value_;        // pinned
  Memory device_query_;
  Memory near_, far_;                 // out [rows, head_dim], then lse [rows]
  std::vector<Memory> fetched_;       // [fetch batches] likewise, device
  Memory merged_out_, merged_lse_;    // pinned; null unless audited
  Ranking ranking_;
  Memory host_page_scores_;           // pinned; null unless a budget is progressive
  Pruning pruning_;
};

}  // namespace sluice::runtime
