// Policies that choose on the CPU, on every device: what they attend is what they attend in a Runtime.
#include <algorithm>
#include <atomic>
#include <thread>

#include "sluice/error.hpp"
#include "sluice/runtime.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace std::chrono_literals;

namespace {

constexpr AttentionShape kShape{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t kChunk = 100;
const std::size_t kRow = std::size_t{kShape.q_heads} * kShape.head_dim;

EngineOptions options_for(const EngineRig& rig, std::uint32_t rows, std::uint32_t near) {
  EngineOptions options{.shape = kShape,
                        .kv_dtype = rig.kv_dtype,
                        .largest = {.decode_rows = rows, .prefill_rows = kChunk, .prefills = 2, .unbounded = true},
                        .threads = 2,
                        .pin_threads = false};
  options.host_bytes = 100 * block_bytes(options);
  options.near_bytes = near * block_bytes(options);
  options.sequences = 8;
  options.cpu_sequences = 6;
  options.prefill_window = 64;
  return options;
}

/// Plans one forward of these, enqueues it, finishes it; outputs of the first row of each.
std::vector<std::vector<float>> run(Engine& engine, const EngineRig& rig, const std::vector<Teller*>& tellers,
                                    const std::vector<std::uint32_t>& counts, bool prefill) {
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  std::vector<PlanItem> items;
  std::uint32_t row = 0;
  for (std::size_t i = 0; i < tellers.size(); ++i) {
    items.push_back({.sequence = tellers[i]->id, .tokens = counts[i], .prefill = prefill});
    for (std::uint32_t t = 0; t < counts[i]; ++t) tensors.set(row++, *tellers[i]->story, tellers[i]->at + t);
  }
  tensors.spoil();
  const Batch batch = engine.plan(items, engine.options().largest, rig.stream);
  tensors.attend(engine, rig.stream);
  engine.finish(batch);
  rig.synchronize();
  std::vector<std::vector<float>> out;
  row = 0;
  for (std::size_t i = 0; i < tellers.size(); ++i) {
    out.push_back(tensors.out(row));
    row += counts[i];
    tellers[i]->at += counts[i];
  }
  return out;
}

void prefill(Engine& engine, const EngineRig& rig, Teller& teller, std::uint32_t tokens) {
  while (teller.at < tokens) (void)run(engine, rig, {&teller}, {std::min(kChunk, tokens - teller.at)}, true);
}

std::vector<float> decode(Engine& engine, const EngineRig& rig, Teller& teller) {
  return run(engine, rig, {&teller}, {1}, false)[0];
}

/// The same by a Runtime of the host.
class Reference {
 public:
  Reference(const EngineRig& rig, const Story& story, const PolicySpec& policy)
      : story_(story), runtime_(options(rig)), id_(runtime_.begin(policy)) {}

  void prefill(std::uint32_t tokens) {
    for (; at_ < tokens; at_ += std::min(kChunk, tokens - at_)) {
      const std::uint32_t count = std::min(kChunk, tokens - at_);
      std::vector<float> out(count * kRow);
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
        runtime_.prefill({.sequence = id_,
                          .layer = LayerId{layer},
                          .q = view(story_.q(layer, at_), count, kShape.q_heads),
                          .k = view(story_.k(layer, at_), count, kShape.kv_heads),
                          .v = view(story_.v(layer, at_), count, kShape.kv_heads),
                          .out = dense_view(out.data(), DType::f32, count, kShape.q_heads, kShape.head_dim)});
      }
    }
  }

  /// Tokens whose queries nobody has.
  void import(std::uint32_t tokens) {
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      runtime_.import_prefix({.sequence = id_,
                              .layer = LayerId{layer},
                              .k = view(story_.k(layer, at_), tokens - at_, kShape.kv_heads),
                              .v = view(story_.v(layer, at_), tokens - at_, kShape.kv_heads),
                              .last_q = {}});
    }
    at_ = tokens;
  }

  std::vector<float> decode() {
    std::vector<float> out(kShape.layers * kRow);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      runtime_.step({.layer = LayerId{layer},
                     .sequences = {&id_, 1},
                     .q = view(story_.q(layer, at_), 1, kShape.q_heads),
                     .k = view(story_.k(layer, at_), 1, kShape.kv_heads),
                     .v = view(story_.v(layer, at_), 1, kShape.kv_heads),
                     .out = dense_view(out.data() + layer * kRow, DType::f32, 1, kShape.q_heads, kShape.head_dim)});
    }
    ++at_;
    return out;
  }
  [[nodiscard]] Stats stats() const { return runtime_.stats(id_); }

 private:
  static RuntimeOptions options(const EngineRig& rig) {
    RuntimeOptions options;
    options.shape = kShape;
    options.kv_dtype = rig.kv_dtype;
    options.page_tokens = 16;
    options.prefill_chunk = kChunk;
    options.threads = 2;
    options.pin_threads = false;
    options.host_bytes = 64 * MiB;
    options.near_bytes = 16 * MiB;
    options.placement = PlacementMode::hybrid;
    return options;
  }
  static TensorView view(const float* data, std::uint32_t count, std::uint32_t heads) {
    return dense_view(data, DType::f32, count, heads, kShape.head_dim);
  }

  const Story& story_;
  Runtime runtime_;
  SequenceId id_;
  std::uint32_t at_ = 0;
};

double tolerance(const EngineRig& rig) { return rig.kv_dtype == DType::f32 ? 2e-5 : 2e-3; }

}  // namespace

TEST_CASE("policies that choose on the CPU attend what they attend in a runtime, near or far", "[engine]") {
  const char* const text =
      GENERATE("lfps", "lfps | bypass=off", "topk", "magicpig", "tactic:least=64,size=4,recluster=64",
               "history:share_group=on,observe_every=3 | top_k=24 | near=0,sinks=4,recent=16 | dense=1",
               "history+exact | top_p=0.8 | near=0,sinks=2,recent=7", "exact | top_k=30 | near=0 | bypass=0.3",
               "clusters:least=64,size=8,candidates=48+lsh | top_k=40 | near=0 | dense=0,every=2");
  const std::uint32_t near = GENERATE(0u, 7u);
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, 390, 77);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Reference reference(rig, story, policy);
  Engine engine(options_for(rig, 2, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  const auto both_decode = [&](std::uint32_t tokens) {
    while (teller.at < tokens) {
      const std::vector<float> want = reference.decode();
      CAPTURE(teller.at);
      REQUIRE(difference(decode(engine, rig, teller), want) < tolerance(rig));
    }
  };
  const auto both_prefill = [&](std::uint32_t tokens) {
    reference.prefill(tokens);
    prefill(engine, rig, teller, tokens);
  };
  both_prefill(270);
  both_decode(350);
  both_prefill(370);  // The next turn of a conversation.
  both_decode(390);
}

TEST_CASE("heads that look at the sinks alone are bypassed as in a runtime", "[engine]") {
  const char* const text = GENERATE("lfps", "exact | top_k=30 | near=0,sinks=4,recent=0 | bypass=0.8",
                                    "history | top_k=all | near=0,sinks=4,recent=9 | bypass=0.9");
  const std::uint32_t near = GENERATE(0u, 7u);
  CAPTURE(text, near);
  const EngineRig rig = engine_rig();
  Story story(kShape, 320, 78);
  story.lean_on_sinks();
  if (rig.kv_dtype != DType::f32) story.round_queries();
  const PolicySpec policy = parse_policy(text);
  Reference reference(rig, story, policy);
  Engine engine(options_for(rig, 1, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  reference.prefill(290);
  prefill(engine, rig, teller, 290);
  while (teller.at < story.tokens()) {
    CAPTURE(teller.at);
    REQUIRE(difference(decode(engine, rig, teller), reference.decode()) < tolerance(rig));
  }
  REQUIRE(reference.stats().bypassed_heads >= 15 * kShape.layers);
  REQUIRE(reference.stats().bypassed_heads < 30 * kShape.layers * kShape.q_heads);
}

TEST_CASE("policies of the CPU begin behind imported tokens as in a runtime", "[engine]") {
  const char* const text = GENERATE("lfps", "magicpig", "tactic:least=64,size=4");
  CAPTURE(text);
  const EngineRig rig = engine_rig();
  const Story story(kShape, 260, 79);
  const PolicySpec policy = parse_policy(text);
  Reference reference(rig, story, policy);
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  reference.import(230);
  import_story(engine, rig, teller, 230);
  while (teller.at < story.tokens())
    REQUIRE(difference(decode(engine, rig, teller), reference.decode()) < tolerance(rig));
}

TEST_CASE("a batch of policies of the CPU and of the device attends what each does alone", "[engine]") {
  const EngineRig rig = engine_rig();
  const char* const policies[] = {"lfps", "exact | int4 | top_k=30 | near=0,sinks=4,recent=12", "magicpig", "topk",
                                  "none | near=0,sinks=4,recent=30"};
  constexpr std::uint32_t kSteps = 14;
  const std::uint32_t prompts[] = {200, 90, 170, 33, 64};
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < 5; ++i) stories.emplace_back(kShape, prompts[i] + kSteps, 150 + i);
  std::vector<std::vector<std::vector<float>>> alone(5);
  for (std::uint32_t i = 0; i < 5; ++i) {
    Engine engine(options_for(rig, 5, 0), rig.device);
    Teller teller{.story = &stories[i], .id = engine.begin(parse_policy(policies[i]))};
    prefill(engine, rig, teller, prompts[i]);
    for (std::uint32_t s = 0; s < kSteps; ++s) alone[i].push_back(decode(engine, rig, teller));
  }
  for (const std::uint32_t near : {0u, 10u}) {
    Engine engine(options_for(rig, 5, near), rig.device);
    std::vector<Teller> tellers;
    for (std::uint32_t i = 0; i < 5; ++i) {
      tellers.push_back({.story = &stories[i], .id = engine.begin(parse_policy(policies[i]))});
      prefill(engine, rig, tellers[i], prompts[i]);
    }
    for (std::uint32_t s = 0; s < 3 * kSteps; ++s) {
      std::vector<Teller*> batch;
      for (std::uint32_t i = 0; i < 5; ++i) {
        Teller& teller = tellers[(i + s) % 5];
        if ((i * 7 + s * 3) % 5 < 3 && teller.at < teller.story->tokens()) batch.push_back(&teller);
      }
      if (batch.empty()) continue;
      const auto out = run(engine, rig, batch, std::vector<std::uint32_t>(batch.size(), 1), false);
      for (std::size_t row = 0; row < batch.size(); ++row) {
        const auto i = static_cast<std::size_t>(batch[row] - tellers.data());
        CAPTURE(near, s, policies[i]);
        REQUIRE(difference(out[row], alone[i][batch[row]->at - prompts[i] - 1]) < tolerance(rig));
      }
    }
  }
}

TEST_CASE("policies choose and learn the same however late threads are, and again after a failure", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 190, 12);
  const char* const policy = "history:observe_every=2 | top_k=20 | near=0,sinks=4,recent=6 | bypass=0.6";
  std::vector<std::vector<float>> want;
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    CAPTURE(seed);
    EngineOptions options = options_for(rig, 1, seed % 2 == 0 ? 0 : 20);
    options.threads = 1 + seed;
    options.answer_timeout = 100ms;
    std::atomic<std::uint32_t> parts{0};
    std::atomic<std::uint32_t> stall{kNone};
    options.before_answer = [&] {
      const std::uint32_t part = parts.fetch_add(1);
      if (seed != 0 && part % 7 == seed) std::this_thread::sleep_for(200us);
      if (part == stall.load()) std::this_thread::sleep_for(150ms);  // The device gives up.
    };
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
    prefill(engine, rig, teller, 150);
    for (std::uint32_t step = 0; step < 40; ++step) {
      if (seed != 0 && step % 9 == seed) {
        stall.store(parts.load() + seed);
        REQUIRE(code_of([&] { (void)decode(engine, rig, teller); }) == Errc::device);
        stall.store(kNone);
      }
      const std::vector<float> out = decode(engine, rig, teller);
      if (seed == 0) want.push_back(out);
      REQUIRE(difference(out, want[step]) < tolerance(rig));
    }
  }
}

TEST_CASE("forwards of policies of the CPU follow one another before they are finished", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 160, 31);
  const PolicySpec policy = parse_policy("lfps");
  Reference reference(rig, story, policy);
  reference.prefill(120);
  EngineOptions options = options_for(rig, 1, 0);
  options.in_flight = 4;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  prefill(engine, rig, teller, 120);
  std::vector<std::unique_ptr<ForwardTensors>> tensors;
  std::vector<Batch> batches;
  const PlanItem item{.sequence = teller.id};
  for (std::uint32_t step = 0; step < 40; ++step) {
    tensors.push_back(std::make_unique<ForwardTensors>(*rig.device, kShape, options.largest.rows()));
    tensors.back()->set(0, story, 120 + step);
    if (step >= 4) engine.finish(batches[step - 4]);
    batches.push_back(engine.plan({&item, 1}, engine.options().largest, rig.stream));
    tensors.back()->attend(engine, rig.stream);
  }
  for (std::uint32_t step = 36; step < 40; ++step) engine.finish(batches[step]);
  rig.synchronize();
  for (std::uint32_t step = 0; step < 40; ++step)
    REQUIRE(difference(tensors[step]->out(0), reference.decode()) < tolerance(rig));
}

TEST_CASE("a fork goes on as its parent would, as long as its policy has learnt nothing", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 150, 41);
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller parent{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  prefill(engine, rig, parent, 130);
  Teller child{.story = &story, .id = engine.fork(parent.id, 130), .at = 130};
  for (std::uint32_t step = 0; step < 10; ++step)
    REQUIRE(difference(decode(engine, rig, child), decode(engine, rig, parent)) == 0.0);
  REQUIRE(code_of([&] { (void)engine.fork(parent.id, 100); }) == Errc::unsupported);
  REQUIRE(code_of([&] { engine.truncate(parent.id, 100); }) == Errc::unsupported);
  engine.truncate(parent.id, 140);  // As many as there are.
  engine.end(parent.id);
  (void)decode(engine, rig, child);
  // A policy without memory may.
  Teller exact{.story = &story, .id = engine.begin(parse_policy("exact | top_k=20 | near=0"))};
  prefill(engine, rig, exact, 130);
  const auto first = decode(engine, rig, exact);
  engine.truncate(exact.id, 130);
  exact.at = 130;
  REQUIRE(difference(decode(engine, rig, exact), first) == 0.0);
}

TEST_CASE("what policies of the CPU cannot have is named", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = options_for(rig, 2, 0);
  options.cpu_sequences = 1;
  Engine engine(options, rig.device);
  const Story story(kShape, 40, 5);
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy("quest")); }) == Errc::unsupported);
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy("sluice")); }) == Errc::unsupported);
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy("lfps:init=200")); }) == Errc::unsupported);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  REQUIRE(code_of([&] { (void)engine.begin(parse_policy("lfps")); }) == Errc::out_of_capacity);
  prefill(engine, rig, teller, 30);
  const PlanItem drafts{.sequence = teller.id, .tokens = 2};
  REQUIRE(code_of([&] { (void)engine.plan({&drafts, 1}, engine.options().largest, rig.stream); }) == Errc::unsupported);
  (void)decode(engine, rig, teller);
  engine.end(teller.id);
  (void)engine.begin(parse_policy("lfps"));
}

namespace {

/// What a sequence says when nothing happens to it but this prompt, in these chunks.
std::vector<std::vector<float>> undisturbed(const EngineRig& rig, const Story& story, const char* policy,
                                            std::vector<std::uint32_t> chunks) {
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  for (const std::uint32_t count : chunks) (void)run(engine, rig, {&teller}, {count}, true);
  std::vector<std::vector<float>> out;
  while (teller.at < story.tokens()) out.push_back(decode(engine, rig, teller));
  return out;
}

/// Plans and enqueues, and does not finish.
Batch start(Engine& engine, const EngineRig& rig, ForwardTensors& tensors, Teller& teller, std::uint32_t count,
            bool prefill) {
  for (std::uint32_t i = 0; i < count; ++i) tensors.set(i, *teller.story, teller.at + i);
  const PlanItem item{.sequence = teller.id, .tokens = count, .prefill = prefill};
  const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
  tensors.attend(engine, rig.stream);
  return batch;
}

void rest_as(Engine& engine, const EngineRig& rig, Teller& teller, const std::vector<std::vector<float>>& want) {
  for (const std::vector<float>& out : want) {
    CAPTURE(teller.at);
    REQUIRE(difference(decode(engine, rig, teller), out) < tolerance(rig));
  }
}

}  // namespace

TEST_CASE("a prompt that is taken back takes along what its policy knew", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story first(kShape, 101, 61);
  const Story second(kShape, 70, 62);
  for (const char* const policy : {"lfps", "magicpig:recent_prompt=8"}) {
    CAPTURE(policy);
    const auto want = undisturbed(rig, second, policy, {60});
    Engine engine(options_for(rig, 1, 0), rig.device);
    Teller teller{.story = &first, .id = engine.begin(parse_policy(policy))};
    std::vector<ForwardTensors> tensors;
    for (int i = 0; i < 2; ++i) tensors.emplace_back(*rig.device, kShape, engine.options().largest.rows());
    const Batch prompt = start(engine, rig, tensors[0], teller, 100, true);
    teller.at = 100;
    (void)start(engine, rig, tensors[1], teller, 1, false);
    rig.synchronize();
    engine.cancel(prompt);  // And what is behind it, which has run, and may have been learnt from.
    REQUIRE(engine.tokens(teller.id) == 0);
    teller = {.story = &second, .id = teller.id};
    (void)run(engine, rig, {&teller}, {60}, true);
    rest_as(engine, rig, teller, want);
  }
}

TEST_CASE("a decoded token that is taken back when it has run is not learnt from", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 160, 63);
  const auto want = undisturbed(rig, story, "lfps", {100, 20});
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  prefill(engine, rig, teller, 120);
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  const auto take_back = [&] {
    const Batch batch = start(engine, rig, tensors, teller, 1, false);
    rig.synchronize();
    std::this_thread::sleep_for(20ms);  // So that threads learn.
    engine.cancel(batch);
  };
  take_back();
  rest_as(engine, rig, teller, {want.begin(), want.begin() + 10});
  // What was learnt before is lost then; all is attended until there is something to go by again.
  take_back();
  while (teller.at < story.tokens()) {
    const std::vector<float> out = decode(engine, rig, teller);
    REQUIRE(difference(out, out) == 0.0);
  }
}

TEST_CASE("a shorter fork, and one that is cut, begin with the queries of their own prompts", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 170, 64);
  const auto want = undisturbed(rig, story, "lfps", {100, 50});
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller parent{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  prefill(engine, rig, parent, 170);
  Teller child{.story = &story, .id = engine.fork(parent.id, 100), .at = 100};
  (void)run(engine, rig, {&child}, {50}, true);
  rest_as(engine, rig, child, want);
  engine.truncate(parent.id, 100);
  parent.at = 100;
  (void)run(engine, rig, {&parent}, {50}, true);
  rest_as(engine, rig, parent, want);
}

TEST_CASE("a prompt that is finished behind its first decoded token is not read again", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 120, 65);
  const auto want = undisturbed(rig, story, "lfps", {100});
  Engine engine(options_for(rig, 1, 0), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
  std::vector<ForwardTensors> tensors;
  for (int i = 0; i < 2; ++i) tensors.emplace_back(*rig.device, kShape, engine.options().largest.rows());
  const Batch prompt = start(engine, rig, tensors[0], teller, 100, true);
  teller.at = 100;
  const Batch token = start(engine, rig, tensors[1], teller, 1, false);
  ++teller.at;
  engine.finish(token);
  engine.finish(prompt);
  rig.synchronize();
  REQUIRE(difference(tensors[1].out(0), want[0]) < tolerance(rig));
  rest_as(engine, rig, teller, {want.begin() + 1, want.end()});
}

TEST_CASE("sequences end while threads learn from them", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 210, 66);
  Engine engine(options_for(rig, 1, 0), rig.device);
  for (int i = 0; i < 40; ++i) {
    Teller teller{.story = &story, .id = engine.begin(parse_policy("lfps"))};
    prefill(engine, rig, teller, 200);
    for (int step = 0; step < 1 + i % 3; ++step) (void)decode(engine, rig, teller);
    engine.end(teller.id);
  }
  REQUIRE(engine.memory().far_pages_used == 0);
}
