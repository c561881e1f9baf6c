// What an Engine must do on every device.
#include <algorithm>
#include <thread>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_plain.hpp"
#include "tests/support/sanitized.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::plain;

TEST_CASE("an engine that may choose every token attends densely, whatever is near", "[engine]") {
  const auto [near, rows, prompt] =
      GENERATE(grid(std::array{0u, 3u, 100u}, std::array{1u, 8u}, std::array{0u, 1u, 250u}));
  CAPTURE(near, rows, prompt);
  const EngineRig rig = engine_rig();
  Engine engine(options_for(rig, rows, 40, near), rig.device);
  const Story story(kShape, prompt + 20, 7);
  Teller teller{.story = &story,
                .id = engine.begin(parse_policy("exact | int4 | top_k=all | near=0,sinks=4,recent=8"))};
  import_story(engine, rig, teller, prompt);
  ForwardTensors tensors(*rig.device, kShape, rows);
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(error_of(out[0], story, teller.at - 1, 4, 8, 100'000) < kTolerance);
    REQUIRE(engine.tokens(teller.id) == teller.at);
  }
  const EngineStats stats = engine.stats();
  std::uint64_t attended = 0;
  for (std::uint32_t n = prompt + 1; n <= prompt + 20; ++n)
    attended += std::uint64_t{n} * kShape.layers * kShape.kv_heads;
  REQUIRE(stats.near_tokens + stats.far_tokens == attended);
  if (near == 0) REQUIRE(stats.near_tokens == 0);
  if (near == 100) REQUIRE(stats.asked == 0);
  if (near == 0) REQUIRE(engine.stats().asked == std::uint64_t{kShape.layers} * 20);
  REQUIRE(engine.stats().unplanned == 0);
}

TEST_CASE("an engine attends sinks, recent tokens and what each head ranks highest", "[engine]") {
  struct Choice {
    std::uint32_t sinks, recent, picks;
  };
  const auto [choice, near] =
      GENERATE(grid(std::array{Choice{0, 1, 1}, Choice{4, 16, 24}, Choice{20, 40, 100}}, std::array{0u, 6u}));
  CAPTURE(choice.sinks, choice.recent, choice.picks, near);
  const EngineRig rig = engine_rig();
  Engine engine(options_for(rig, 1, 40, near), rig.device);
  const Story story(kShape, 320, 21);
  const std::string policy = "exact | int4 | top_k=" + std::to_string(choice.picks) +
                             " | near=0,sinks=" + std::to_string(choice.sinks) +
                             ",recent=" + std::to_string(choice.recent);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  import_story(engine, rig, teller, 300);
  ForwardTensors tensors(*rig.device, kShape, 1);
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(error_of(out[0], story, teller.at - 1, choice.sinks, choice.recent, choice.picks) < kTolerance);
  }
}

TEST_CASE("a batch of any mix attends what its sequences attend alone, near or far", "[engine]") {
  const EngineRig rig = engine_rig();
  // Near and far may round differently.
  const double kSame = rig.kv_dtype == DType::f32 ? 2e-5 : 2e-4;
  constexpr std::uint32_t kSteps = 12;
  const std::uint32_t prompts[] = {1, 40, 333, 129, 16, 17, 250, 90};
  std::vector<Story> stories;
  for (std::uint32_t i = 0; i < 8; ++i) stories.emplace_back(kShape, prompts[i] + kSteps, 50 + i);
  const auto policy = parse_policy("exact | int4 | top_k=30 | near=0,sinks=4,recent=12");
  std::vector<std::vector<std::vector<float>>> alone(8);
  for (std::uint32_t i = 0; i < 8; ++i) {
    Engine engine(options_for(rig, 1, 100, 0), rig.device);
    Teller teller{.story = &stories[i], .id = engine.begin(policy)};
    import_story(engine, rig, teller, prompts[i]);
    ForwardTensors tensors(*rig.device, kShape, 1);
    for (std::uint32_t s = 0; s < kSteps; ++s) alone[i].push_back(run_forward(engine, rig, tensors, {&teller})[0]);
  }
  for (const std::uint32_t near : {0u, 10u, 100u}) {
    CAPTURE(near);
    Engine engine(options_for(rig, 8, 100, near), rig.device);
    std::vector<Teller> tellers;
    for (std::uint32_t i = 0; i < 8; ++i) {
      tellers.push_back({.story = &stories[i], .id = engine.begin(policy)});
      import_story(engine, rig, tellers[i], prompts[i]);
    }
    ForwardTensors tensors(*rig.device, kShape, 8);
    for (std::uint32_t s = 0; s < 3 * kSteps; ++s) {
      std::vector<Teller*> batch;  // Other mates and other rows every time, and often padding.
      for (std::uint32_t i = 0; i < 8; ++i) {
        Teller& teller = tellers[(i + s) % 8];
        if ((i * 7 + s * 3) % 5 < 3 && teller.at < teller.story->tokens()) batch.push_back(&teller);
      }
      if (batch.empty()) continue;
      const auto out = run_forward(engine, rig, tensors, batch);
      for (std::size_t row = 0; row < batch.size(); ++row) {
        const auto i = static_cast<std::size_t>(batch[row] - tellers.data());
        REQUIRE(difference(out[row], alone[i][batch[row]->at - 1 - prompts[i]]) < kSame);
      }
      for (auto row = static_cast<std::uint32_t>(batch.size()); row < 8; ++row) {
        REQUIRE(std::ranges::all_of(tensors.out(row), [](float x) { return x == 0.f; }));
      }
    }
    for (const Teller& teller : tellers) REQUIRE(engine.tokens(teller.id) > prompts[&teller - tellers.data()]);
  }
}

TEST_CASE("sequences come and go, and leave no block behind", "[engine]") {
  const EngineRig rig = engine_rig();
  Engine engine(options_for(rig, 2, 12, 5), rig.device);
  const Story story(kShape, 180, 9);
  ForwardTensors tensors(*rig.device, kShape, 2);
  const auto policy = parse_policy("exact | int4 | top_k=12 | near=0,sinks=4,recent=8");
  for (std::uint32_t round = 0; round < 12; ++round) {
    Teller a{.story = &story, .id = engine.begin(policy)};
    Teller b{.story = &story, .id = engine.begin(policy)};
    import_story(engine, rig, a, 60 + round);
    import_story(engine, rig, b, 100 - 3 * round);
    for (int step = 0; step < 3; ++step) {
      const auto out = run_forward(engine, rig, tensors, {&a, &b});
      REQUIRE(error_of(out[0], story, a.at - 1, 4, 8, 12) < kTolerance);
      REQUIRE(error_of(out[1], story, b.at - 1, 4, 8, 12) < kTolerance);
    }
    Teller c{.story = &story, .id = engine.begin(policy)};
    REQUIRE(code_of([&] { import_story(engine, rig, c, 99); }) == Errc::out_of_capacity);
    engine.end(a.id);
    engine.end(c.id);
    engine.end(b.id);
    REQUIRE(code_of([&] { (void)engine.tokens(a.id); }) == Errc::not_found);
  }
  // Nor a near place: what fits there is attended there.
  const std::uint64_t asked = engine.stats().asked;
  Teller small{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, small, 5 * 16 - 2);
  (void)run_forward(engine, rig, tensors, {&small});
  REQUIRE(engine.stats().asked == asked);
  engine.end(small.id);
  // All of the pool for one sequence.
  Teller whole{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, whole, 12 * 16 - 13);
  const auto out = run_forward(engine, rig, tensors, {&whole});
  REQUIRE(error_of(out[0], story, whole.at - 1, 4, 8, 12) < kTolerance);
}

TEST_CASE("an engine serves every page size, group and type, and gives the log-sum-exp", "[engine]") {
  const EngineRig rig = engine_rig();
  const auto [type, page_tokens, group, head_dim] =
      GENERATE(grid(std::array{0u, 1u, 2u, 3u}, std::array{8u, 32u, 256u}, std::array{1u, 12u, 32u},
                    std::array{64u, 96u, 128u, 192u, 256u}));
  const DType dtype = rig.kv_dtypes[type % rig.kv_dtypes.size()];
  CAPTURE(to_string(dtype), page_tokens, group, head_dim);
  const AttentionShape shape{.layers = 1, .q_heads = 2 * group, .kv_heads = 2, .head_dim = head_dim};
  EngineOptions options{.shape = shape,
                        .page_tokens = page_tokens,
                        .kv_dtype = dtype,
                        .policies = {parse_policy("exact | int4 | top_k=20 | near=0,sinks=3,recent=11")},
                        .threads = 2,
                        .pin_threads = false};
  options.host_bytes = div_up(400, page_tokens) * block_bytes(options);
  options.near_bytes = 128 / page_tokens * near_block_bytes(options);
  Engine engine(options, rig.device);
  const Story story(shape, 363, 31, page_tokens);
  Teller teller{.story = &story,
                .id = engine.begin(parse_policy("exact | int4 | top_k=20 | near=0,sinks=3,recent=11"))};
  import_story(engine, rig, teller, 360);
  ForwardTensors tensors(*rig.device, shape, 1);
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    std::vector<double> lse;
    REQUIRE(worst(out[0], story.attended(0, teller.at - 1, 3, 11, 20, &lse), 0) < kTolerance);
    REQUIRE(worst(tensors.lse(0), lse, 0) < 1e-2);
  }
}

TEST_CASE("a far part of thousands of rows is answered whole", "[engine]") {
  const EngineRig rig = engine_rig();
  const std::uint32_t prompt = GENERATE(from_range(few<1>(std::array{5003u, 4000u})));
  const AttentionShape shape{.layers = 2, .q_heads = 2, .kv_heads = 1, .head_dim = 64};
  const PolicySpec policy = parse_policy("exact | int4 | top_k=all | near=0,sinks=3,recent=11");
  EngineOptions options{
      .shape = shape, .kv_dtype = rig.kv_dtype, .policies = {policy}, .threads = 3, .pin_threads = false};
  options.host_bytes = 320 * block_bytes(options);
  options.near_bytes = 10 * near_block_bytes(options);
  options.import_rows = 2000;
  Engine engine(options, rig.device);
  const Story story(shape, prompt + 5, 41);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, teller, prompt);
  ForwardTensors tensors(*rig.device, shape, 1);
  const std::size_t row = std::size_t{shape.q_heads} * shape.head_dim;
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
      REQUIRE(worst(out[0], story.attended(layer, teller.at - 1, 3, 11, 10'000), layer * row) < kTolerance);
  }
}

TEST_CASE("of long sequences the highest are chosen, ties by the lowest token", "[engine]") {
  const auto [period, picks] = GENERATE(grid(std::array{100'000u, 4096u, 7u}, std::array{1u, 200u, 1500u, 9000u}));
  CAPTURE(period, picks);
  const EngineRig rig = engine_rig();
  const AttentionShape shape{.layers = 1, .q_heads = 6, .kv_heads = 1, .head_dim = 64};
  const PolicySpec policy =
      parse_policy("exact | int4 | top_k=" + std::to_string(picks) + " | near=0,sinks=3,recent=11");
  EngineOptions options{
      .shape = shape, .kv_dtype = rig.kv_dtype, .policies = {policy}, .threads = 2, .pin_threads = false};
  // Long enough for several thread blocks of a GPU to share them.
  const std::uint32_t tokens = rig.on_gpu ? 20'000 : 2'000;
  options.host_bytes = (tokens / 16 + 10) * block_bytes(options);
  options.near_bytes = 60 * near_block_bytes(options);
  options.import_rows = 5000;
  Engine engine(options, rig.device);
  Story story(shape, tokens + 2, 43);
  story.repeat_keys(period);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, teller, tokens);
  ForwardTensors tensors(*rig.device, shape, 1);
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    REQUIRE(worst(out[0], story.attended(0, teller.at - 1, 3, 11, picks), 0) < kTolerance);
  }
}

TEST_CASE("rows of long sequences lie near, far or either, in layers that choose and that have windows",
          "[engine]") {
  const auto [near_pages, picks] = GENERATE(grid(std::array{0u, 60u, 1300u}, std::array{200u, 3000u}));
  CAPTURE(near_pages, picks);
  const EngineRig rig = engine_rig();
  const AttentionShape shape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 128};
  const PolicySpec policy =
      parse_policy("exact | int4 | top_k=" + std::to_string(picks) + " | near=0,sinks=3,recent=11");
  EngineOptions options{.shape = shape,
                        .kv_dtype = rig.kv_dtype,
                        .policies = {policy},
                        .largest = {.decode_rows = 2},
                        .threads = 2,
                        .pin_threads = false};
  const std::uint32_t tokens = rig.on_gpu ? 20'000 : 2'000;
  options.windows = {1500, 0};
  options.host_bytes = (tokens / 16 + 10) * block_bytes(options);
  options.near_bytes = near_pages * near_block_bytes(options);
  options.import_rows = 5000;
  Engine engine(options, rig.device);
  Story story(shape, tokens + 3, 53);
  story.see(options.windows);
  Teller teller{.story = &story, .id = engine.begin(policy)};
  import_story(engine, rig, teller, tokens);
  ForwardTensors tensors(*rig.device, shape, 2);  // There is no other row.
  const std::size_t row = std::size_t{shape.q_heads} * shape.head_dim;
  while (teller.at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&teller});
    const std::uint32_t token = teller.at - 1;
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
      REQUIRE(worst(out[0], story.attended(layer, token, 3, 11, picks), layer * row) < kTolerance);
  }
  const EngineStats stats = engine.stats();
  REQUIRE((stats.near_tokens > 0) == (near_pages != 0));
  REQUIRE((stats.far_tokens > 0) == (near_pages != 1300));
}

TEST_CASE("a step chooses the highest, whatever the one before let expect", "[engine]") {
  const std::uint32_t period = GENERATE(100'000u, 100u);
  CAPTURE(period);
  const EngineRig rig = engine_rig();
  const AttentionShape shape{.layers = 2, .q_heads = 10, .kv_heads = 1, .head_dim = 64};
  EngineOptions options = named({.shape = shape, .kv_dtype = rig.kv_dtype, .threads = 2, .pin_threads = false},
                                {"exact | int4 | top_k=300 | near=0,sinks=3,recent=11"});
  const std::uint32_t tokens = rig.on_gpu ? 20'000 : 2'000;
  options.host_bytes = 2 * (tokens / 16 + 10) * block_bytes(options);
  options.near_bytes = 60 * near_block_bytes(options);
  options.import_rows = 5000;
  Engine engine(options, rig.device);
  // Much the same for a while, then longer, shorter, the other way round, and of no length.
  const float lengths[] = {1, 1, 1, 1, 8, 8, 0.02f, -1, -1, 1, 0, 0, 1, 1, 0.25f, 1};
  Story story(shape, tokens + std::size(lengths), 47);
  story.repeat_keys(period);
  for (std::uint32_t i = 0; i < std::size(lengths); ++i) story.scale_queries(tokens + i, lengths[i]);
  const std::uint32_t picks[] = {300, 40};
  std::vector<Teller> tellers;
  for (const std::uint32_t each : picks) {
    tellers.push_back({.story = &story,
                       .id = engine.begin(parse_policy("exact | int4 | top_k=" + std::to_string(each) +
                                                       " | near=0,sinks=3,recent=11"))});
  }
  for (Teller& teller : tellers) import_story(engine, rig, teller, tokens);
  ForwardTensors tensors(*rig.device, shape, 1);
  const std::size_t row = std::size_t{shape.q_heads} * shape.head_dim;
  // One row, of either in turn, so that what is expected is of the other as well.
  for (std::uint32_t step = 0; tellers[1].at < story.tokens(); ++step) {
    const std::size_t which = step / 3 % 2 == 0 && tellers[0].at < story.tokens() ? 0 : 1;
    const auto out = run_forward(engine, rig, tensors, {&tellers[which]});
    const std::uint32_t token = tellers[which].at - 1;
    CAPTURE(which, token);
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
      REQUIRE(worst(out[0], story.attended(layer, token, 3, 11, picks[which]), layer * row) < kTolerance);
  }
}

TEST_CASE("what is not a number shows: near, far and over the link", "[engine]") {
  struct Where {
    std::uint32_t near;
    PlacementMode placement;
  };
  const auto [near, placement] =
      GENERATE(Where{0, PlacementMode::hybrid}, Where{2, PlacementMode::hybrid}, Where{100, PlacementMode::hybrid},
               Where{0, PlacementMode::stream}, Where{2, PlacementMode::stream});
  CAPTURE(near, to_string(placement));
  const EngineRig rig = engine_rig();
  EngineOptions options = options_for(rig, 2, 60, near);
  options.placement = placement;
  Engine engine(options, rig.device);
  Story story(kShape, 140, 12);
  const Story sane(kShape, 140, 13);
  story.poison(1, 131);  // Among the recent tokens of some steps.
  const auto policy = parse_policy("exact | int4 | top_k=10 | near=0,sinks=2,recent=4");
  Teller tellers[] = {{.story = &story, .id = engine.begin(policy)}, {.story = &sane, .id = engine.begin(policy)}};
  for (Teller& teller : tellers) import_story(engine, rig, teller, 125);
  ForwardTensors tensors(*rig.device, kShape, 2);
  const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
  while (tellers[0].at < story.tokens()) {
    const auto out = run_forward(engine, rig, tensors, {&tellers[0], &tellers[1]});
    const std::uint32_t token = tellers[0].at - 1;
    const bool sees = token >= 131 && token < 135;
    for (std::size_t i = 0; i < 3 * row; ++i) REQUIRE(std::isnan(out[0][i]) == (sees && i / row == 1));
    REQUIRE(error_of(out[1], sane, token, 2, 4, 10) < kTolerance);
  }
}
