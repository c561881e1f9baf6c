#include "scheduler/plan/task_graph.hpp"

#include <iterator>
#include <utility>

namespace sluice::scheduler {

using R = Resource;

const char* to_string(Verb verb) noexcept {
  constexpr const char* kNames[] = {"apply",           "fill",         "cluster", "begin",        "model",
                                    "append",          "gather",       "prefill", "rank",         "score",
                                    "list_candidates", "propose",      "choose",  "split",        "signal",
                                    "choose_far",      "attend_far",   "attend",  "attend_whole", "fetch",
                                    "promote",         "await_answer", "merge",   "audit",        "end"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(Verb::end) + 1);
  return static_cast<std::size_t>(verb) < std::size(kNames) ? kNames[static_cast<std::size_t>(verb)] : "unknown";
}

ForwardKind kind_of(const Bucket& bucket, bool promotes, std::uint32_t fetch_share) noexcept {
  const bool splits = bucket.decode_rows != 0 && !bucket.whole;
  return {.prefills = bucket.prefills != 0,
          .decodes = bucket.decode_rows != 0,
          .whole = bucket.whole,
          .ranks = splits && bucket.pages,
          .chooses = splits && (bucket.top_k || bucket.unbounded),
          .promotes = promotes,
          .audits = splits && bucket.audit,
          .asks = splits,
          .fetches = splits && fetch_share != 0,
          .fetches_all = splits && fetch_share == kWholeFetchShare};
}

ForwardKind kind_of(const ForwardMemory& memory) noexcept {
  ForwardKind kind = kind_of(memory.bucket, memory.promotions != 0, memory.fetched_share());
  kind.clusters = memory.cluster_slots != 0;
  kind.proposes = kind.chooses && memory.proposes();
  kind.asks = kind.asks && memory.asks();
  kind.fetches_chosen = kind.fetches && memory.fetches_chosen;
  kind.handover = memory.handover;
  return kind;
}

TaskGraph::TaskGraph(const ForwardKind& kind) noexcept : kind_(kind) {
  add_plan();
  close(0);
  add({.verb = Verb::begin, .reads = {R::tables}, .writes = {R::state}});
  close(1);
  add_layer();
  close(2);
  add({.verb = Verb::end, .reads = {R::state, R::out, R::keys}, .writes = {R::outcome}});
}

/// Far rows that the forward before has listed get near ones, which are filled beside this forward, and are near from
/// the plan behind it on. What histories propose has room of its own for each layer.
void TaskGraph::add_plan() noexcept {
  add({.verb = Verb::apply,
       .reads = {R::plan, R::arrivals, R::filled},
       .writes = {R::tables, R::placed, R::near_cache},
       .awaits = {R::filled}});
  if (kind_.promotes)
    add({.verb = Verb::fill,
         .stage = Stage::promote,
         .queue = Queue::side,
         .reads = {R::placed},
         .writes = {R::filled},
         .awaits = {R::placed}});
  if (kind_.proposes)
    add({.verb = Verb::list_candidates,
         .queue = Queue::workers,
         .reads = {R::plan, R::outcome},
         .writes = {R::candidates},
         .awaits = {R::outcome}});
  if (kind_.clusters) add({.verb = Verb::cluster, .reads = {R::tables}, .writes = {R::clusters}});
}

void TaskGraph::add_layer() noexcept {
  add({.verb = Verb::model, .stamped = true, .reads = {R::out}, .writes = {R::tensors}});
  add({.verb = Verb::append,
       .stage = Stage::append,
       .stamped = true,
       .reads = {R::state, R::tensors},
       .writes = {R::keys, R::queries, R::near_cache, R::out}});
  if (kind_.prefills) {
    add({.verb = Verb::gather,
         .stage = Stage::gather,
         .reads = {R::keys},
         .writes = {R::gathered}});
    add({.verb = Verb::prefill,
         .stage = Stage::prefill,
         .stamped = true,
         .reads = {R::tensors, R::gathered, R::near_cache},
         .writes = {R::out}});
  }
  if (!kind_.decodes) return;
  if (kind_.whole) {
    add({.verb = Verb::attend_whole,
         .stage = Stage::attend,
         .stamped = true,
         .reads = {R::tensors, R::keys},
         .writes = {R::near_cache, R::out}});
    return;
  }
  add_choice();
  if (kind_.asks) add_workers();
  add({.verb = Verb::attend,
       .stage = Stage::attend,
       .stamped = true,
       .reads = {R::near_list, R::near_cache, R::queries},
       .writes = {R::near_part}});
  add_far();
}

/// Rows choose, and what they chose is split. A device may choose in `split` what it has only scored before.
void TaskGraph::add_choice() noexcept {
  Resources chosen{R::near_cache, R::queries};
  if (kind_.ranks) {
    add({.verb = Verb::rank,
         .stage = Stage::rank,
         .stamped = true,
         .reads = {R::keys, R::queries},
         .writes = {R::page_choice}});
    chosen.add(R::page_choice);
  }
  if (kind_.chooses) {
    Resources scored{R::tensors, R::keys, R::queries};
    if (kind_.ranks) scored.add(R::page_choice);
    add({.verb = Verb::score, .stage = Stage::score, .stamped = true, .reads = scored, .writes = {R::scores}});
    if (kind_.proposes)
      add({.verb = Verb::propose,
           .stage = Stage::choose,
           .reads = {R::candidates, R::scores},
           .writes = {R::scores},
           .awaits = {R::candidates}});
    Resources weighed{R::scores, R::queries};
    if (kind_.clusters) weighed.add(R::clusters);
    add({.verb = Verb::choose, .stage = Stage::choose, .stamped = true, .reads = weighed, .writes = {R::choice}});
    chosen.add(R::scores);
    chosen.add(R::choice);
  }
  Resources lists{R::near_list, R::far_list, R::near_cache};
  if (kind_.asks) lists.add(R::question);
  add({.verb = Verb::split, .stage = Stage::split, .stamped = true, .reads = chosen, .writes = lists});
}

void TaskGraph::add_workers() noexcept {
  if (kind_.handover == Handover::host)
    add({.verb = Verb::signal, .stage = Stage::split, .reads = {R::question}, .writes = {R::passed}});
  Resources asked{R::question, R::queries, R::keys};
  if (kind_.ranks) asked.add(R::page_choice);
  add({.verb = Verb::choose_far,
       .stage = Stage::choose_far,
       .queue = Queue::workers,
       .reads = asked,
       .writes = {R::far_choice},
       .awaits = {R::question}});
  add({.verb = Verb::attend_far,
       .stage = Stage::attend_far,
       .queue = Queue::workers,
       .reads = {R::far_list, R::far_choice, R::queries, R::keys},
       .writes = {R::answer}});
}

/// What is far comes back, and all parts are merged. Promotions hide behind the wait of `merge` unless what lies near
/// is to be written down first. Where only the device attends what is far, nothing is awaited behind `fetch`, which
/// alone knows what the CPU has chosen.
void TaskGraph::add_far() noexcept {
  const bool waits = kind_.asks && kind_.handover == Handover::device;
  const auto await = [&] {
    const bool host = kind_.handover == Handover::host;
    Resources reads{R::answer};
    if (host) reads.add(R::passed);
    add({.verb = Verb::await_answer,
         .stage = kind_.fetches_chosen ? Stage::fetch : Stage::merge,
         .queue = host ? Queue::caller : Queue::stream,
         .reads = reads,
         .writes = {R::opened},
         .awaits = reads});
  };
  const bool opens = kind_.asks && !waits;
  if (opens && kind_.fetches_chosen) await();
  const bool promotes = kind_.promotes && !kind_.audits;
  if (promotes && !kind_.fetches_all) add_promote({}, true);
  Resources parts{R::near_part};
  if (kind_.fetches) {
    Resources fetched{R::far_list, R::queries, R::keys};
    if (kind_.fetches_chosen && kind_.asks) fetched.add(waits ? R::far_choice : R::opened);
    add({.verb = Verb::fetch,
         .stage = Stage::fetch,
         .stamped = true,
         .reads = fetched,
         .writes = {R::fetched_part},
         .awaits = kind_.fetches_chosen && waits ? Resources{R::far_choice} : Resources{}});
    parts.add(R::fetched_part);
  }
  if (promotes && kind_.fetches_all)
    add_promote(kind_.fetches_chosen && kind_.asks ? Resources{R::far_choice} : Resources{}, false);
  if (opens && !kind_.fetches_chosen) await();
  if (kind_.asks) parts.add(waits ? R::answer : R::opened);
  add({.verb = Verb::merge,
       .stage = Stage::merge,
       .stamped = true,
       .reads = parts,
       .writes = {R::out},
       .awaits = waits ? Resources{R::answer} : Resources{}});
  if (!kind_.audits) return;
  add({.verb = Verb::audit,
       .stage = Stage::audit,
       .stamped = true,
       .reads = {R::queries, R::out, R::near_list, R::far_list, R::near_cache},
       .writes = {R::notes}});
  if (kind_.promotes) add_promote({}, false);
}

void TaskGraph::add_promote(Resources also_reads, bool beside) noexcept {
  also_reads.add(R::far_list);
  add({.verb = Verb::promote,
       .stage = Stage::promote,
       .stamped = true,
       .beside = beside,
       .reads = also_reads,
       .writes = {R::arrivals, R::near_cache}});
}

namespace {

/// Who has written a resource last, and who has read that.
struct Use {
  std::uint32_t writer = kNone;
  std::vector<std::uint32_t> readers;
};

class Unrolling {
 public:
  void add(const Task& task, std::uint32_t layer) {
    const auto node = static_cast<std::uint32_t>(tasks_.nodes.size());
    tasks_.nodes.push_back({.task = task, .layer = layer});
    for (std::uint32_t i = 0; i < kResources; ++i) {
      const auto resource = static_cast<Resource>(i);
      Use& use = uses_[i];
      if (task.reads.has(resource) || task.writes.has(resource)) edge(use.writer, node, resource);
      if (task.writes.has(resource)) {
        for (const std::uint32_t reader : use.readers) edge(reader, node, resource);
        use.readers.clear();
        use.writer = node;
      } else if (task.reads.has(resource)) {
        use.readers.push_back(node);
      }
    }
  }
  ForwardTasks take() { return std::move(tasks_); }

 private:
  void edge(std::uint32_t from, std::uint32_t to, Resource by) {
    if (from != kNone) tasks_.edges.push_back({.from = from, .to = to, .by = by});
  }

  ForwardTasks tasks_;
  std::array<Use, kResources> uses_{};
};

}  // namespace

ForwardTasks unrolled(const TaskGraph& graph, std::uint32_t layers) {
  Unrolling tasks;
  for (const Task& task : graph.plan()) tasks.add(task, kNone);
  for (const Task& task : graph.opening()) tasks.add(task, kNone);
  for (std::uint32_t layer = 0; layer < layers; ++layer)
    for (const Task& task : graph.layer()) tasks.add(task, layer);
  for (const Task& task : graph.closing()) tasks.add(task, kNone);
  return tasks.take();
}

}  // namespace sluice::scheduler
