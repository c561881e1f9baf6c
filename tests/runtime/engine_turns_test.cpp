// Requests that share an engine by an Admission give what each gives alone, with a host pool that does not hold them.
#include <algorithm>
#include <map>

#include "sluice/admission.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr AttentionShape kShape{.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t kTokens = 90;  // of a story
constexpr std::uint32_t kStories = 2;
constexpr std::uint32_t kRequests = 14;
/// The last two choose on the CPU.
constexpr const char* kPolicies[] = {"full", "exact | int4 | top_k=6 | near=0,sinks=2,recent=3",
                                     "none | near=0,sinks=3,recent=8", "exact | top_k=9 | near=0",
                                     "exact | top_k=5 | near=0,sinks=2,recent=2"};
constexpr std::uint32_t kWays = std::size(kPolicies);
constexpr std::uint32_t kOnDevice = 3;

EngineOptions options_for(const EngineRig& rig, std::uint32_t blocks) {
  EngineOptions options{.shape = kShape,
                        .page_tokens = 8,
                        .kv_dtype = rig.kv_dtype,
                        .policies = {},
                        .largest = {.decode_rows = 4, .prefill_rows = 30, .prefills = 3}};
  for (const char* policy : kPolicies) options.policies.push_back(parse_policy(policy));
  options.host_bytes = blocks * block_bytes(options);
  options.near_bytes = 3 * near_block_bytes(options);
  options.sequences = 5;
  options.cpu_sequences = 2;
  options.prefill_window = 16;
  options.threads = 2;
  options.pin_threads = false;
  return options;
}

/// What every token of a story gives alone: decoded under a policy, or as part of a prompt.
struct Alone {
  std::vector<Story> stories;
  std::map<std::uint32_t, std::vector<float>> rows[kStories][kWays + 1];  ///< the policies', then prompts'
};

Alone alone(const EngineRig& rig) {
  Alone alone;
  Engine engine(options_for(rig, 40), rig.device);
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  for (std::uint32_t s = 0; s < kStories; ++s) {
    alone.stories.emplace_back(kShape, kTokens, 700 + s);
    for (std::uint32_t way = 0; way <= kWays; ++way) {
      const SequenceId id = engine.begin(parse_policy(kPolicies[way % kWays]));
      for (std::uint32_t token = 0; token < kTokens; ++token) {
        // A policy that chooses on the CPU wants a prompt.
        const PlanItem item{.sequence = id, .tokens = 1, .prefill = way == kWays || token == 0};
        tensors.set(0, alone.stories[s], token);
        const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
        tensors.attend(engine, rig.stream);
        engine.finish(batch);
        rig.synchronize();
        if (item.prefill == (way == kWays)) alone.rows[s][way][token] = tensors.out(0);
      }
      engine.end(id);
    }
  }
  return alone;
}

struct Request {
  std::uint32_t story = 0, policy = 0, prompt = 0, most = 0;
  std::uint32_t given = 0;
  SequenceId sequence;
};

/// A server without a network: the loop that sluice/admission.hpp describes.
class Server {
 public:
  Server(const EngineRig& rig, const Alone& alone, std::uint32_t blocks, std::uint64_t seed)
      : rig_(rig),
        alone_(alone),
        engine_(options_for(rig, blocks), rig.device),
        admission_(admission_options(engine_.options())),
        tensors_(*rig.device, kShape, engine_.options().largest.rows()),
        random_(seed) {
    for (std::uint32_t i = 0; i < kStories * kTokens; ++i) ids_.push_back(static_cast<std::int32_t>(i));
  }

  void run() {
    for (std::uint64_t come = 0; come < kRequests || !requests_.empty();) {
      if (come < kRequests && random_.below(3) != 0) submit(RequestId{come++});
      turn();
      REQUIRE(++turns_ < 2000);
    }
    REQUIRE(engine_.memory().far_pages_used == 0);
  }
  [[nodiscard]] std::uint64_t preempted() const { return preempted_; }
  [[nodiscard]] std::uint64_t again() const { return again_; }
  [[nodiscard]] std::uint64_t matched() const { return engine_.stats().matched_tokens; }
  [[nodiscard]] std::uint64_t rows() const { return rows_; }

 private:
  void submit(RequestId id) {
    Request request{.story = random_.below(kStories),
                    .policy = random_.below(kWays),
                    .prompt = 1 + random_.below(40),
                    .most = 1 + random_.below(40),
                    .sequence = {}};
    admission_.submit({.id = id,
                       .prompt_tokens = request.prompt,
                       .max_new_tokens = request.most,
                       .on_cpu = request.policy >= kOnDevice});
    requests_[id] = request;
  }

  [[nodiscard]] std::uint64_t held_pages() const {
    return engine_.memory().far_pages_used / block_bytes(engine_.options());
  }

  void turn() {
    const AdmissionChanges changes = admission_.admit(held_pages());
    for (const RequestId id : changes.preempt) engine_.end(requests_[id].sequence);
    for (const RequestId id : changes.admit) begin(id);
    preempted_ += changes.preempt.size();
    const std::vector<TurnItem> items = admission_.next(random_.below(2) * random_.below(40));
    REQUIRE(items.empty() == requests_.empty());
    if (items.empty()) return;
    const Batch batch = plan(items);
    if (random_.below(8) == 0) {
      engine_.cancel(batch);
      return admission_.fail();
    }
    tensors_.attend(engine_, rig_.stream);
    engine_.finish(batch);
    rig_.synchronize();
    compare(items);
    for (const TurnItem& item : items) requests_[item.request].given += item.output ? 1 : 0;
    for (const RequestId id : admission_.complete()) end(id);
    if (random_.below(20) == 0 && !requests_.empty()) abort();
  }

  void begin(RequestId id) {
    Request& request = requests_[id];
    const std::span<const std::int32_t> story(ids_.data() + std::size_t{request.story} * kTokens, kTokens);
    request.sequence =
        engine_.begin(parse_policy(kPolicies[request.policy]), story.first(request.prompt + request.given));
    const std::uint32_t cached = engine_.tokens(request.sequence);
    if (cached != 0) admission_.begun(id, cached);
    again_ += request.given != 0 ? 1 : 0;
  }

  /// There is room for what the admission says, always.
  Batch plan(const std::vector<TurnItem>& items) {
    std::vector<PlanItem> planned;
    std::uint32_t row = 0;
    for (const TurnItem& item : items) {
      const Request& request = requests_[item.request];
      REQUIRE(item.first == engine_.tokens(request.sequence));
      planned.push_back({.sequence = request.sequence, .tokens = item.tokens, .prefill = item.prefill});
      for (std::uint32_t i = 0; i < item.tokens; ++i)
        tensors_.set(row++, alone_.stories[request.story], item.first + i);
    }
    tensors_.spoil();
    return engine_.plan(planned, engine_.options().largest, rig_.stream);
  }

  void compare(const std::vector<TurnItem>& items) {
    std::uint32_t row = 0;
    for (const TurnItem& item : items) {
      const Request& request = requests_[item.request];
      const auto& want = alone_.rows[request.story][item.prefill ? kWays : request.policy];
      for (std::uint32_t i = 0; i < item.tokens; ++i, ++rows_) {
        CAPTURE(turns_, item.request.value, kPolicies[request.policy], item.prefill, item.first + i);
        const double off = difference(tensors_.out(row++), want.at(item.first + i));
        if (!(off < rig_.tolerance)) REQUIRE(off < rig_.tolerance);
      }
      if (item.output) REQUIRE(item.first + item.tokens == request.prompt + request.given);
    }
  }

  void end(RequestId id) {
    REQUIRE(requests_[id].given == requests_[id].most);
    engine_.end(requests_[id].sequence);
    requests_.erase(id);
  }

  void abort() {
    const std::vector<RequestId> running = admission_.running();
    const auto which = std::next(requests_.begin(), random_.below(static_cast<std::uint32_t>(requests_.size())));
    if (std::ranges::find(running, which->first) != running.end()) engine_.end(which->second.sequence);
    admission_.end(which->first);
    requests_.erase(which);
  }

  const EngineRig& rig_;
  const Alone& alone_;
  Engine engine_;
  Admission admission_;
  ForwardTensors tensors_;
  Random random_;
  std::vector<std::int32_t> ids_;  ///< of all stories' tokens
  std::map<RequestId, Request> requests_;
  std::uint64_t turns_ = 0, preempted_ = 0, again_ = 0, rows_ = 0;
};

}  // namespace

TEST_CASE("requests that take turns attend what each attends alone, those that were preempted, too", "[engine]") {
  const EngineRig rig = engine_rig();
  const Alone reference = alone(rig);
  std::uint64_t preempted = 0, again = 0, matched = 0, rows = 0;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    CAPTURE(seed);
    Server server(rig, reference, 11 + static_cast<std::uint32_t>(seed), seed);
    server.run();
    preempted += server.preempted();
    again += server.again();
    matched += server.matched();
    rows += server.rows();
  }
  CHECK(preempted > 10);
  CHECK(again > 10);
  CHECK(matched > 100);
  CHECK(rows > 3000);
}
