// The cases of every engine, on a GPU; and forwards of teams, prompts and several buckets in CUDA graphs.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>

#include "gpu/device/cuda_device.hpp"
#include "gpu/head_dims.hpp"
#include "gpu/kernels/compiled.hpp"
#include "sluice/cuda.hpp"
#include "sluice/error.hpp"
#include "tests/gpu/forward_graph.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_rig.hpp"
#include "tools/stages/stages.hpp"

namespace sluice::test {

namespace {

/// What SLUICE_TEST_LINK_ROWS says, for the cases once more that count nothing of it.
std::uint32_t link_rows_or(std::uint32_t usual) {
  const char* const text = std::getenv("SLUICE_TEST_LINK_ROWS");
  return text == nullptr ? usual : static_cast<std::uint32_t>(std::strtoul(text, nullptr, 10));
}

}  // namespace

EngineRig engine_rig() {
  // Cases count what the CPU is asked for; those of few far rows have devices of their own.
  static const std::shared_ptr<Device> device = make_cuda_device({.link_rows = link_rows_or(0)});
  EngineRig rig{.device = device,
                .queue = device->create_stream("caller"),
                .stages = tools::cuda_stages_of(*device),
                .kv_dtype = kv_dtype_or(DType::bf16),
                .on_gpu = true,
                .tolerance = 1e-3,
                .kv_dtypes = {DType::bf16, DType::f16, DType::fp8_e4m3}};
  rig.stream = rig.queue->native_handle();
  return rig;
}

}  // namespace sluice::test

using namespace sluice;
using namespace sluice::test;

namespace {

using Graph = ForwardGraph;
constexpr const char* kPolicy = kGraphPolicy;

}  // namespace

TEST_CASE("a captured forward of teams is the forward, with fewer drafts than it is for, too", "[engine][gpu]") {
  const std::uint32_t near_blocks = GENERATE(0u, 9u);
  const std::uint32_t head_dim = GENERATE(64u, 96u, 128u, 256u);
  const auto [group, drafts] = GENERATE(table<std::uint32_t, std::uint32_t>({{4, 4}, {4, 8}, {7, 3}}));
  const PlacementMode placement = GENERATE(PlacementMode::hybrid, PlacementMode::stream);
  const AttentionShape shape{.layers = 3, .q_heads = 2 * group, .kv_heads = 2, .head_dim = head_dim};
  CAPTURE(near_blocks, head_dim, group, drafts, static_cast<int>(placement));
  const EngineRig rig = engine_rig();
  const Story story(shape, 700, 95);
  EngineOptions options = graph_options(shape, 2 * drafts, near_blocks);
  options.largest.drafts = drafts;
  options.placement = placement;
  const auto told = [&](bool graphs) {
    Engine engine(options, rig.device);
    ForwardTensors tensors(*rig.device, shape, 2 * drafts);
    std::unique_ptr<Graph> graph;
    if (graphs) graph = std::make_unique<Graph>(engine, tensors, static_cast<cudaStream_t>(rig.stream));
    Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
    import_story(engine, rig, teller, 500);
    std::vector<float> all;
    for (std::uint32_t step = 0; teller.at + 2 * drafts <= story.tokens(); ++step) {
      const std::uint32_t count = 1 + step * 5 % (2 * drafts);  // One team or two, the last of them whole or not.
      for (std::uint32_t i = 0; i < count; ++i) tensors.set(i, story, teller.at + i);
      const PlanItem item{.sequence = teller.id, .tokens = count};
      const Batch batch = engine.plan({&item, 1}, options.largest, rig.stream);
      run_planned(engine, rig, tensors, graph.get(), batch, 2 * drafts, all);
      engine.truncate(teller.id, teller.at += (count + 1) / 2);
    }
    return all;
  };
  const std::vector<float> want = told(false);
  REQUIRE(std::ranges::none_of(want, [](float x) { return std::isnan(x); }));
  REQUIRE(told(true) == want);
}

namespace {

/// The upper half of a float that is one of bf16's, or the nearest.
std::uint16_t bf16_of(float x) { return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(x) + 0x8000u) >> 16); }
float float_of(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

/// Rows [first, first + count) of `from`, each of `floats`, as bf16 in memory that the device sees.
std::unique_ptr<Buffer> bf16_rows(Device& device, const auto& from, std::uint32_t first, std::uint32_t count,
                                  std::size_t floats) {
  auto buffer = device.allocate_pinned(count * floats * 2);
  auto* const to = reinterpret_cast<std::uint16_t*>(buffer->data());
  for (std::uint32_t row = 0; row < count; ++row) {
    for (std::size_t i = 0; i < floats; ++i) to[row * floats + i] = bf16_of(from(first + row)[i]);
  }
  return buffer;
}

}  // namespace

TEST_CASE("chunks of a prompt in the type of the pages are attended by warpgroups, window by window", "[engine][gpu]") {
  const std::uint32_t near_blocks = GENERATE(0u, 20u, 80u);
  const std::uint32_t window = GENERATE(64u, 512u, 4096u);
  CAPTURE(near_blocks, window);
  const AttentionShape shape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 128};
  const EngineRig rig = engine_rig();
  EngineOptions options = graph_options(shape, 1, near_blocks);
  options.largest = {.decode_rows = 0, .prefill_rows = 300, .prefills = 1};
  options.prefill_window = window;
  Engine engine(options, rig.device);
  Story story(shape, 840, 17);
  story.round_queries();
  const SequenceId id = engine.begin(parse_policy(kPolicy));
  for (std::uint32_t first = 0, count = 0; first < story.tokens(); first += count) {
    count = std::min({first == 0 ? 1u : first == 1 ? 299u : 300u, story.tokens() - first});
    const Bucket bucket{.decode_rows = 0, .prefill_rows = 300, .prefills = 1};
    const std::size_t q_floats = std::size_t{shape.q_heads} * shape.head_dim;
    const std::size_t kv_floats = std::size_t{shape.kv_heads} * shape.head_dim;
    const auto rows = [&](const auto& of, std::size_t floats) {
      // What is behind the chunk's rows is padding, of any content.
      return bf16_rows(
          *rig.device, [&](std::uint32_t t) { return of(std::min(t, story.tokens() - 1)); }, first, 300, floats);
    };
    const auto q = rows([&](std::uint32_t t) { return story.q(0, t); }, q_floats);
    const auto k = rows([&](std::uint32_t t) { return story.k(0, t); }, kv_floats);
    const auto v = rows([&](std::uint32_t t) { return story.v(0, t); }, kv_floats);
    const auto out = rig.device->allocate_pinned(300 * q_floats * 2 + 300 * shape.q_heads * sizeof(float));
    auto* const lse = reinterpret_cast<float*>(out->data() + 300 * q_floats * 2);
    const auto view = [&](const Buffer& buffer, std::uint32_t heads) {
      return dense_view<const std::byte>(buffer.data(), DType::bf16, 300, heads, shape.head_dim);
    };
    const PlanItem item{.sequence = id, .tokens = count, .prefill = true};
    const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
    engine.attend(bucket, LayerId{0}, view(*q, shape.q_heads), view(*k, shape.kv_heads), view(*v, shape.kv_heads),
                  dense_view(out->data(), DType::bf16, 300, shape.q_heads, shape.head_dim), rig.stream, lse);
    engine.finish(batch);
    rig.synchronize();
    const auto* const got = reinterpret_cast<const std::uint16_t*>(out->data());
    for (std::uint32_t i = 0; i < count; i += 7) {
      std::vector<double> want_lse;
      const auto want = story.attended(0, first + i, story.tokens(), 1, 0, &want_lse);
      double off = 0.0;
      for (std::size_t c = 0; c < q_floats; ++c)
        off = std::max(off, std::abs(want[c] - float_of(got[i * q_floats + c])));
      for (std::uint32_t h = 0; h < shape.q_heads; ++h)
        off = std::max(off, std::abs(want_lse[h] - lse[i * shape.q_heads + h]));
      CAPTURE(first, i);
      REQUIRE(off < 2e-2);  // Weights and outputs are bf16.
    }
    for (std::size_t c = count * q_floats; c < 300 * q_floats; ++c) {
      if (got[c] != 0) REQUIRE(got[c] == 0);
    }
  }
}

TEST_CASE("what is near of a sequence is told while a forward is captured, in every mode", "[engine][gpu][near]") {
  const auto mode =
      GENERATE(cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed);
  CAPTURE(static_cast<int>(mode));
  const EngineRig rig = engine_rig();
  const AttentionShape shape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  const Story story(shape, 310, 93);
  Engine engine(graph_options(shape, 1, 9), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 300);
  ForwardTensors tensors(*rig.device, shape, 1);
  const auto stream = static_cast<cudaStream_t>(rig.stream);
  SequenceMemoryUse use;
  const Graph graph(stream, mode, [&] {
    use = engine.memory(teller.id);
    tensors.attend(engine, rig.stream);
  });
  REQUIRE(use.near_pages != 0);
  REQUIRE(use.near_pages == engine.memory().near_pages_used);
  const PlanItem item{.sequence = teller.id};
  for (; teller.at < story.tokens(); ++teller.at) {
    tensors.set(0, story, teller.at);
    const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
    graph.replay();
    (void)engine.memory(teller.id);  // Also while it runs.
    engine.finish(batch);
    REQUIRE(engine.memory(teller.id).near_pages == engine.memory().near_pages_used);
  }
}

TEST_CASE("graphs of several buckets leave each other alone, replayed with and without a plan", "[engine][gpu]") {
  const AttentionShape shape{.layers = 2, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  const EngineRig rig = engine_rig();
  const bool unbounded = GENERATE(false, true);
  CAPTURE(unbounded);
  constexpr std::uint32_t kRows = 8;
  // Rows long enough that a job of one row has many slices, and of many rows few; with top-p, that it has other
  // kernels.
  const std::string policy = unbounded ? "exact | int4 | top_p=0.9 | near=0,sinks=4,recent=24"
                                       : "exact | int4 | top_k=1500 | near=0,sinks=4,recent=24";
  EngineOptions options{.shape = shape, .policies = {parse_policy(policy)}};
  options.largest = {
      .decode_rows = kRows, .prefill_rows = 40, .prefills = 2, .max_tokens = 10'240, .unbounded = unbounded};
  options.host_bytes = 1500 * block_bytes(options);
  options.near_bytes = 900 * near_block_bytes(options);
  options.import_rows = 2000;
  options.threads = 4;
  Engine engine(options, rig.device);
  std::vector<Story> stories;
  std::vector<Teller> tellers;
  for (std::uint32_t i = 0; i < kRows; ++i) stories.emplace_back(shape, i == 0 ? 9060 : 1560, 800 + i);
  for (std::uint32_t i = 0; i < kRows; ++i) {
    tellers.push_back({.story = &stories[i], .id = engine.begin(parse_policy(policy))});
    import_story(engine, rig, tellers.back(), stories[i].tokens() - 60);
  }
  const Bucket buckets[] = {{.decode_rows = 1, .unbounded = unbounded},
                            {.decode_rows = kRows, .unbounded = unbounded},
                            {.decode_rows = kRows - 1, .max_tokens = 2048, .unbounded = unbounded},
                            {.decode_rows = 2, .prefill_rows = 40, .prefills = 2, .unbounded = unbounded}};
  const auto stream = static_cast<cudaStream_t>(rig.stream);
  std::vector<std::unique_ptr<ForwardTensors>> tensors;
  std::vector<std::unique_ptr<Graph>> graphs;
  for (const Bucket& bucket : buckets) {
    tensors.push_back(std::make_unique<ForwardTensors>(*rig.device, shape, bucket.rows()));
    graphs.push_back(std::make_unique<Graph>(engine, *tensors.back(), bucket, stream));
  }
  Engine other(options, rig.device);
  std::vector<Teller> alone;
  for (std::uint32_t i = 0; i < kRows; ++i) {
    alone.push_back({.story = &stories[i], .id = other.begin(parse_policy(policy))});
    import_story(other, rig, alone.back(), stories[i].tokens() - 60);
  }
  std::uint64_t unplanned = 0;
  for (std::uint32_t step = 0; step < 24; ++step) {
    const std::uint32_t b = step * 7 % 4;
    std::vector<Teller*> rows;
    for (std::uint32_t i = 0; i < buckets[b].decode_rows; ++i) rows.push_back(&tellers[b == 2 ? i + 1 : i]);
    std::vector<PlanItem> items;
    for (std::uint32_t i = 0; i < rows.size(); ++i) {
      tensors[b]->set(i, *rows[i]->story, rows[i]->at);
      items.push_back({.sequence = rows[i]->id});
    }
    const Batch batch = engine.plan(items, buckets[b], rig.stream);
    graphs[b]->replay();
    engine.finish(batch);
    rig.synchronize();
    ForwardTensors one(*rig.device, shape, options.largest.rows());
    for (std::uint32_t i = 0; i < rows.size(); ++i) {
      ++rows[i]->at;
      const auto got = tensors[b]->out(i);
      const auto want =
          run_forward(other, rig, one, {&alone[static_cast<std::size_t>(rows[i] - tellers.data())]}).front();
      for (std::size_t c = 0; c < got.size(); ++c) {
        if (!(std::abs(got[c] - want[c]) < 2e-3)) REQUIRE(std::abs(got[c] - want[c]) < 2e-3);
      }
    }
    // Another bucket's graph without a plan: no harm to what comes next.
    graphs[(b + step) % 4]->replay();
    rig.synchronize();
    REQUIRE(std::isnan(tensors[(b + step) % 4]->out(0).front()));
    REQUIRE(engine.stats().unplanned == ++unplanned);
  }
}

TEST_CASE("a replayed forward is traced, and attends what it does without", "[engine][gpu]") {
  const AttentionShape shape{.layers = 3, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  const EngineRig rig = engine_rig();
  const Story story(shape, 400, 92);
  EngineOptions options = graph_options(shape, 1, 6);
  Engine untraced(options, rig.device);
  options.largest.trace = true;
  Engine engine(options, rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy(kPolicy))};
  Teller other{.story = &story, .id = untraced.begin(parse_policy(kPolicy))};
  import_story(engine, rig, teller, 360);
  import_story(untraced, rig, other, 360);
  ForwardTensors tensors(*rig.device, shape, 1);
  ForwardTensors plain(*rig.device, shape, 1);
  const Graph graph(engine, tensors, static_cast<cudaStream_t>(rig.stream));
  while (teller.at < story.tokens()) {
    CAPTURE(teller.at);
    tensors.set(0, story, teller.at++);
    const PlanItem item{.sequence = teller.id};
    const Batch batch = engine.plan({&item, 1}, engine.options().largest, rig.stream);
    graph.replay();
    engine.finish(batch);
    rig.synchronize();
    REQUIRE(tensors.out(0) == run_forward(untraced, rig, plain, {&other})[0]);
    const ForwardTrace& trace = engine.trace(batch);
    REQUIRE(trace.done);
    double at = -trace.clock_error_us;
    std::size_t stages = 0;
    for (const TraceSpan& span : trace.spans) {
      if (span.lane == Lane::cpu) continue;
      ++stages;
      REQUIRE(span.begin_us >= at);
      REQUIRE(span.end_us >= span.begin_us);
      at = span.begin_us;
    }
    REQUIRE(stages == shape.layers * 7);  // append, score, choose, split, attend, promote, merge
    REQUIRE(at < 1e6);
  }
  // Nor does a replay without a plan do harm.
  const std::uint64_t last = engine.stats().unplanned;
  graph.replay();
  rig.synchronize();
  REQUIRE(engine.stats().unplanned == last + 1);
}

TEST_CASE("an engine of latent attention is refused by name on a GPU", "[engine][gpu]") {
  const EngineRig rig = engine_rig();
  const AttentionShape shape{.layers = 2, .q_heads = 4, .kv_heads = 1, .head_dim = 96, .value_dim = 64};
  const EngineOptions options = graph_options(shape, 4, 0);
  std::string refusal;
  try {
    const Engine engine(options, rig.device);
  } catch (const Error& error) {
    refusal = error.what();
  }
  CAPTURE(refusal);
  REQUIRE(refusal.find("value_dim 64") != std::string::npos);
}
