// Sequences that leave an engine for memory and come back, on every device: they go on as if they had stayed.
#include <array>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tests/support/engine_park.hpp"
#include "tests/support/random_policy.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;
using namespace sluice::test::prefixes;
using namespace sluice::test::parks;

TEST_CASE("a sequence that was parked and resumed attends the same, bit for bit", "[engine][park]") {
  constexpr std::array kPolicies{"sluice",
                                 kExact,
                                 "quest",
                                 "lfps",
                                 "tactic:least=16,size=4,recluster=64",
                                 kFull,
                                 "magicpig",
                                 "double_sparsity",
                                 "adakv:budget=60",
                                 "vattention:heavy=16 | near=0,sinks=4,recent=16",
                                 "adamas:budget=30",
                                 "infinigen:alpha=1 | dense=1",
                                 "twilight | near=0",
                                 "arkvale",
                                 "psa",
                                 "psa | int4",
                                 "topk",
                                 "none | near=0,recent=9",
                                 "sluice | far=max(64, 2%)",
                                 "lfps | far=80"};
  const auto [text, tokens] = GENERATE_COPY(grid(few<12>(kPolicies), std::array{0u, 1u, 16u, 17u, 230u}));
  CAPTURE(text, tokens);
  const EngineRig rig = engine_rig();
  const Story story(kShape, 250, 301);
  const PolicySpec policy = parse_policy(text);
  Engine engine(room_for(rig, policy), rig.device);
  Teller stays = told(engine, rig, story, policy, tokens);
  // What does not learn may have decoded before.
  for (int step = 0; step < 5 && !scheduler::remembers(policy); ++step) (void)decode(engine, rig, stays);
  const Area area = parked(engine, stays.id);
  Teller back = resumed(engine, area, stays);
  REQUIRE(parked(engine, back.id) == area);
  for (int step = 0; step < 8; ++step)
    REQUIRE(difference(decode(engine, rig, back), decode(engine, rig, stays)) == 0.0);
}

TEST_CASE("a policy that was built in code comes back with its sequence, whatever it says", "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 150, 313);
  std::mt19937 rng(17);
  PolicySpec share = parse_policy("pages:budget=8 | top_k=all | near=0,sinks=4,recent=0");
  share.pages.share = 0.5f;
  PolicySpec local = parse_policy("exact | top_k=8 | near=0,sinks=4,recent=0 | bypass=sink:0.02");
  local.history.local_tokens = 90;
  std::vector<PolicySpec> policies{share, local, parse_policy("exact | int4 | top_k=20 | near=0 | far=3%")};
  while (policies.size() < 40) {
    policies.push_back(random_policy(rng));
    const PolicySpec& newest = policies.back();
    const bool bypasses_copies = scheduler::code_bits(newest) != 0 && newest.bypass_threshold > 0.f;
    const bool starved = newest.far.min_tokens <
                         scheduler::least_far_tokens(newest, scheduler::row_shape(kShape, EngineOptions{}.page_tokens));
    if (newest.near.share != 0.f || bypasses_copies || starved) policies.pop_back();
  }
  for (const PolicySpec& policy : policies) {
    CAPTURE(to_string(policy));
    Engine engine(room_for(rig, policy), rig.device);
    Teller stays = told(engine, rig, story, policy, 130);
    Teller back = resumed(engine, parked(engine, stays.id), stays);
    for (int step = 0; step < 3; ++step)
      REQUIRE(difference(decode(engine, rig, back), decode(engine, rig, stays)) == 0.0);
  }
}

TEST_CASE("a sequence that nobody could resume is not parked", "[engine][park]") {
  const EngineRig rig = engine_rig();
  PolicySpec policy = parse_policy(kExact);
  Engine engine(room_for(rig, policy), rig.device);
  for (const std::size_t length : {60'000u, 70'000u}) {
    policy.name = std::string(length, 'n');
    const SequenceId id = engine.begin(policy);
    if (length < 65'536) {
      REQUIRE(engine.tokens(engine.resume(parked(engine, id))) == 0);
    } else {
      REQUIRE(code_of([&] { (void)engine.park_bytes(id); }) == Errc::invalid_argument);
      Area area(100'000);
      REQUIRE(code_of([&] { (void)engine.park(id, area); }) == Errc::invalid_argument);
    }
    engine.end(id);
  }
}

TEST_CASE("what is parked can be resumed, however long its policy's name, with windows and without", "[engine][park]") {
  const bool windows = GENERATE(false, true);
  CAPTURE(windows);
  const EngineRig rig = engine_rig();
  PolicySpec policy = parse_policy("full");
  EngineOptions options = room_for(rig, policy);
  if (windows) options.windows = {0, 40, 40};
  Engine engine(options, rig.device);
  std::uint32_t resumed = 0, refused = 0;
  for (std::size_t length = 65'100; length < 65'536; length += 3) {
    CAPTURE(length);
    policy.name = std::string(length, 'n');
    const SequenceId id = engine.begin(policy);
    Area area(70'000);
    try {
      (void)engine.park(id, area);
      ++resumed;
    } catch (const Error& error) {
      REQUIRE(error.code() == Errc::invalid_argument);
      ++refused;
    }
    if (refused == 0) engine.end(engine.resume(std::span(area).first(engine.park_bytes(id))));
    engine.end(id);
  }
  REQUIRE((resumed != 0 && refused != 0));
}

TEST_CASE("sequences of every element type go on in an engine with other memory and other pages", "[engine][park]") {
  const auto [pages, near, type] =
      GENERATE(grid(std::array{8u, 16u, 64u}, std::array{0u, 3u}, std::array{0u, 1u, 2u, 3u}));
  const EngineRig rig = engine_rig();
  if (type >= rig.kv_dtypes.size()) return;
  const DType dtype = rig.kv_dtypes[type];
  CAPTURE(pages, near, to_string(dtype));
  const Story story(kShape, 180, 302);
  EngineOptions options = room_for(rig, parse_policy("lfps"), 9);
  const std::uint64_t blocks = options.host_bytes / block_bytes(options);
  options.kv_dtype = dtype;
  options.host_bytes = blocks * block_bytes(options);
  Engine first(options, rig.device);
  options.page_tokens = pages;
  options.host_bytes = 500 * 8 / pages * block_bytes(options);
  options.near_bytes = near * near_block_bytes(options);
  options.policies.push_back(parse_policy("snapkv:budget=90,window=40"));
  options.prefill_window = 64;
  Engine second(options, rig.device), third(options, rig.device);
  for (const char* const text : {kExact, "lfps", kFull}) {
    CAPTURE(text);
    const Teller left = told(first, rig, story, parse_policy(text), 150);
    Teller back = resumed(second, parked(first, left.id), left);
    // 4-bit copies are of keys less the mean of the first page: what they choose depends on the size of pages.
    Engine& other = text == kExact ? third : first;
    Teller stays = text == kExact ? told(third, rig, story, parse_policy(text), 150) : left;
    for (int step = 0; step < 10; ++step)
      REQUIRE(difference(decode(second, rig, back), decode(other, rig, stays)) < 2e-3);
  }
}

TEST_CASE("a policy that has learnt from decoded tokens begins anew when it is resumed", "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 303);
  const char* const text =
      GENERATE("lfps", "tactic:least=16,size=4,recluster=64", "magicpig",
               "labels:channels=8,budget=24 | top_k=max(1, 100%) | near=0", "snapkv:budget=60", "adamas:budget=30");
  CAPTURE(text);
  const PolicySpec policy = parse_policy(text);
  Engine engine(room_for(rig, policy), rig.device);
  Teller teller = told(engine, rig, story, policy, 130);
  for (int step = 0; step < 9; ++step) (void)decode(engine, rig, teller);
  Teller back = resumed(engine, parked(engine, teller.id), teller);
  // As one that is given the same tokens without queries: whether they were decoded is no matter then.
  Teller anew{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, anew, 139);
  for (int step = 0; step < 9; ++step) REQUIRE(difference(decode(engine, rig, back), decode(engine, rig, anew)) == 0.0);
  // With the queries of its prompt, if that is all that is left.
  Teller cut = resumed(engine, parked(engine, teller.id), teller);
  engine.truncate(cut.id, 130);
  cut.at = 130;
  Teller prompt = told(engine, rig, story, policy, 130);
  for (int step = 0; step < 9; ++step)
    REQUIRE(difference(decode(engine, rig, cut), decode(engine, rig, prompt)) == 0.0);
}

TEST_CASE("what is parked of shared pages is all of them, and what is resumed can be cut, forked and told more",
          "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 300, 304);
  const PolicySpec policy = parse_policy(GENERATE(as<std::string>{}, kExact, "lfps", "quest"));
  Engine engine(room_for(rig, policy), rig.device);
  Teller parent = told(engine, rig, story, policy, 150);
  Teller child{.story = &story, .id = engine.fork(parent.id, 145), .at = 145};
  const Area area = parked(engine, child.id);
  REQUIRE(engine.memory(child.id).far_pages_shared == engine.memory(child.id).far_pages);
  Teller back = resumed(engine, area, child);
  REQUIRE(engine.memory(back.id).far_pages == engine.memory(child.id).far_pages);
  REQUIRE(engine.memory(back.id).far_pages_shared == 0);
  Teller of_child{.story = &story, .id = engine.fork(child.id, 100), .at = 100};
  Teller of_back{.story = &story, .id = engine.fork(back.id, 100), .at = 100};
  engine.end(parent.id);
  for (auto [a, b] : {std::pair(&of_back, &of_child), std::pair(&back, &child)}) {
    prefill(engine, rig, *a, 201);
    prefill(engine, rig, *b, 201);
    for (int step = 0; step < 3; ++step) REQUIRE(difference(decode(engine, rig, *a), decode(engine, rig, *b)) == 0.0);
  }
  Teller again = resumed(engine, area, {.story = &story, .id = {}, .at = 145});
  engine.truncate(again.id, 33);
  again.at = 33;
  prefill(engine, rig, again, 201);
  const Teller want = told(engine, rig, story, policy, 201);
  Teller other = want;
  for (int step = 0; step < 3; ++step)
    REQUIRE(difference(decode(engine, rig, again), decode(engine, rig, other)) == 0.0);
}

TEST_CASE("names, salt and what was decoded sparsely come back with a sequence", "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 305);
  const PolicySpec policy = parse_policy(kExact);
  const Ids ids = ids_of(200);
  Engine first(room_for(rig, policy), rig.device);
  Teller teller = begin_named(first, story, kExact, ids_of(101), 7);
  prefill(first, rig, teller, 100);
  for (int step = 0; step < 20; ++step) {
    first.name_tokens(teller.id, teller.at, std::span(ids).subspan(teller.at, 1));
    (void)decode(first, rig, teller);
  }
  first.name_tokens(teller.id, 120, std::span(ids).subspan(120, 9));  // Of some that are still to come.
  const Area area = parked(first, teller.id);
  Engine second(room_for(rig, policy), rig.device);
  Teller back = resumed(second, area, teller);
  REQUIRE(second.match_prefix(policy, ids, 7) == 96);  // The rest was decoded by a policy that leaves some out.
  REQUIRE(second.match_prefix(policy, ids, 8) == 0);
  REQUIRE(code_of([&] { second.name_tokens(back.id, 130, ids); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { second.name_tokens(back.id, 110, ids); }) == Errc::invalid_argument);
  second.name_tokens(back.id, 129, std::span(ids).subspan(129));
  Teller mate = begin_named(second, story, kExact, ids, 7);
  REQUIRE(mate.at == 96);
  second.end(back.id);
  prefill(second, rig, mate, 150);
  prefill(first, rig, teller, 150);
  REQUIRE(difference(decode(second, rig, mate), decode(first, rig, teller)) < 0.1);  // Some were decoded sparsely.
  Teller own = told(second, rig, story, policy, 150);
  Teller shared = begin_named(second, story, kExact, ids, 7);
  prefill(second, rig, shared, 150);
  REQUIRE(difference(decode(second, rig, shared), decode(second, rig, own)) == 0.0);
  // Where an engine has shorter sequences, names of what can never come are left out.
  EngineOptions shorter = room_for(rig, policy);
  shorter.largest.max_tokens = 128;
  Engine third(shorter, rig.device);
  REQUIRE(third.tokens(third.resume(area)) == 120);
}

TEST_CASE("sequences are parked and resumed beside forwards of others, not of their own", "[engine][park]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 200, 306);
  const PolicySpec policy = parse_policy(kExact);
  Engine engine(room_for(rig, policy, 4), rig.device);
  Teller busy = told(engine, rig, story, policy, 140);
  Teller rests = told(engine, rig, story, policy, 120);
  Area area(engine.park_bytes(busy.id));
  ForwardTensors tensors(*rig.device, kShape, engine.options().largest.rows());
  tensors.set(0, story, busy.at);
  const PlanItem item{.sequence = busy.id};
  const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
  REQUIRE(code_of([&] { (void)engine.park(busy.id, area); }) == Errc::invalid_argument);
  REQUIRE(code_of([&] { (void)engine.park_bytes(busy.id); }) == Errc::invalid_argument);
  Teller back = resumed(engine, parked(engine, rests.id), rests);
  tensors.attend(engine, rig.stream);
  Teller second = resumed(engine, parked(engine, rests.id), rests);
  engine.finish(batch);
  ++busy.at;
  for (int step = 0; step < 5; ++step) {
    const auto want = decode(engine, rig, rests);
    REQUIRE(difference(decode(engine, rig, back), want) < tolerance(rig));
    REQUIRE(difference(decode(engine, rig, second), want) < tolerance(rig));
  }
  // One whose import has not come to its last layer is not to be had either.
  const auto buffer = rig.device->allocate_pinned(kShape.kv_heads * kShape.head_dim * sizeof(float));
  const auto row = dense_view<const std::byte>(buffer->data(), DType::f32, 1, kShape.kv_heads, kShape.head_dim);
  engine.import_prefix(back.id, LayerId{0}, row, row, rig.stream);
  REQUIRE(code_of([&] { (void)engine.park(back.id, area); }) == Errc::invalid_argument);
  Teller third = resumed(engine, parked(engine, rests.id), rests);
  engine.end(back.id);
  REQUIRE(difference(decode(engine, rig, third), decode(engine, rig, rests)) < tolerance(rig));
}
