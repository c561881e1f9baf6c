// Prompts whose chunks choose blocks of keys, on every device: against the device's own stages, and against dense ones.
#include <limits>

#include "cpu/kernels/kernels.hpp"
#include "cpu/stages/rows.hpp"
#include "sluice/error.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/engine_policies.hpp"
#include "tests/support/sanitized.hpp"
#include "tools/stages/stages.hpp"

using namespace sluice;
using namespace sluice::test;
using namespace sluice::test::policies;

namespace {

constexpr FlexPrefillSpec kFlex{.gamma = 0.7f, .min_budget = 128};
constexpr PrefillSpec kFlexPrefill{.mode = PrefillMode::flexprefill, .flex = kFlex};
/// Of every mode that always chooses, and of every look that a choice takes.
constexpr std::array kChoices{
    kFlexPrefill, PrefillSpec{.mode = PrefillMode::streaming, .streaming = {.sinks = 100, .window = 200}},
    PrefillSpec{.mode = PrefillMode::minference, .minference = {.columns = 200, .diagonals = 256}},
    PrefillSpec{.mode = PrefillMode::minference, .minference = {.pattern = HeadPattern::block_sparse, .blocks = 256}},
    PrefillSpec{.mode = PrefillMode::minference,
                .minference = {.pattern = HeadPattern::best,
                               .columns = 128,
                               .diagonals = 128,
                               .blocks = 256,
                               .a_shape = {.sinks = 1, .window = 129}}}};

EngineOptions sparse_options(const EngineRig& rig, const PrefillSpec& prefill, std::uint32_t near) {
  EngineOptions options = options_for(rig, 2, near);
  options.largest.prefill_rows = 400;
  options.prefill = prefill;
  return options;
}

/// Rows of a tensor as `dtype`, in memory that device and host see.
std::unique_ptr<Buffer> narrowed(const EngineRig& rig, const float* rows, std::size_t floats, DType dtype) {
  auto buffer = rig.device->allocate_pinned(floats * bytes_of(dtype));
  cpu::kernels_for(cpu::fastest_kernels(), dtype).narrow(rows, buffer->data(), floats);
  return buffer;
}

/// A prompt's attention by the rig's stages, over pages of its own in pinned memory.
class DirectPrompt {
 public:
  DirectPrompt(const EngineRig& rig, const Story& story, DType dtype, const PrefillSpec& spec = kFlexPrefill)
      : rig_(rig), story_(story), dtype_(dtype), spec_(spec) {
    pages_ = (story.tokens() + layout().page_tokens - 1) / layout().page_tokens;
    memory_ = rig.device->allocate_pinned(pages_ * layout().page_bytes() * kShape.layers * kShape.kv_heads);
    for (std::uint32_t page = 0; page < pages_; ++page) frames_.push_back(page);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      for (std::uint32_t t = 0; t < story.tokens(); ++t) {
        for (std::uint32_t head = 0; head < kShape.kv_heads; ++head) put(layer, head, t);
      }
    }
  }

  /// Outputs of a chunk in a layer, [count, q_heads, head_dim]; sparse ones add to `kept` and `causal`.
  std::vector<float> attend(std::uint32_t layer, std::uint32_t first, std::uint32_t count, bool sparse) {
    const std::size_t row = std::size_t{kShape.q_heads} * kShape.head_dim;
    const auto q = narrowed(rig_, story_.q(layer, first), count * row, dtype_);
    const auto out = rig_.device->allocate_pinned(count * row * sizeof(float));
    const PrefillShape strides{.q_dtype = dtype_,
                               .q_token_stride = row,
                               .q_head_stride = kShape.head_dim,
                               .out_token_stride = row,
                               .out_head_stride = kShape.head_dim};
    tools::Stages& stages = *rig_.stages;
    const std::uint32_t group = kShape.group();
    const std::uint64_t words = std::uint64_t{group} * prefill_blocks(first, count) * prefill_mask_words(first + count);
    const auto blocks = rig_.device->allocate_pinned(words * sizeof(std::uint32_t));
    const auto choices = rig_.device->allocate_pinned(group * sizeof(PrefillChoice));
    const auto scratch =
        rig_.device->allocate(std::max<std::uint64_t>(stages.select_blocks_scratch_bytes(first, count, kShape), 256));
    for (std::uint32_t head = 0; head < kShape.kv_heads; ++head) {
      const std::uint64_t at = head * group * kShape.head_dim;
      const KvView kv{.base = plane(layer, head), .frames = frames_.data(), .layout = layout()};
      auto* const bits = reinterpret_cast<std::uint32_t*>(blocks->data());
      const SelectBlocksTask choice{.q = q->data() + at * bytes_of(dtype_),
                                    .kv = kv,
                                    .first = first,
                                    .count = count,
                                    .blocks = bits,
                                    .choices = reinterpret_cast<PrefillChoice*>(choices->data()),
                                    .scratch = scratch->data()};
      if (sparse) stages.select_blocks({&choice, 1}, spec_, strides, kShape, rig_.queue.get());
      const PrefillTask task{.q = choice.q,
                             .kv = kv,
                             .first = first,
                             .count = count,
                             .out = out->data() + at * sizeof(float),
                             .blocks = sparse ? bits : nullptr};
      stages.prefill({&task, 1}, strides, kShape, rig_.queue.get());
      rig_.synchronize();
      for (std::uint32_t h = 0; h < group && sparse; ++h) {
        kept += choice.choices[h].kept;
        causal += choice.choices[h].causal;
      }
    }
    const auto* const values = reinterpret_cast<const float*>(out->data());
    return {values, values + count * row};
  }

  std::uint64_t kept = 0;
  std::uint64_t causal = 0;

 private:
  [[nodiscard]] PageLayout layout() const {
    return PageLayout{.page_tokens = 16, .head_dim = kShape.head_dim, .dtype = rig_.kv_dtype}.near();
  }
  [[nodiscard]] std::byte* plane(std::uint32_t layer, std::uint32_t head) const {
    return memory_->data() + (layer * kShape.kv_heads + head) * pages_ * layout().page_bytes();
  }
  void put(std::uint32_t layer, std::uint32_t head, std::uint32_t token) const {
    const PageLayout of = layout();
    std::byte* const k =
        plane(layer, head) + token / of.page_tokens * of.page_bytes() + token % of.page_tokens * of.row_bytes();
    const cpu::ElementKernels& kernels = cpu::kernels_for(cpu::fastest_kernels(), of.dtype);
    kernels.narrow(story_.k(layer, token) + head * kShape.head_dim, k, kShape.head_dim);
    kernels.narrow(story_.v(layer, token) + head * kShape.head_dim, k + of.half_bytes(), kShape.head_dim);
  }

  const EngineRig& rig_;
  const Story& story_;
  DType dtype_;  ///< of queries
  PrefillSpec spec_;
  std::uint64_t pages_ = 0;
  std::unique_ptr<Buffer> memory_;
  std::vector<std::uint32_t> frames_;
};

/// One chunk by an engine, from tensors of `dtype`: outputs [layers][count, q_heads, head_dim].
std::vector<std::vector<float>> chunk_of(Engine& engine, const EngineRig& rig, Teller& teller, std::uint32_t count,
                                         DType dtype) {
  const Bucket bucket{.decode_rows = 0, .prefill_rows = count, .prefills = 1};
  std::vector<std::unique_ptr<Buffer>> kept;
  const auto in = [&](const float* rows, std::uint32_t heads) {
    kept.push_back(narrowed(rig, rows, std::size_t{count} * heads * kShape.head_dim, dtype));
    return dense_view<const std::byte>(kept.back()->data(), dtype, count, heads, kShape.head_dim);
  };
  const auto outs = rig.device->allocate_pinned(kShape.layers * count * kRow * sizeof(float));
  auto* const values = reinterpret_cast<float*>(outs->data());
  std::fill_n(values, kShape.layers * count * kRow, std::numeric_limits<float>::quiet_NaN());
  const PlanItem item{.sequence = teller.id, .tokens = count, .prefill = true};
  const Batch batch = engine.plan({&item, 1}, bucket, rig.stream);
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    engine.attend(
        bucket, LayerId{layer}, in(teller.story->q(layer, teller.at), kShape.q_heads),
        in(teller.story->k(layer, teller.at), kShape.kv_heads), in(teller.story->v(layer, teller.at), kShape.kv_heads),
        dense_view(values + layer * count * kRow, DType::f32, count, kShape.q_heads, kShape.head_dim), rig.stream);
  }
  engine.finish(batch);
  rig.synchronize();
  teller.at += count;
  std::vector<std::vector<float>> out;
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer)
    out.emplace_back(values + layer * count * kRow, values + (layer + 1) * count * kRow);
  return out;
}

}  // namespace

TEST_CASE("chunks of a prompt choose the blocks that the verbs choose, near or far", "[engine]") {
  // The dtype is that of the tensors; a GPU has kernels of its own for either.
  const auto [near, dtype, spec] = GENERATE(grid(std::array{0u, 12u}, std::array{DType::f32, DType::bf16}, kChoices));
  CAPTURE(near, to_string(dtype), to_string(spec.mode), to_string(spec.minference.pattern));
  const EngineRig rig = engine_rig();
  Story story(kShape, 1100, 71);
  story.round_queries();
  DirectPrompt direct(rig, story, dtype, spec);
  Engine engine(sparse_options(rig, spec, near), rig.device);
  Teller teller{.story = &story, .id = engine.begin(parse_policy("full:near=0"))};
  std::uint64_t sparse_chunks = 0;
  for (const std::uint32_t count : {250u, 400u, 130u, 1u, 300u}) {
    const std::uint32_t first = teller.at;
    const bool sparse = first + count > dense_prompt_tokens(spec);
    sparse_chunks += sparse ? kShape.layers : 0;
    const auto out = chunk_of(engine, rig, teller, count, dtype);
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      CAPTURE(first, count, layer);
      REQUIRE(difference(out[layer], direct.attend(layer, first, count, sparse)) < tolerance(rig));
    }
  }
  const EngineStats stats = engine.stats();
  REQUIRE(stats.sparse_chunks == sparse_chunks);
  REQUIRE(stats.dense_chunks == 5 * kShape.layers - sparse_chunks);
  REQUIRE(stats.kept_blocks == direct.kept);
  REQUIRE(stats.causal_blocks == direct.causal);
  REQUIRE(direct.kept < direct.causal);  // Something was left out.
}

TEST_CASE("a window of a prompt is attended alike in chunks and at once", "[engine]") {
  const EngineRig rig = engine_rig();
  const Story story(kShape, 700, 77);
  const auto attend = [&](const std::vector<std::uint32_t>& chunks) {
    EngineOptions options = sparse_options(rig, kChoices[1], 0);
    options.largest.prefill_rows = 700;
    Engine engine(options, rig.device);
    Teller teller{.story = &story, .id = engine.begin(parse_policy("full:near=0"))};
    std::vector<std::vector<float>> out(kShape.layers);
    for (const std::uint32_t count : chunks) {
      const auto part = chunk_of(engine, rig, teller, count, DType::f32);
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer)
        out[layer].insert(out[layer].end(), part[layer].begin(), part[layer].end());
    }
    return out;
  };
  const auto whole = attend({700});
  const auto parts = attend({100, 33, 400, 1, 166});
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer)
    REQUIRE(difference(parts[layer], whole[layer]) < tolerance(rig));
}

TEST_CASE("sparse chunks of sequences, planned before those ahead are finished, choose what each does alone",
          "[engine]") {
  const EngineRig rig = engine_rig();
  Story stories[] = {Story(kShape, 800, 74), Story(kShape, 800, 75)};
  if (rig.kv_dtype != DType::f32) {
    for (Story& story : stories) story.round_queries();
  }
  EngineOptions options = sparse_options(rig, {.mode = PrefillMode::flexprefill, .flex = kFlex}, 9);
  options.in_flight = 3;
  Engine engine(options, rig.device);
  std::vector<Teller> tellers;
  std::vector<DirectPrompt> direct;
  for (const Story& story : stories) {
    tellers.push_back({.story = &story, .id = engine.begin(parse_policy("full:near=0"))});
    import_story(engine, rig, tellers.back(), 300);
    direct.emplace_back(rig, story, DType::f32);
  }
  struct Forward {
    std::uint32_t counts[2];
    std::uint32_t first[2];
    std::unique_ptr<ForwardTensors> tensors;
    Batch batch;
  };
  std::vector<Forward> forwards;
  const auto start = [&](std::uint32_t a, std::uint32_t b) {
    Forward& forward = forwards.emplace_back(Forward{.counts = {a, b}, .first = {}, .tensors = {}, .batch = {}});
    forward.tensors = std::make_unique<ForwardTensors>(*rig.device, kShape, options.largest.rows());
    std::vector<PlanItem> items;
    std::uint32_t row = 0;
    for (std::size_t s = 0; s < 2; ++s) {
      forward.first[s] = tellers[s].at;
      items.push_back({.sequence = tellers[s].id, .tokens = forward.counts[s], .prefill = true});
      for (std::uint32_t i = 0; i < forward.counts[s]; ++i) forward.tensors->set(row++, stories[s], tellers[s].at + i);
      tellers[s].at += forward.counts[s];
    }
    forward.batch = engine.plan(items, engine.options().largest, rig.stream);
    forward.tensors->attend(engine, rig.stream);
  };
  start(190, 200);
  start(100, 150);
  start(9, 7);
  engine.cancel(forwards.back().batch);
  for (Teller& teller : tellers) teller.at -= &teller == &tellers[0] ? 9 : 7;
  forwards.pop_back();
  start(60, 50);
  for (std::size_t i = forwards.size(); i-- > 0;) engine.finish(forwards[i].batch);  // The newest first.
  rig.synchronize();
  for (const Forward& forward : forwards) {
    std::uint32_t row = 0;
    for (std::size_t s = 0; s < 2; ++s) {
      std::vector<std::vector<float>> want;
      for (std::uint32_t layer = 0; layer < kShape.layers; ++layer)
        want.push_back(direct[s].attend(layer, forward.first[s], forward.counts[s], true));
      for (std::uint32_t i = 0; i < forward.counts[s]; ++i) {
        CAPTURE(s, forward.first[s], i);
        const std::vector<float> out = forward.tensors->out(row++);
        for (std::uint32_t layer = 0; layer < kShape.layers; ++layer)
          REQUIRE(difference(std::span(out).subspan(layer * kRow, kRow),
                             std::span(want[layer]).subspan(i * kRow, kRow)) < tolerance(rig));
      }
    }
  }
  const EngineStats stats = engine.stats();
  REQUIRE(stats.sparse_chunks == 6 * kShape.layers);
  REQUIRE(stats.kept_blocks == direct[0].kept + direct[1].kept);
  REQUIRE(stats.causal_blocks == direct[0].causal + direct[1].causal);
  REQUIRE(stats.kept_blocks < stats.causal_blocks);
}

TEST_CASE("a prompt that keeps all blocks, or for which choosing does not pay, is attended densely", "[engine]") {
  const PrefillSpec spec =
      GENERATE(PrefillSpec{.mode = PrefillMode::flexprefill, .flex = {.gamma = 1.f, .min_budget = 128}},
               PrefillSpec{.mode = PrefillMode::automatic, .flex = {.gamma = 0.9f, .min_budget = 128}});
  const EngineRig rig = engine_rig();
  const Story story(kShape, 700, 72), other(kShape, 700, 73);
  Engine dense(sparse_options(rig, {}, 0), rig.device);
  Engine engine(sparse_options(rig, spec, 0), rig.device);
  const auto tell = [&](Engine& by) {
    const PolicySpec policy = parse_policy("exact | int4 | top_k=9 | near=0");
    Teller a{.story = &story, .id = by.begin(policy)};
    Teller b{.story = &other, .id = by.begin(policy)};
    std::vector<std::vector<float>> out = chunk_of(by, rig, a, 390, DType::f32);
    (void)chunk_of(by, rig, b, 120, DType::f32);
    const auto append = [&](const std::vector<std::vector<float>>& more) {
      out.insert(out.end(), more.begin(), more.end());
    };
    append(run(by, rig, {&a, &b}, {130, 200}, true));  // Two chunks in one forward.
    append(run(by, rig, {&b, &a}, {1, 1}, false));
    return out;
  };
  const auto want = tell(dense);
  const auto out = tell(engine);
  REQUIRE(out.size() == want.size());
  for (std::size_t i = 0; i < want.size(); ++i) REQUIRE(difference(out[i], want[i]) < tolerance(rig));
  const EngineStats stats = engine.stats();
  REQUIRE(stats.sparse_chunks + stats.dense_chunks == 4 * kShape.layers);
  if (spec.mode == PrefillMode::flexprefill) {
    REQUIRE(stats.sparse_chunks == 3 * kShape.layers);
    REQUIRE(stats.kept_blocks == stats.causal_blocks);
  } else {
    REQUIRE(stats.sparse_chunks == 0);
  }
  REQUIRE(dense.stats().sparse_chunks == 0);
}

TEST_CASE("an engine says what it cannot do for sparse prompts", "[engine]") {
  const EngineRig rig = engine_rig();
  EngineOptions options = sparse_options(rig, {.mode = PrefillMode::flexprefill, .flex = {.gamma = 2.f}}, 0);
  REQUIRE(code_of([&] { Engine engine(options, rig.device); }) == Errc::invalid_argument);
  options.prefill.flex = {};
  options.shape.layers = 129;
  options.host_bytes = 10 * block_bytes(options);
  REQUIRE(code_of([&] { Engine engine(options, rig.device); }) == Errc::invalid_argument);
}
