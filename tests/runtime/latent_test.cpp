// Latent attention on the CPU, values being the first elements of keys, with more query heads than a group has.
#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "sluice/engine.hpp"
#include "tests/runtime/latents.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/reference.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr std::uint32_t kLayers = kLatentLayers;
constexpr std::uint32_t kChunk = 48;

EngineOptions options_of(const Latents& of, const char* policy = "full",
                         PlacementMode placement = PlacementMode::hybrid) {
  EngineOptions options{.shape = {.layers = kLayers,
                                  .q_heads = of.heads,
                                  .kv_heads = 1,
                                  .head_dim = of.head_dim,
                                  .value_dim = of.value_dim},
                        .kv_dtype = DType::f32,
                        .host_bytes = 8 * MiB,
                        .placement = placement,
                        .policies = {parse_policy(policy)},
                        .largest = {.decode_rows = 2, .prefill_rows = kChunk, .prefills = 1, .max_tokens = 256},
                        .sequences = 4,
                        .threads = 1,
                        .pin_threads = false,
                        .answer_timeout = std::chrono::seconds(30)};
  return options;
}

/// The same attention by KV heads of keys and values of their own, all alike: one for each group of query heads.
EngineOptions replicated(EngineOptions options) {
  options.shape = attended_shape(options.shape);
  options.shape.value_dim = 0;
  return options;
}

/// Against float64: heads of a row that attend all of `some`.
void check_row(const Latents& of, std::uint32_t token, const std::set<std::uint32_t>& some,
               const std::vector<float>& got) {
  REQUIRE(got.size() == std::size_t{kLayers} * of.heads * (of.value_dim + 1));
  for (std::uint32_t layer = 0, at = 0; layer < kLayers; ++layer) {
    for (std::uint32_t h = 0; h < of.heads; ++h, at += of.value_dim + 1) {
      const std::vector<double> want = of.attended(layer, token, h, some);
      CAPTURE(layer, h);
      CHECK(max_abs_diff(std::span(got).subspan(at, of.value_dim + 1), std::span<const double>(want)) < 2e-5);
    }
  }
}

std::set<std::uint32_t> up_to(std::uint32_t token) {
  std::set<std::uint32_t> all;
  for (std::uint32_t j = 0; j <= token; ++j) all.insert(j);
  return all;
}

void check_refused(const char* said, const EngineOptions& options, Errc code = Errc::unsupported) {
  const Refusal refusal = refusal_of([&] { Engine engine(options); });
  CAPTURE(said, refusal.text);
  CHECK(refusal.code == code);
  CHECK(refusal.text.find(said) != std::string::npos);
}

}  // namespace

TEST_CASE("groups of latent attention are as few and as large as are equal", "[engine][latent]") {
  const auto groups = [](std::uint32_t q_heads) {
    return attended_shape({.layers = 1, .q_heads = q_heads, .kv_heads = 1, .head_dim = 576, .value_dim = 512}).kv_heads;
  };
  CHECK(groups(1) == 1);
  CHECK(groups(16) == 1);
  CHECK(groups(32) == 1);
  CHECK(groups(40) == 2);
  CHECK(groups(37) == 37);
  CHECK(groups(96) == 3);
  CHECK(groups(128) == 4);
}

TEST_CASE("latent attention is what float64 makes of keys whose beginnings are values", "[engine][latent]") {
  const auto [heads, dim, used] = GENERATE(table<std::uint32_t, std::uint32_t, std::uint32_t>(
      {{1, 96, 64}, {7, 48, 48}, {40, 96, 64}, {16, 576, 512}, {128, 576, 512}}));
  CAPTURE(heads, dim, used);
  const Latents of(heads, dim, used, heads == 128 ? 70 : 200);
  Engine engine(options_of(of));
  LatentDriver driver(engine, of);
  const SequenceId id = engine.begin(parse_policy("full"));
  check_row(of, 0, {0}, driver.forward(id, 0, 1, true));
  check_row(of, kChunk, up_to(kChunk), driver.forward(id, 1, kChunk, true));
  check_row(of, kChunk + 1, up_to(kChunk + 1), driver.forward(id, kChunk + 1, 1, false));
  CHECK(engine.memory().far_pages <= engine.options().host_bytes);
  CHECK(engine.far_bytes(id) == 4 * kLayers * engine.options().page_tokens * dim * sizeof(float));
}

TEST_CASE("query heads of latent attention that choose attend what those of their group chose", "[engine][latent]") {
  const Latents of(64, 96, 64);
  constexpr const char* kPolicy = "scores | top_k=5 | near=0,sinks=2,recent=3";
  Engine engine(options_of(of, kPolicy));
  LatentDriver driver(engine, of);
  const SequenceId id = engine.begin(parse_policy(kPolicy));
  driver.prompt(id, 150);
  // The driver's scores are those of query head 0, for all heads.
  std::vector<float> got = driver.forward(id, 150, 1, false);
  const std::size_t layer_floats = got.size() / kLayers;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    std::vector<std::pair<double, std::uint32_t>> best;
    for (std::uint32_t j = 2; j < 148; ++j) best.emplace_back(-of.score(layer, 150, 0, j), j);
    std::ranges::sort(best);
    std::set<std::uint32_t> some{0, 1, 148, 149, 150};
    for (std::size_t i = 0; i < 5; ++i) some.insert(best[i].second);
    for (std::uint32_t h = 0; h < of.heads; ++h) {
      const std::vector<double> want = of.attended(layer, 150, h, some);
      CAPTURE(layer, h);
      CHECK(max_abs_diff(std::span(got).subspan(layer * layer_floats + h * 65, 65), std::span<const double>(want)) <
            2e-5);
    }
  }
}

TEST_CASE("latent attention is that of KV heads whose keys are alike, bit by bit", "[engine][latent]") {
  constexpr std::array kPolicies{"full",
                                 "exact | int4 | top_k=24 | near=0,sinks=4,recent=9",
                                 "exact | int3 | top_k=24 | near=0,sinks=4,recent=9",
                                 "exact | int4 | top_p=0.9 | near=0,sinks=4,recent=9",
                                 "exact | int4 | sample=12 | near=0,sinks=4,recent=9",
                                 "scores | top_k=12 | near=0,sinks=4,recent=9",
                                 "sluice",
                                 "streaming"};
  const auto [heads, dtype] =
      GENERATE(table<std::uint32_t, DType>({{16, DType::f32}, {40, DType::bf16}, {64, DType::f32}}));
  const auto placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const char* const text = GENERATE_COPY(from_range(kPolicies));
  CAPTURE(heads, to_string(placement), to_string(dtype), text);
  const Latents of(heads, 96, 64);
  const PolicySpec policy = parse_policy(text);
  EngineOptions options = options_of(of, text, placement);
  options.kv_dtype = dtype;
  const auto told = [&](const EngineOptions& with) {
    Engine engine(with);
    LatentDriver driver(engine, of);
    std::vector<std::vector<float>> all;
    const SequenceId id = engine.begin(policy);
    driver.import(id, 0, 20);
    all.push_back(driver.forward(id, 20, 40, true));
    driver.prompt(engine.begin(policy), 30);
    for (std::uint32_t at = 60; at < 100; at += 20) all.push_back(driver.forward(id, at, 20, true));
    for (std::uint32_t at = 100; at < 110; ++at) all.push_back(driver.forward(id, at, 1, false));
    const SequenceId fork = engine.fork(id, 103);
    engine.truncate(id, 105);
    all.push_back(driver.forward(fork, 103, 1, false));
    all.push_back(driver.forward(id, 105, 1, false));
    return all;
  };
  const auto got = told(options);
  CHECK(got == told(replicated(options)));
}

TEST_CASE("two sequences of latent attention on a stream are each what it is alone and at once",
          "[engine][latent][stream]") {
  const char* const text = GENERATE("full", "exact | int4 | sample=12 | near=0,sinks=4,recent=9",
                                    "scores | top_k=12 | near=0,sinks=4,recent=9");
  const auto placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  CAPTURE(text, to_string(placement));
  const Latents of(40, 96, 64);
  const PolicySpec policy = parse_policy(text);
  const EngineOptions options = options_of(of, text, placement);
  const auto alone = [&](std::uint32_t tokens) {
    Engine engine(options);
    LatentDriver driver(engine, of);
    const SequenceId id = engine.begin(policy);
    driver.import(id, 0, 20);
    for (std::uint32_t at = 20; at < tokens; at += 20) (void)driver.forward(id, at, 20, true);
    std::vector<std::vector<float>> all;
    for (std::uint32_t at = tokens; at < tokens + 6; ++at) all.push_back(driver.forward(id, at, 1, false));
    return all;
  };
  const auto longer = alone(100), shorter = alone(40);

  const std::shared_ptr<Device> device = own_device();
  const std::unique_ptr<Stream> stream = device->create_stream("caller");
  Engine engine(options, device);
  LatentDriver driver(engine, of, stream.get());
  const SequenceId first = engine.begin(policy), second = engine.begin(policy);
  for (const SequenceId id : {first, second}) driver.import(id, 0, 20);
  for (std::uint32_t at = 20; at < 100; at += 20) (void)driver.forward(first, at, 20, true);
  (void)driver.forward(second, 20, 20, true);
  for (std::uint32_t step = 0; step < 6; ++step) {
    std::vector<float> both = longer[step];
    both.insert(both.end(), shorter[step].begin(), shorter[step].end());
    CHECK(driver.decode({{first, 100 + step}, {second, 40 + step}}) == both);
  }
}

TEST_CASE("a key that is no number makes outputs of latent attention none", "[engine][latent]") {
  Latents of(40, 96, 64);
  of.k[std::size_t{30} * 96 + 90] = NAN;  // Of the first layer, behind its value.
  Engine engine(options_of(of));
  LatentDriver driver(engine, of);
  const SequenceId id = engine.begin(parse_policy("full"));
  driver.prompt(id, 40);
  const std::vector<float> got = driver.forward(id, 40, 1, false);
  const auto half = got.begin() + static_cast<std::ptrdiff_t>(got.size() / 2);
  CHECK(std::all_of(got.begin(), half, [](float x) { return std::isnan(x); }));
  CHECK(std::none_of(half, got.end(), [](float x) { return std::isnan(x); }));
}

TEST_CASE("names find what prompts of latent attention have in common", "[engine][latent]") {
  const Latents of(40, 96, 64);
  Engine engine(options_of(of));
  LatentDriver driver(engine, of);
  std::vector<std::int32_t> ids(64);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 3 % 17);
  const PolicySpec full = parse_policy("full");
  const SequenceId first = engine.begin(full, ids);
  driver.prompt(first, 64);
  engine.name_tokens(first, 0, ids);
  const std::vector<float> want = driver.forward(first, 64, 1, false);
  engine.end(first);
  ids.push_back(1);
  const SequenceId second = engine.begin(full, ids);
  REQUIRE(engine.tokens(second) == 64);
  CHECK(driver.forward(second, 64, 1, false) == want);
}

TEST_CASE("what latent attention does without is refused by name", "[engine][latent]") {
  const Latents of(40, 96, 64);
  const auto with = [&](auto change) {
    EngineOptions options = options_of(of);
    change(options);
    return options;
  };
  check_refused("fp8_e4m3", with([](auto& o) { o.kv_dtype = DType::fp8_e4m3; }));
  check_refused("windows", with([](auto& o) { o.windows = {0, 64}; }));
  check_refused("near_bytes", with([](auto& o) { o.near_bytes = 1 * MiB; }));
  check_refused("drafts", with([](auto& o) { o.largest.decode_rows = o.largest.drafts = 2; }));
  check_refused("audit", with([](auto& o) { o.largest.audit = true; }));
  check_refused("trace", with([](auto& o) { o.largest.trace = true; }));
  check_refused("prefill", with([](auto& o) { o.prefill.mode = PrefillMode::flexprefill; }));
  check_refused("cpu_sequences", with([](auto& o) { o.cpu_sequences = 1; }));
  check_refused("cluster_sequences", with([](auto& o) { o.cluster_sequences = 1; }));
  const auto invalid = [&](const char* said, auto change) {
    check_refused(said, with(change), Errc::invalid_argument);
  };
  invalid("kv_heads", [](auto& o) { o.shape.kv_heads = 2; });
  invalid("value_dim", [](auto& o) { o.shape.value_dim = 40; });
  invalid("value_dim", [](auto& o) { o.shape.value_dim = 112; });
  invalid("head_dim", [](auto& o) { o.shape.head_dim = 592; });
  invalid("head_dim", [](auto& o) { o.shape = {.layers = 2, .q_heads = 4, .kv_heads = 1, .head_dim = 272}; });
  invalid("q_heads / shape.kv_heads", [](auto& o) { o.shape.value_dim = 0; });

  for (const char* const text : {"topk", "lfps", "quest", "tactic", "psa | int4", "tactic | int4", "infinigen"}) {
    CAPTURE(text);
    const Refusal refusal = refusal_of([&] { (void)resolved(options_of(of, text)); });
    CHECK(refusal.code == Errc::unsupported);
    CHECK(refusal.text.find("latent attention") != std::string::npos);
  }

  Engine engine(options_of(of));
  LatentDriver driver(engine, of);
  const SequenceId id = engine.begin(parse_policy("full"));
  driver.prompt(id, 20);
  CHECK(refusal_of([&] { (void)engine.park_bytes(id); }).text.find("latent attention") != std::string::npos);
  // Nor does what was parked with values of their own come in.
  const EngineOptions plain = with([](auto& o) { o.shape.q_heads = 20, o.shape.value_dim = 0; });
  const Latents other(20, 96, 96);
  Engine parking(plain);
  const SequenceId kept = parking.begin(parse_policy("full"));
  LatentDriver(parking, other).prompt(kept, 20);
  std::vector<std::byte> area(parking.park_bytes(kept));
  parking.park(kept, area);
  Engine latent(with([](auto& o) { o.shape.q_heads = 20; }));
  const Refusal refusal = refusal_of([&] { (void)latent.resume(area); });
  CHECK(refusal.code == Errc::invalid_argument);
  CHECK(refusal.text.find("values that are the first 64 elements of keys") != std::string::npos);
  const auto kv = dense_view(of.k.data(), DType::f32, 1, 1, 96);
  CHECK(refusal_of([&] { engine.import_prefix(id, LayerId{0}, kv, kv, nullptr); }).text.find("v is given") !=
        std::string::npos);
}
