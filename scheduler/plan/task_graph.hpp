#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "sluice/bucket.hpp"
#include "sluice/step/forward_memory.hpp"
#include "sluice/trace.hpp"

/// The tasks of a forward: one structure that the engine enqueues by, that work is planned and simulated on, and that
/// traces are drawn from. What must come before what follows from what tasks read and write.
namespace sluice::scheduler {

/// What a task does: a verb of ForwardVerbs, or a part of one, or what others do between them.
enum class Verb : std::uint8_t {
  apply,
  fill,
  cluster,
  begin,
  model,  ///< the caller's: what its model does before a layer's attention
  append,
  gather,  ///< by `prefill`, before each window of keys
  prefill,
  rank,
  score,
  list_candidates,  ///< workers': what histories propose
  propose,
  choose,
  split,
  signal,
  choose_far,  ///< workers': policies choose
  attend_far,  ///< workers': far rows are attended in place
  attend,
  attend_whole,
  fetch,
  promote,
  await_answer,
  merge,
  audit,
  end,
};

[[nodiscard]] const char* to_string(Verb verb) noexcept;

/// Who does it. Each does its tasks in their order.
enum class Queue : std::uint8_t {
  stream,   ///< the caller's
  side,     ///< the engine's own stream, see ForwardSide
  caller,   ///< the calling thread, before it enqueues what comes next
  workers,  ///< threads that answer
};
inline constexpr std::size_t kQueues = 4;

/// What tasks hand each other.
enum class Resource : std::uint8_t {
  plan,        ///< the slip, which the host writes before a forward is enqueued
  tables,      ///< rows, chunks and block lists of the forward
  placed,      ///< near rows for what is to come near
  filled,      ///< these, once they hold it: the next plan makes them near
  near_cache,  ///< which rows are near, and when they were attended
  clusters,
  state,     ///< how the forward is going
  tensors,   ///< the layer's, of the caller
  keys,      ///< and values, copies in codes, digests
  queries,   ///< of rows that choose, on both sides
  gathered,  ///< keys and values that chunks attend
  page_choice,
  scores,
  candidates,
  choice,  ///< tokens, by the device
  near_list,
  far_list,
  question,      ///< the mailbox's
  passed,        ///< likewise: how far the stream has come
  far_choice,    ///< by policies of the CPU
  answer,        ///< the mailbox's, with the far part
  opened,        ///< the answer, for what does not wait by itself
  near_part,     ///< partial results
  fetched_part,  ///< likewise
  arrivals,      ///< far rows that are to come near: for the next plan
  out,           ///< outputs
  notes,         ///< of an audit
  outcome,       ///< how the forward ended
};
inline constexpr std::uint32_t kResources = 28;

class Resources {
 public:
  constexpr Resources() noexcept = default;
  constexpr Resources(std::initializer_list<Resource> all) noexcept {
    for (const Resource each : all) add(each);
  }
  constexpr void add(Resource resource) noexcept { bits_ |= bit(resource); }
  constexpr void remove(Resource resource) noexcept { bits_ &= ~bit(resource); }
  [[nodiscard]] constexpr bool has(Resource resource) const noexcept { return (bits_ & bit(resource)) != 0; }

 private:
  [[nodiscard]] static constexpr std::uint32_t bit(Resource resource) noexcept {
    return std::uint32_t{1} << static_cast<std::uint32_t>(resource);
  }
  std::uint32_t bits_ = 0;
};

struct Task {
  Verb verb{};
  Stage stage = Stage::start;  ///< what it counts as, in plans and traces
  Queue queue = Queue::stream;
  bool stamped = false;  ///< its end is that of its stage, in a forward that is traced; `prefill` stamps `gather`
  bool beside = false;   ///< the rest of its layer does not wait for it: it may run in the launch of `merge`
  Resources reads{}, writes{};
  /// Of what it reads, that for which it waits itself: a word of memory, or an event. What another queue writes, and
  /// that is not among these, comes before one that is.
  Resources awaits{};
};

/// What decides which tasks a forward has: of its bucket whether there are rows, never how many.
struct ForwardKind {
  bool prefills = false;
  bool decodes = false;  ///< without either tokens are only brought in
  bool whole = false;    ///< these rows attend everything, and are not split
  bool ranks = false;
  bool chooses = false;  ///< by score or by clusters, on the device
  bool clusters = false;
  bool proposes = false;
  bool promotes = false;
  bool audits = false;
  bool asks = false;            ///< workers may be asked
  bool fetches = false;         ///< far rows over the link
  bool fetches_all = false;     ///< all that the device chose
  bool fetches_chosen = false;  ///< what the CPU chose, too
  Handover handover = Handover::device;
  friend constexpr bool operator==(const ForwardKind&, const ForwardKind&) = default;
};

/// `memory`: of the forward's bucket, as ForwardMemory::teams has it.
[[nodiscard]] ForwardKind kind_of(const ForwardMemory& memory) noexcept;
/// Of one that may ask workers: `fetch_share` as ForwardMemory::fetched_share, on a device whose kernels wait.
[[nodiscard]] ForwardKind kind_of(const Bucket& bucket, bool promotes, std::uint32_t fetch_share) noexcept;

/// Tasks in the order in which they are enqueued: of the plan, behind it before the first layer, of every layer, and
/// behind the last. A value, built once for each kind of forward.
class TaskGraph {
 public:
  explicit TaskGraph(const ForwardKind& kind) noexcept;

  [[nodiscard]] const ForwardKind& kind() const noexcept { return kind_; }
  [[nodiscard]] std::span<const Task> plan() const noexcept { return part(0); }
  [[nodiscard]] std::span<const Task> opening() const noexcept { return part(1); }
  [[nodiscard]] std::span<const Task> layer() const noexcept { return part(2); }
  [[nodiscard]] std::span<const Task> closing() const noexcept { return part(3); }

 private:
  void add(const Task& task) noexcept { tasks_[ends_.back()++] = task; }
  void close(std::size_t part) noexcept { ends_[part] = ends_.back(); }
  void add_plan() noexcept;
  void add_layer() noexcept;
  void add_choice() noexcept;
  void add_workers() noexcept;
  void add_far() noexcept;
  void add_promote(Resources also_reads, bool beside) noexcept;
  [[nodiscard]] std::span<const Task> part(std::size_t index) const noexcept {
    const std::size_t begin = index == 0 ? 0 : ends_[index - 1];
    return std::span(tasks_).subspan(begin, ends_[index] - begin);
  }

  ForwardKind kind_;
  std::array<Task, 32> tasks_{};
  std::array<std::size_t, 4> ends_{};  ///< of the parts; the last one is that of all
};

/// A task of a layer, or of the forward.
struct TaskNode {
  Task task;
  std::uint32_t layer = kNone;  ///< kNone: of none
};

/// `to` begins when `from` has ended: it reads what that wrote, or writes what that read or wrote.
struct TaskEdge {
  std::uint32_t from = 0;  ///< nodes; lower than `to`
  std::uint32_t to = 0;
  Resource by{};
};

/// A forward of so many layers: nodes in their order, and edges in that of `to`.
struct ForwardTasks {
  std::vector<TaskNode> nodes;
  std::vector<TaskEdge> edges;
};
[[nodiscard]] ForwardTasks unrolled(const TaskGraph& graph, std::uint32_t layers);

}  // namespace sluice::scheduler
