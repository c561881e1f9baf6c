#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpu/backend.hpp"
#include "cpu/host_pool.hpp"
#include "cpu/workers.hpp"
#include "runtime/audit.hpp"
#include "runtime/background_lane.hpp"
#include "runtime/executor.hpp"
#include "runtime/int4_index.hpp"
#include "runtime/page_index.hpp"
#include "runtime/progressive.hpp"
#include "runtime/prompt.hpp"
#include "runtime/prompt_clusters.hpp"
#include "runtime/residency.hpp"
#include "runtime/sequence.hpp"
#include "runtime/step_buffers.hpp"
#include "scheduler/step_graph.hpp"
#include "sluice/options.hpp"
#include "sluice/runtime.hpp"

namespace sluice::runtime {

/// The parts that a pipeline works with. All outlive it.
struct PipelineParts {
  const RuntimeOptions& options;
  Device& device;
  const cpu::Workers& workers;
  cpu::Backend& host;  ///< verbs on the host's memory
  cpu::HostPool& pool;
  TransferEngine& link;
  Residency& residency;
  std::byte* staging = nullptr;      ///< device memory [staging_pages, page], for pages that pass through
  std::uint32_t staging_pages = 0;   ///< at least 2
  CostRates rates;
};

/// Decode: one layer of one step for a batch of sequences, as a task graph over the three lanes.
/// The nodes' work is in step_nodes.cpp; this class prepares a step, runs it and books it.
class Pipeline final : public PromptHeir, private NodeRunner {
 public:
  explicit Pipeline(const PipelineParts& parts);

  /// Grows the step's buffers; called when a sequence begins, so that steps do not allocate.
  void reserve(std::uint32_t batch, const PolicySpec& spec);

  /// See Runtime::step. `sequences` are checked by the caller.
  void step(const StepArgs& args, std::span<Sequence* const> sequences);

  // What prompts prepare: prompt_heir.cpp
  [[nodiscard]] PromptIndices indices(const Sequence& sequence, const LayerState& layer) override;
  void indexed(const Sequence& sequence, LayerState& layer, std::uint32_t begin, std::uint32_t end) override;
  [[nodiscard]] scheduler::SumRequest sums(const Sequence& sequence, const LayerState& layer,
                                           std::uint32_t tokens) override;
  void complete(Sequence& sequence, LayerState& layer, std::uint32_t tokens, std::vector<float> sums) override;
  [[nodiscard]] bool has_begun(const LayerState& layer) const noexcept {
    return std::any_of(begun_.begin(), begun_.end(), [&](const Begun& begun) { return begun.layer == &layer; });
  }
  /// Waits for what `complete` began, so that the prompt may go on. Throws away what it came to.
  void forget_prompt(Sequence& sequence, LayerState& layer);

  /// Waits for background work and promotions of all sequences, and for queued steps, so that one may be freed.
  void settle(Sequence& sequence);
  /// Nothing refers to the sequence any more, which is settled and ends now.
  void forget(const Sequence& sequence) noexcept;
  /// Loses the sequences of a queued step that has been seen to fail.
  void look_back();
  /// Likewise when all that steps have queued is done: before anything that it refers to moves.
  void settle_tail();
  /// Tells of sequences that were lost since the last time, unless they have ended.
  /// @throws Error{Errc::device} naming them
  void throw_news();

  [[nodiscard]] Executor& executor() noexcept { return executor_; }
  /// Ends background work, before the destructor; see BackgroundLane::stop.
  [[nodiscard]] bool stop() noexcept { return background_.stop(); }

 private:
  /// What the device may still read of the last queued step, and whom it concerns if that fails.
  struct Tail {
    std::uint32_t layer = 0;
    std::vector<Sequence*> sequences;
    std::vector<HeadWork> heads;
    LateTasks tasks;
  };

  /// Background work of one step call: observe and forecast of its layer.
  struct Pending {
    BackgroundLane::Ticket ticket = 0;
    std::uint64_t call = 0;  ///< the step call that posted it
    std::uint32_t layer = 0;
    std::vector<Sequence*> sequences;
  };

  /// Times of what a policy begins with.
  struct BeginTimes {
    std::uint64_t tables_ns = 0;
    std::uint64_t clusters_ns = 0;
  };
  /// A policy that begins in the background.
  struct Begun {
    BackgroundLane::Ticket ticket = 0;
    Sequence* sequence = nullptr;
    LayerState* layer = nullptr;
    std::shared_ptr<BeginTimes> times;
  };

  void issue(scheduler::NodeKind kind) override;

  // What the device does to select: rank_nodes.cpp
  [[nodiscard]] bool ranks_pages(const PolicySpec& spec, std::uint32_t layer) const;
  [[nodiscard]] bool prunes(const PolicySpec& spec, std::uint32_t layer) const;
  [[nodiscard]] bool estimates(const PolicySpec& spec, std::uint32_t layer) const;
  void update_indices(Sequence& sequence, LayerState& layer, Deadline deadline);
  void plan_ranking(HeadWork& work) const;
  [[nodiscard]] ScoreInt4Task estimate_task(const HeadWork& work) const;
  /// Values of a row that a policy of this spec may want to be scored, at most.
  [[nodiscard]] std::uint32_t most_pruned(const PolicySpec& spec) const;
  void prune();

  // Before the graph: pipeline.cpp
  [[nodiscard]] const scheduler::StepGraph& graph(const scheduler::StepShape& shape);
  void collect_layer(std::uint32_t layer, Deadline deadline);
  void collect_older(Deadline deadline);
  void collect_front(Deadline deadline);
  void prepare(Sequence& sequence, Deadline deadline);
  /// `sums` as in `complete`.
  BeginTimes begin_policy(Sequence& sequence, LayerState& layer, std::uint32_t tokens, std::vector<float> sums,
                          Deadline deadline);
  void sum_attention(const LayerState& layer, std::uint32_t tokens, const scheduler::SumRequest& wanted,
                     std::vector<float>& sums);
  void collect_begun(LayerState& layer, Deadline deadline);
  void begin_decoding(Sequence& sequence, LayerState& layer, Deadline deadline);
  void plan_head(HeadWork& work);
  void list_near_runs(HeadWork& work);
  void list_near_pages(HeadWork& work);
  /// The host's page scores of a head with a progressive budget; else empty.
  [[nodiscard]] std::span<const float> page_scores(const HeadWork& work) const;

  void run(const scheduler::StepShape& shape, Executor::Finish finish);
  void recover(const std::exception& error);
  void keep_tail(std::span<Sequence* const> sequences) noexcept;
  void lose_tail();
  void lose(Sequence& sequence, const std::string& reason);

  // The graph's nodes: step_nodes.cpp and fetch_nodes.cpp
  void append();
  void rank_pages();
  void hand_over();
  void attend_near();
  void queue_near();
  void write_through();
  void select();
  void place();
  void fetch();
  void copy_batch(std::uint32_t index);
  void attend_fetched();
  void attend_far();
  void progress();
  void merge();
  void merge_for_audit();

  // After the graph: step_books.cpp, and pipeline.cpp for the background work
  void audit();
  void book(std::span<Sequence* const> sequences, Clock::duration spent);
  void book_head(const HeadWork& work);
  void note_far();
  void post_observe(std::span<Sequence* const> sequences);

  PipelineParts parts_;
  AttentionShape shape_;
  PageLayout layout_;
  Executor executor_;
  StepBuffers buffers_;
  std::deque<Pending> pending_;
  std::vector<Begun> begun_;
  std::uint64_t calls_ = 0;  ///< of step
  std::uint32_t microbatch_ = 0;  ///< largest of any sequence whose pages the device visits
  std::vector<std::span<const float>> page_scores_;  // scratch
  bool scores_for_host_ = false;  ///< some sequence had a progressive budget
  std::deque<std::pair<scheduler::StepShape, scheduler::StepGraph>> graphs_;
  PageIndex index_;
  PromptClusters clusters_;
  std::unique_ptr<Stream> index_stream_;  ///< null until a policy clusters on the device; works in clusters_
  Progressive progressive_;
  Int4Index copies_;
  Auditor auditor_;

  // The step that runs now.
  const StepArgs* args_ = nullptr;
  std::uint32_t layer_ = 0;
  std::vector<HeadWork> heads_;  ///< [batch, kv_heads]
  Tail tail_;
  std::vector<const Sequence*> news_;  ///< lost, and nobody was told
  bool near_waits_ = false;            ///< attend_near is queued while the workers select
  bool selects_ = false;               ///< the graph has select and attend_far
  bool audited_ = false;               ///< some head is
  std::uint32_t fetch_batches_ = 0;

  BackgroundLane background_;  ///< last: it stops before anything that its work uses goes
};

}  // namespace sluice::runtime
