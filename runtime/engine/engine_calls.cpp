// What the calls of an Engine do.
#include <algorithm>
#include <optional>
#include <string>

#include "runtime/engine/parking.hpp"

namespace sluice {
namespace {

/// Why a forward that ended did not get to its end.
std::string reason_of(ForwardStatus status) {
  switch (status) {
    case ForwardStatus::abandoned:
      return "the far part was not answered in time; with more threads or a longer answer_timeout that may not recur";
    case ForwardStatus::orphaned: return "the forward before it failed";
    case ForwardStatus::mismatched: return "what ran was captured or enqueued for another bucket; use the plan's";
    case ForwardStatus::skipped:
      return "it was begun twice, or the next one was planned before all its layers were enqueued or its graph "
             "replayed";
    case ForwardStatus::broken: return "the device could not do a part of it; its stream says why";
    default: return "it was taken back";
  }
}

}  // namespace

void Engine::Impl::import_prefix(SequenceId id, LayerId layer, const TensorView& k, const TensorView& v, void* stream,
                                 const TensorView& q) {
  require_uncaptured("import_prefix", stream);
  const AttentionShape& shape = options.shape;
  if (k.tokens == 0 || k.tokens > options.import_rows)
    throw Error(Errc::invalid_argument, "import_prefix: k has " + text(k.tokens) + " tokens; give it 1 to " +
                                            text(options.import_rows) + ", or raise EngineOptions::import_rows");
  require_tensor(k, "k", k.tokens, shape.kv_heads, shape.head_dim);
  require_values(v, k.tokens);
  if (q.tokens > k.tokens)
    throw Error(Errc::invalid_argument, "import_prefix: q has " + text(q.tokens) + " tokens, and k " + text(k.tokens) +
                                            "; give it the newest tokens' queries");
  if (q.tokens != 0) require_tensor(q, "q", q.tokens, shape.q_heads, shape.head_dim);
  const Bucket bucket{
      .decode_rows = 0, .prefill_rows = options.import_rows, .max_tokens = memory.largest().largest.max_tokens};
  if (layer.value == 0) {
    if (imports(id)) take_back(importing);
    Sequence& sequence = resting(id, "import_prefix");
    if (importing != 0)
      throw Error(Errc::invalid_argument,
                  "import_prefix: another import is under way; give it its other layers, or end "
                  "its sequence");
    if (!programs.empty())
      throw Error(Errc::invalid_argument, "import_prefix: forward " + text(programs.newest().forward) +
                                              " is under way; finish or cancel it first");
    std::vector<Wanted> wanted{{.sequence = &sequence, .item = {.sequence = id, .tokens = k.tokens, .prefill = true}}};
    parking->release_late();
    require_room(wanted, bucket.max_tokens);
    importing = send(std::move(wanted), bucket, stream, q.tokens);
    importing_queries = q.tokens;
  } else if (importing == 0 || programs.newest().items.front().sequence != id ||
             programs.newest().items.front().tokens != k.tokens || q.tokens != importing_queries ||
             next_layer != layer.value || layer.value >= shape.layers) {
    throw Error(Errc::invalid_argument,
                "import_prefix: layers come in order, with as many tokens and queries as layer 0; begin again with "
                "that");
  }
  enqueue_layer(memory.of(bucket), {.layer = layer.value, .q = q, .k = k, .v = v, .out = {}, .stream = stream});
  if (next_layer < shape.layers) return;
  const bool done = await_end(importing) == ForwardStatus::done;
  std::optional<runtime::Rest> rest;
  if (!done) rest.emplace(await_idle());
  const runtime::Program program = retire(importing, done);
  if (done) return look_ahead(program);
  throw Error(Errc::device, "import_prefix: its layers did not run one after the other; import it again");
}

Batch Engine::Impl::plan(std::span<const PlanItem> items, const Bucket& asked, void* stream) {
  require_uncaptured("plan", stream);
  if (importing != 0)
    throw Error(Errc::invalid_argument, "plan: an import is under way; give it its other layers, or end its sequence");
  if (programs.full())
    throw Error(Errc::invalid_argument, "plan: " + text(options.in_flight) +
                                            " forwards are planned and not finished; finish or cancel one, or raise "
                                            "EngineOptions::in_flight");
  require_noted();
  const Bucket bucket = resolved(asked, "plan");
  require_auditable(bucket);
  std::vector<Wanted> wanted = checked(items, bucket);
  parking->release_late();
  require_room(wanted, bucket.max_tokens);
  begin_policies(wanted);
  // Where the device fetches all that is far, it asks for choices alone.
  const bool asks = !bucket.whole && (memory.largest().fetch_share != kWholeFetchShare ||
                                      std::ranges::any_of(wanted, [](const Wanted& each) {
                                        return !each.item.prefill && each.sequence->tail.slot != kNone;
                                      }));
  const Batch batch{.forward = send(std::move(wanted), bucket, stream), .bucket = bucket};
  if (bucket.decode_rows != 0 && asks) {
    far.wake(batch.forward);
    if (watchdog) watchdog->wake(batch.forward);
  }
  return batch;
}

void Engine::Impl::attend(const Bucket& asked, LayerId layer, const AttendArgs& args) {
  const Bucket bucket = resolved(asked, "attend");
  const AttentionShape& shape = options.shape;
  void* const stream = args.stream;
  require_tensor(args.q, "q", bucket.rows(), shape.q_heads, shape.head_dim);
  require_tensor(args.k, "k", bucket.rows(), shape.kv_heads, shape.head_dim);
  require_values(args.v, bucket.rows());
  require_tensor(args.out, "out", bucket.rows(), shape.q_heads, shape.out_dim());
  if (importing != 0)
    throw Error(Errc::invalid_argument, "attend: an import is under way; give it its other layers, or begin it again");
  if (next_layer == kNone)
    throw Error(Errc::invalid_argument, "attend: a layer of this forward could not be enqueued; cancel it");
  if (layer.value >= shape.layers || (layer.value != 0 && layer.value != next_layer))
    throw Error(Errc::invalid_argument,
                "attend: layer " + text(layer.value) + " is not the next; layers come in order");
  require_rehearsed(bucket, layer, args.rehearsed);
  const bool scored = require_scores(bucket, layer, args.scores);
  require_capturable(bucket, stream);
  const ForwardMemory m = memory.of(bucket).in(layer.value);
  const ForwardLayer call{.layer = layer.value,
                          .q = args.q,
                          .k = args.k,
                          .v = args.v,
                          .rehearsed = bucket.rehearsed && layer.value != 0 ? args.rehearsed : TensorView{},
                          .scores = scored ? args.scores : TensorView{},
                          .out = args.out,
                          .lse = args.lse == nullptr && bucket.audit ? m.audit_sums : args.lse,
                          .stream = stream};
  enqueue_layer(memory.of(bucket), call);
}

void Engine::Impl::enqueue_layer(const ForwardMemory& forward, const ForwardLayer& call) {
  const ForwardMemory m = forward.in(call.layer);
  const ForwardMemory teams = m.teams();
  const scheduler::TaskGraph& graph = graph_of(teams);
  if (call.layer == 0) {
    for (const scheduler::Task& task : graph.opening()) enqueue(task.verb, m, call);
  }
  // Should one of these throw, part of the layer is enqueued: it cannot be repeated, unless that is all of an import's.
  if (!programs.empty() && importing == 0) next_layer = kNone;
  for (const scheduler::Task& task : graph.layer()) {
    const bool of_rows = task.verb == scheduler::Verb::append || task.verb == scheduler::Verb::prefill;
    enqueue(task.verb, of_rows ? m : teams, call);
    if (task.stamped && m.bucket.trace) verbs.stamp(m, call.layer, task.stage, call.stream);
  }
  if (call.layer + 1 == options.shape.layers) {
    for (const scheduler::Task& task : graph.closing()) enqueue(task.verb, m, call);
  }
  next_layer = call.layer + 1;
}

const scheduler::TaskGraph& Engine::Impl::graph_of(const ForwardMemory& teams) {
  const scheduler::ForwardKind kind = scheduler::kind_of(teams);
  const auto found = std::ranges::find(graphs, kind, &scheduler::TaskGraph::kind);
  return found != graphs.end() ? *found : graphs.emplace_front(kind);
}

void Engine::Impl::require_values(const TensorView& v, std::uint32_t rows) const {
  const AttentionShape& shape = options.shape;
  if (!shape.latent()) return require_tensor(v, "v", rows, shape.kv_heads, shape.head_dim);
  if (v.data != nullptr || v.tokens != 0)
    throw Error(Errc::invalid_argument, "v is given, and values of latent attention are the first " +
                                            text(shape.value_dim) +
                                            " elements of keys (shape.value_dim); leave it out");
}

void Engine::Impl::require_rehearsed(const Bucket& bucket, LayerId layer, const TensorView& rehearsed) const {
  if (!bucket.rehearsed || layer.value == 0) return;
  if (rehearsed.tokens == 0)
    throw Error(Errc::invalid_argument, "attend: the bucket has rehearsed queries, and layer " + text(layer.value) +
                                            " comes without; give it what the attention input of the layer before "
                                            "gives with this layer's query weights "
                                            "(AttendArgs::rehearsed), or plan without Bucket::rehearsed");
  require_tensor(rehearsed, "rehearsed", bucket.rows(), options.shape.q_heads, options.shape.head_dim);
}

bool Engine::Impl::require_scores(const Bucket& bucket, LayerId layer, const TensorView& scores) const {
  if (!bucket.scores || memory.largest().window_in(layer.value) != 0) return false;
  const std::string name = "attend: layer " + text(layer.value);
  const std::uint32_t kv_heads = options.shape.kv_heads;
  const auto shape = [](std::uint32_t rows, const std::string& heads, std::uint32_t tokens) {
    return "[" + text(rows) + ", " + heads + ", " + text(tokens) + "]";
  };
  if (scores.tokens == 0)
    throw Error(Errc::invalid_argument, name + " comes without scores, and the bucket has some; give it " +
                                            shape(bucket.decode_rows, text(kv_heads) + " or 1", bucket.max_tokens) +
                                            " in f32 (AttendArgs::scores), or plan without Bucket::scores");
  if (scores.tokens < bucket.decode_rows || (scores.heads != 1 && scores.heads != kv_heads) ||
      scores.head_dim < bucket.max_tokens)
    throw Error(Errc::invalid_argument,
                name + ": scores is " + shape(scores.tokens, text(scores.heads), scores.head_dim) +
                    "; this bucket needs " + shape(bucket.decode_rows, text(kv_heads) + " or 1", bucket.max_tokens) +
                    ", or more rows and tokens");
  if (scores.dtype != DType::f32) throw Error(Errc::invalid_argument, name + ": scores.dtype is not f32; convert them");
  if (scores.data == nullptr || reinterpret_cast<std::uintptr_t>(scores.data) % sizeof(float) != 0)
    throw Error(Errc::invalid_argument, name +
                                            ": scores.data is null or no multiple of 4; give it the address of its "
                                            "first element");
  return true;
}

void Engine::Impl::require_uncaptured(const char* what, void* stream) const {
  if (!verbs.capturing(stream)) return;
  throw Error(Errc::unsupported, std::string(what) +
                                     ": its stream is captured, or the default one while another is; a graph would "
                                     "repeat what is of this call alone. Capture attend, and call this before each "
                                     "replay, on a stream that is not captured");
}

void Engine::Impl::require_capturable(const Bucket& bucket, void* stream) const {
  if (captures() || bucket.decode_rows == 0 || bucket.whole || options.handover == Handover::device) return;
  if (!verbs.capturing(stream)) return;
  if (options.handover == Handover::host)
    throw Error(Errc::unsupported,
                "attend: its stream is captured, and with handover host the calling thread waits for the CPU's part "
                "of each layer; enqueue forwards, or build the engine with handover device");
  throw Error(Errc::unsupported,
              "attend: its stream is captured, and this driver cannot capture streams that wait for a word of memory; "
              "enqueue forwards, or build the engine with handover device");
}

void Engine::Impl::enqueue(scheduler::Verb verb, const ForwardMemory& m, const ForwardLayer& layer) {
  using scheduler::Verb;
  switch (verb) {
    case Verb::begin: return verbs.begin(m, layer.stream);
    case Verb::append: return verbs.append(m, layer);
    case Verb::prefill: return verbs.prefill(m, layer);
    case Verb::rank: return verbs.rank(m, layer);
    case Verb::score: return verbs.score(m, layer);
    case Verb::propose: return verbs.propose(m, layer);
    case Verb::choose: return verbs.choose(m, layer);
    case Verb::split: return verbs.split(m, layer);
    case Verb::signal: return verbs.signal(m, ++ticket, layer.stream);
    case Verb::attend: return verbs.attend(m, layer);
    case Verb::attend_whole: return verbs.attend_whole(m, layer);
    case Verb::promote: return verbs.promote(m, layer);
    case Verb::fetch: return verbs.fetch(m, layer);
    case Verb::await_answer:
      return m.handover == Handover::host ? await_answer(ticket, layer.stream) : verbs.await_answer(m, layer.stream);
    case Verb::merge: return verbs.merge(m, layer);
    case Verb::audit: return verbs.audit(m, layer);
    case Verb::end: return verbs.end(m, layer.stream);
    case Verb::apply:
    case Verb::fill:
    case Verb::cluster:  // Of a plan: see `send`.
    case Verb::model:    // The caller's, before this.
    case Verb::gather:   // A part of `prefill`.
    case Verb::list_candidates:
    case Verb::choose_far:
    case Verb::attend_far: return;  // Workers' own.
  }
}

void Engine::Impl::finish(const Batch& batch) {
  if (programs.find(batch.forward) == nullptr || batch.forward == importing)
    throw Error(Errc::invalid_argument, "finish: forward " + text(batch.forward) + " is not under way");
  const ForwardStatus status = await_end(batch.forward);
  if (status == ForwardStatus::done) require_chosen(batch.forward);
  // While it can still be finished again, or cancelled.
  if (const auto audit = programs.find(batch.forward)->audit; audit && status == ForwardStatus::done) compare(audit);
  // Late answers write where the next forward's will.
  std::optional<runtime::Rest> rest;
  if (status != ForwardStatus::done) rest.emplace(await_idle());
  const runtime::Program program = retire(batch.forward, status == ForwardStatus::done);
  if (status == ForwardStatus::done) return look_ahead(program);
  std::string message =
      "forward " + text(batch.forward) + " did not get to its end: " + reason_of(status) + ". Without new tokens:";
  for (const PlanItem& item : program.items) message += " sequence " + text(item.sequence.value);
  throw Error(Errc::device, message + "; plan and run it again");
}

void Engine::Impl::cancel(const Batch& batch) {
  if (programs.find(batch.forward) == nullptr || batch.forward == importing)
    throw Error(Errc::invalid_argument, "cancel: forward " + text(batch.forward) + " is not under way");
  if (batch.forward < good)
    throw Error(Errc::invalid_argument, "cancel: forward " + text(good) + " was finished, which continues forward " +
                                            text(batch.forward) + "; finish this one, too");
  take_back(batch.forward);
}

}  // namespace sluice
