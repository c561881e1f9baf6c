// What an engine enqueues, in the order in which it does, keeps to the edges of the forward's tasks.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/plan/task_graph.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/forwarding.hpp"
#include "tests/support/task_order.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using scheduler::ForwardTasks;
using scheduler::Queue;
using scheduler::Verb;

namespace {

/// Verbs that write down what they are called for.
class RecordingVerbs final : public ForwardingVerbs {
 public:
  using ForwardingVerbs::ForwardingVerbs;
  void apply(const ForwardMemory& m, ForwardSide& side, void* stream) override {
    note(Verb::apply, kNone, m);
    inner_.apply(m, side, stream);
  }
  void fill(const ForwardMemory& m, ForwardSide& side, void* stream) override {
    note(Verb::fill, kNone, m);
    inner_.fill(m, side, stream);
  }
  void begin(const ForwardMemory& m, void* stream) override {
    note(Verb::begin, kNone, m);
    inner_.begin(m, stream);
  }
  void append(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::append, layer.layer, m);
    inner_.append(m, layer);
  }
  void prefill(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::prefill, layer.layer, m);
    inner_.prefill(m, layer);
  }
  void rank(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::rank, layer.layer, m);
    inner_.rank(m, layer);
  }
  void score(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::score, layer.layer, m);
    inner_.score(m, layer);
  }
  void propose(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::propose, layer.layer, m);
    inner_.propose(m, layer);
  }
  void choose(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::choose, layer.layer, m);
    inner_.choose(m, layer);
  }
  void split(const ForwardMemory& m, const ForwardLayer& layer) override {
    layer_ = layer.layer;
    note(Verb::split, layer.layer, m);
    inner_.split(m, layer);
  }
  void signal(const ForwardMemory& m, std::uint64_t ticket, void* stream) override {
    note(Verb::signal, layer_, m);
    inner_.signal(m, ticket, stream);
  }
  void attend(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::attend, layer.layer, m);
    inner_.attend(m, layer);
  }
  void attend_whole(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::attend_whole, layer.layer, m);
    inner_.attend_whole(m, layer);
  }
  void promote(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::promote, layer.layer, m);
    inner_.promote(m, layer);
  }
  void fetch(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::fetch, layer.layer, m);
    inner_.fetch(m, layer);
  }
  void await_answer(const ForwardMemory& m, void* stream) override {
    note(Verb::await_answer, layer_, m);
    inner_.await_answer(m, stream);
  }
  void merge(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::merge, layer.layer, m);
    inner_.merge(m, layer);
  }
  void audit(const ForwardMemory& m, const ForwardLayer& layer) override {
    note(Verb::audit, layer.layer, m);
    inner_.audit(m, layer);
  }
  void end(const ForwardMemory& m, void* stream) override {
    note(Verb::end, kNone, m);
    inner_.end(m, stream);
  }

  struct Call {
    Verb verb{};
    std::uint32_t layer = kNone;
  };
  std::vector<Call> calls;  ///< of the newest forward
  std::optional<scheduler::ForwardKind> kind;

 private:
  void note(Verb verb, std::uint32_t layer, const ForwardMemory& m) {
    if (verb == Verb::apply) calls.clear();
    if (verb == Verb::begin) kind = scheduler::kind_of(m.teams());
    calls.push_back({.verb = verb, .layer = layer});
  }
  std::uint32_t layer_ = kNone;
};

class RecordingDevice final : public ForwardingDevice {
 public:
  explicit RecordingDevice(std::shared_ptr<Device> inner)
      : ForwardingDevice(std::move(inner)), verbs(*inner_->forward_verbs()) {}
  [[nodiscard]] ForwardVerbs* forward_verbs() noexcept override { return &verbs; }
  RecordingVerbs verbs;
};

/// Whether the engine calls a verb for it: else it is a part of one, or another's.
bool is_called(const scheduler::Task& task) {
  return (task.queue == Queue::stream || task.queue == Queue::side) && task.verb != Verb::model &&
         task.verb != Verb::gather && task.verb != Verb::cluster;
}

/// The forward's nodes in the order of what was called: those that are not come before what follows them. Nothing if
/// what was called is not what the tasks are.
std::optional<std::vector<std::uint32_t>> order_of(const ForwardTasks& tasks,
                                                   const std::vector<RecordingVerbs::Call>& calls) {
  std::map<std::pair<Verb, std::uint32_t>, std::uint32_t> nodes;
  std::vector<std::uint32_t> others;
  for (std::uint32_t node = 0; node < tasks.nodes.size(); ++node) {
    if (is_called(tasks.nodes[node].task)) {
      nodes[{tasks.nodes[node].task.verb, tasks.nodes[node].layer}] = node;
    } else {
      others.push_back(node);
    }
  }
  if (nodes.size() != calls.size()) return std::nullopt;
  std::vector<std::uint32_t> order;
  for (const auto& [verb, layer] : calls) {
    const auto found = nodes.find({verb, layer});
    if (found == nodes.end()) return std::nullopt;
    while (!others.empty() && others.front() < found->second) {
      order.push_back(others.front());
      others.erase(others.begin());
    }
    order.push_back(found->second);
  }
  return order;
}

/// The newest forward's.
std::string broken(const RecordingVerbs& verbs) {
  if (!verbs.kind) return "no forward began";
  const ForwardTasks tasks = unrolled(scheduler::TaskGraph(*verbs.kind), kShape.layers);
  const auto order = order_of(tasks, verbs.calls);
  if (!order) return "what was enqueued is not what the graph has";
  return broken_edge(tasks, TaskOrder(tasks, *order)).value_or("");
}

}  // namespace

TEST_CASE("an engine enqueues what the graph of a forward has, in an order that its edges allow", "[engine][graph]") {
  const auto [policy, placement, share] = GENERATE(table<std::string, PlacementMode, float>(
      {{"exact | int4 | top_k=10 | near=0,sinks=2,recent=6", PlacementMode::hybrid, 0.f},
       {"exact | int4 | top_k=10 | near=0,sinks=2,recent=6", PlacementMode::hybrid, 0.5f},
       {"exact | int4 | top_p=0.8 | near=0,sinks=2,recent=6", PlacementMode::stream, 0.f},
       {"pages:pages=2 | int4 | top_k=3 | near=0,sinks=2,recent=6", PlacementMode::hybrid, 0.f},
       {"topk", PlacementMode::hybrid, 0.f},
       {"topk", PlacementMode::stream, 0.f},
       {"history | int4 | top_k=20 | near=0,sinks=4,recent=20", PlacementMode::hybrid, 0.f}}));
  const Handover handover = GENERATE(Handover::device, Handover::stream, Handover::host);
  const bool audit = GENERATE(false, true);
  CAPTURE(policy, to_string(placement), share, to_string(handover), audit);
  const EngineRig rig = engine_rig();
  const auto device = std::make_shared<RecordingDevice>(rig.device);
  EngineOptions options = options_for(rig, 1, 6);
  options.placement = placement;
  options.fetch_share = share;
  options.handover = handover;
  options.largest.audit = audit;
  options.largest.rehearsed = false;
  options.policies = {parse_policy(policy)};
  Engine engine(options, device);
  const Story story(kShape, 130, 5);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  policies::prefill(engine, rig, teller, 30);
  REQUIRE(broken(device->verbs) == "");
  REQUIRE(device->verbs.kind->prefills);
  policies::prefill(engine, rig, teller, 110);
  for (int i = 0; i < 5; ++i) {
    (void)policies::decode(engine, rig, teller);
    REQUIRE(broken(device->verbs) == "");
    REQUIRE(device->verbs.kind->handover == handover);
  }
  // As many calls, two of them the other way round.
  std::vector<RecordingVerbs::Call>& calls = device->verbs.calls;
  const auto of = [&](Verb verb) { return std::ranges::find(calls, verb, &RecordingVerbs::Call::verb); };
  std::iter_swap(of(Verb::split), of(Verb::attend));
  REQUIRE(broken(device->verbs) != "");
  std::iter_swap(of(Verb::split), of(Verb::attend));
  REQUIRE(broken(device->verbs) == "");
  if (handover == Handover::stream && of(Verb::await_answer) != calls.end()) {
    std::iter_swap(of(Verb::await_answer), of(Verb::merge));
    REQUIRE(broken(device->verbs) != "");
  }
  calls.pop_back();
  REQUIRE(broken(device->verbs) != "");
}

TEST_CASE("an import, and rows of short sequences, are enqueued as their graphs have them", "[engine][graph]") {
  const EngineRig rig = engine_rig();
  const auto device = std::make_shared<RecordingDevice>(rig.device);
  EngineOptions options = options_for(rig, 1, 6);
  options.largest.rehearsed = false;
  options.largest.prefill_rows = options.largest.prefills = 0;
  options.policies = {parse_policy("exact | int4 | top_k=10 | near=0")};
  options.dense_tokens = 112;
  Engine engine(options, device);
  const Story story(kShape, 130, 5);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("exact | int4 | top_k=10 | near=0"))};
  import_story(engine, rig, teller, 100);
  REQUIRE(broken(device->verbs) == "");
  REQUIRE(device->verbs.calls.size() == 2 + kShape.layers + 1 + (device->verbs.kind->promotes ? 1 : 0));
  ForwardTensors tensors(*rig.device, kShape, 1);
  tensors.set(0, story, teller.at);
  Bucket bucket = engine.options().largest;
  bucket.max_tokens = 112;
  const PlanItem item{.sequence = teller.id};
  (void)run_batch(engine, rig, tensors, {&item, 1}, bucket);
  REQUIRE(device->verbs.kind->whole == (rig.kv_dtype != DType::fp8_e4m3));  // Those rows have scales.
  REQUIRE(broken(device->verbs) == "");
}
