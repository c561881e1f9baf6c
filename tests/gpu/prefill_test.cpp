#include <algorithm>
#include <vector>

#include "gpu/device/driver.hpp"
#include "gpu/kernels/prefill/prefill.hpp"
#include "gpu/tuning.hpp"
#include "sluice/error.hpp"
#include "sluice/step/prefill_choice.hpp"
#include "tests/gpu/prefill_support.hpp"

namespace sluice::test {

TEST_CASE("device prefill equals attending every query to all that came before", "[gpu]") {
  struct Case {
    std::uint32_t tokens, chunk, group, head_dim, page_tokens;
    DType dtype, q_dtype;
  };
  const auto c =
      GENERATE(Case{1, 1, 1, 64, 16, DType::bf16, DType::f32}, Case{37, 5, 3, 128, 8, DType::f16, DType::f32},
               Case{130, 64, 8, 128, 16, DType::bf16, DType::f32}, Case{150, 49, 2, 64, 32, DType::bf16, DType::bf16},
               Case{330, 300, 4, 128, 256, DType::f16, DType::f16}, Case{200, 61, 1, 128, 24, DType::bf16, DType::f16},
               Case{200, 100, 32, 64, 16, DType::f16, DType::f32});
  CAPTURE(c.tokens, c.chunk, c.group, c.head_dim, c.page_tokens, to_string(c.dtype), to_string(c.q_dtype));
  AttendFixture fixture;
  const Problem problem({.dtype = c.dtype,
                         .tokens = c.tokens,
                         .head_dim = c.head_dim,
                         .group = c.group,
                         .page_tokens = c.page_tokens,
                         .seed = 77});
  const Queries queries(fixture, problem, c.q_dtype);
  const KvView kv = fixture.kv(problem);
  const std::uint64_t head_stride = c.head_dim + 2;
  const std::uint64_t token_stride = c.group * head_stride + 7;
  const auto out = fixture.memory<float>(c.tokens * token_stride);
  std::fill(out.begin(), out.end(), kUnwritten);
  for (std::uint32_t first = 0; first < c.tokens; first += c.chunk) {
    const PrefillTask task{.q = queries.row(first),
                           .kv = kv,
                           .first = first,
                           .count = std::min(c.chunk, c.tokens - first),
                           .out = reinterpret_cast<std::byte*>(out.data() + first * token_stride)};
    fixture.stages().prefill({&task, 1},
                             {.q_dtype = c.q_dtype,
                              .q_token_stride = queries.token_stride,
                              .q_head_stride = queries.head_stride,
                              .out_token_stride = token_stride,
                              .out_head_stride = head_stride},
                             problem.shape(), fixture.stream.get());
  }
  fixture.wait();
  // One term rounds weights to the KV dtype, whose last bit is 2^-9 (bf16) or 2^-12 (f16); two keep float32's order.
  const double within = c.q_dtype != c.dtype ? 2e-4 : c.dtype == DType::f16 ? 1e-3 : 5e-3;
  Problem query = problem;
  for (std::uint32_t token = 0; token < c.tokens; ++token) {
    for (std::uint32_t head = 0; head < c.group; ++head) {
      for (std::uint32_t i = 0; i < c.head_dim; ++i)
        query.set_q(head, i, static_cast<float>(queries.at(token, head, i)));
    }
    const Attention expected = reference::attend(query, attended(0, token + 1));
    for (std::uint32_t head = 0; head < c.group; ++head) {
      CAPTURE(token, head);
      const std::span<const float> row = out.subspan(token * token_stride + head * head_stride, c.head_dim);
      REQUIRE(relative_l2(row, std::span(expected.out).subspan(head * c.head_dim, c.head_dim)) <= within);
      REQUIRE(std::isnan(out[token * token_stride + head * head_stride + c.head_dim]));
    }
  }
}

TEST_CASE("device prefill: tasks of unequal length, of two memories, with 16-bit outputs, in one call", "[gpu]") {
  AttendFixture fixture;
  const auto dtype = GENERATE(DType::bf16, DType::f16);
  const auto widened = GENERATE(false, true);
  CAPTURE(to_string(dtype), widened);
  constexpr std::uint32_t kFirst = 21;  // Inside a page.
  const Problem problem({.dtype = dtype, .tokens = 290, .head_dim = 64, .group = 4});
  const DType q_dtype = widened ? DType::f32 : dtype;
  const Queries queries(fixture, problem, q_dtype);
  const KvView kv[] = {fixture.kv(problem), fixture.kv(problem)};
  const std::uint32_t lengths[] = {269, 0, 30, 140};
  std::vector<std::span<std::byte>> outs;
  std::vector<PrefillTask> tasks;
  for (const std::uint32_t length : lengths) {
    outs.push_back(fixture.memory<std::byte>(std::size_t{length} * 4 * 64 * 2));
    tasks.push_back({.q = queries.row(kFirst),
                     .kv = kv[tasks.size() / 3],
                     .first = kFirst,
                     .count = length,
                     .out = outs.back().data()});
  }
  fixture.stages().prefill(tasks,
                           {.q_dtype = q_dtype,
                            .out_dtype = dtype,
                            .q_token_stride = queries.token_stride,
                            .q_head_stride = queries.head_stride,
                            .out_token_stride = 4 * 64,
                            .out_head_stride = 64},
                           problem.shape(), fixture.stream.get());
  fixture.wait();
  Problem query = problem;
  for (std::uint32_t token = 0; token < lengths[0]; ++token) {
    for (std::uint32_t head = 0; head < 4; ++head) {
      for (std::uint32_t i = 0; i < 64; ++i) {
        query.set_q(head, i, static_cast<float>(queries.at(kFirst + token, head, i)));
      }
    }
    const Attention expected = reference::attend(query, attended(0, kFirst + token + 1));
    for (std::size_t task = 0; task < tasks.size(); ++task) {
      if (token >= lengths[task]) continue;
      std::vector<float> row(4 * 64);
      for (std::size_t i = 0; i < row.size(); ++i) {
        row[i] = static_cast<float>(load_element(outs[task].data(), dtype, token * 4 * 64 + i));
      }
      CAPTURE(task, token);
      REQUIRE(relative_l2(row, expected.out) <= 5e-3);
    }
  }
}

namespace {

/// Weights are rounded to the KV dtype where the queries have it; see above.
double rounding(const Chunk& chunk) {
  return chunk.q_dtype != chunk.dtype ? 2e-4 : chunk.dtype == DType::f16 ? 1e-3 : 5e-3;
}

}  // namespace

TEST_CASE("device prefill of a chunk equals the reference, for all sizes of pages", "[gpu][prefill]") {
  using enum DType;
  const auto chunk = GENERATE(
      Chunk{.first = 0, .count = 1, .group = 1, .head_dim = 128, .page_tokens = 16},
      Chunk{.first = 0, .count = 128, .group = 1, .head_dim = 128, .page_tokens = 128},
      Chunk{.first = 127, .count = 2, .group = 4, .head_dim = 128, .page_tokens = 8},
      Chunk{.first = 100, .count = 290, .group = 4, .head_dim = 128, .page_tokens = 16, .gaps = false},
      Chunk{.first = 300, .count = 77, .group = 8, .head_dim = 64, .page_tokens = 32, .dtype = f16, .q_dtype = f16},
      Chunk{.first = 0, .count = 385, .group = 1, .head_dim = 64, .page_tokens = 64, .out_dtype = bf16, .gaps = false},
      Chunk{.first = 511, .count = 257, .group = 1, .head_dim = 128, .page_tokens = 256, .dtype = f16, .q_dtype = f16},
      Chunk{.first = 130, .count = 200, .group = 2, .head_dim = 128, .page_tokens = 24},
      Chunk{.first = 130, .count = 200, .group = 2, .head_dim = 128, .page_tokens = 16, .q_dtype = f32},
      Chunk{.first = 128, .count = 200, .group = 2, .head_dim = 128, .page_tokens = 16, .outlier = 100.0},
      Chunk{.first = 640, .count = 256, .group = 1, .head_dim = 64, .page_tokens = 8, .outlier = 100.0},
      Chunk{.first = 100, .count = 290, .group = 4, .head_dim = 96, .page_tokens = 16, .outlier = 100.0},
      Chunk{.first = 130, .count = 200, .group = 3, .head_dim = 96, .page_tokens = 24, .q_dtype = f32},
      Chunk{.first = 511, .count = 257, .group = 1, .head_dim = 192, .page_tokens = 256, .dtype = f16, .q_dtype = f16},
      Chunk{.first = 130, .count = 200, .group = 5, .head_dim = 192, .page_tokens = 8, .q_dtype = f32},
      Chunk{.first = 127, .count = 130, .group = 8, .head_dim = 256, .page_tokens = 16, .outlier = 100.0},
      Chunk{.first = 100, .count = 290, .group = 2, .head_dim = 256, .page_tokens = 64, .q_dtype = f32});
  CAPTURE(chunk.first, chunk.count, chunk.group, chunk.head_dim, chunk.page_tokens, to_string(chunk.q_dtype));
  ChunkRun run(chunk);
  run.prefill();
  run.require_reference(chunk.out_dtype == f32 ? rounding(chunk) : 2 * rounding(chunk));
}

TEST_CASE("device prefill in windows of keys equals one window", "[gpu][prefill]") {
  using enum DType;
  const auto windows = GENERATE(std::vector<std::uint32_t>{0, 128}, std::vector<std::uint32_t>{0, 48, 96, 336, 480},
                                std::vector<std::uint32_t>{0, 0, 384, 720, 2048});
  const auto mask = GENERATE(Chunk::Mask::none, Chunk::Mask::random);
  const auto q_dtype = GENERATE(bf16, f32);
  CAPTURE(windows, static_cast<int>(mask), to_string(q_dtype));
  const Chunk chunk{.first = 333,
                    .count = 222,
                    .group = 2,
                    .head_dim = 128,
                    .page_tokens = 16,
                    .q_dtype = q_dtype,
                    .mask = mask,
                    .windows = windows};
  ChunkRun run(chunk);
  run.prefill();
  run.require_reference(rounding(chunk));
}

TEST_CASE("device prefill attends the blocks that a mask names and no others", "[gpu][prefill]") {
  using enum DType;
  const auto mask = GENERATE(Chunk::Mask::random, Chunk::Mask::diagonal, Chunk::Mask::empty);
  const auto q_dtype = GENERATE(f16, f32);
  const auto first = GENERATE(0u, 75u, 4200u);  // The last: more than one word of bits.
  CAPTURE(static_cast<int>(mask), to_string(q_dtype), first);
  const Chunk chunk{.first = first,
                    .count = 340,
                    .group = 4,
                    .head_dim = 64,
                    .page_tokens = 32,
                    .dtype = f16,
                    .q_dtype = q_dtype,
                    .mask = mask};
  ChunkRun run(chunk);
  run.prefill();
  run.require_reference(rounding(chunk));
}

TEST_CASE("pages behind those that a tensor map has are zeros, not what lies there", "[gpu][prefill]") {
  if (!gpu::load_prefill_hopper_kernels()) {
    WARN("compiled without products of warpgroups, or for a device without them");
    return;
  }
  constexpr std::uint32_t kPage = 128, kDim = 128;
  AttendFixture fixture;
  const AttentionShape shape{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = kDim};
  const PageLayout layout{.page_tokens = kPage, .head_dim = kDim, .dtype = DType::bf16};
  const std::uint64_t half = std::uint64_t{kPage} * kDim;
  const auto pages = fixture.memory<std::uint16_t>(2 * 2 * half);  // Two pages: keys 0, values 1.
  for (std::uint64_t i = 0; i < pages.size(); ++i) pages[i] = i / half % 2 == 0 ? 0 : 0x3f80;
  const auto q = fixture.memory<std::uint16_t>(kDim);
  std::ranges::fill(q, 0x3f80);
  const auto out = fixture.memory<float>(kDim);
  const auto frames = fixture.memory<std::uint32_t>(4);
  std::ranges::copy(std::vector<std::uint32_t>{0, 1, 0, 0}, frames.begin());
  const auto item = fixture.memory<gpu::PrefillItem>(1);
  const KvView kv{.base = reinterpret_cast<std::byte*>(pages.data()), .frames = frames.data(), .layout = layout};
  item[0] = {.q = reinterpret_cast<const std::byte*>(q.data()),
             .base = kv.base,
             .frames = frames.data(),
             .out = reinterpret_cast<std::byte*>(out.data()),
             .first = 2 * kPage - 1,
             .count = 1,
             .heads = 1,
             .key_begin = 0,
             .key_end = 2 * kPage,
             .page_tokens = kPage,
             .query_blocks = prefill_blocks(2 * kPage - 1, 1),
             .mask_words = prefill_mask_words(2 * kPage)};
  const PrefillShape strides{.q_dtype = DType::bf16,
                             .out_dtype = DType::f32,
                             .q_token_stride = kDim,
                             .q_head_stride = kDim,
                             .out_token_stride = kDim,
                             .out_head_stride = kDim};
  const gpu::PrefillArgs args{
      .items = item.data(), .shape = strides, .group = 1, .row_heads = 1, .score_scale = shape.score_scale()};
  const gpu::PrefillVariant variant = gpu::prefill_variant(shape, layout, DType::bf16, true);
  REQUIRE(variant.warpgroups);
  for (const std::uint64_t known : {2u, 1u}) {
    CAPTURE(known);
    std::ranges::fill(out, kUnwritten);
    gpu::launch_prefill_hopper(variant, args, {.items = 1, .rows = 1, .blocks = 1},
                               gpu::map_pages(kv, kPrefillBlock, known),
                               static_cast<cudaStream_t>(fixture.stream->native_handle()));
    fixture.wait();
    // All keys weigh the same; of the page that is not known the values are zeros.
    for (const float value : out) REQUIRE(value == Approx(known == 2 ? 1.0 : 0.5).epsilon(1e-2));
  }
}

TEST_CASE("warpgroups prefill where queries have the KV dtype and tiles are made of whole parts of pages",
          "[prefill]") {
  const AttentionShape shape{.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 128};
  const auto warpgroups = [&](std::uint32_t page_tokens, DType q_dtype, bool hopper) {
    const PageLayout layout{.page_tokens = page_tokens, .head_dim = 128, .dtype = DType::bf16};
    return gpu::prefill_variant(shape, layout, q_dtype, hopper).warpgroups;
  };
  for (const std::uint32_t page_tokens : {8u, 16u, 32u, 64u, 128u, 256u}) {
    REQUIRE(warpgroups(page_tokens, DType::bf16, true));
    REQUIRE_FALSE(warpgroups(page_tokens, DType::bf16, false));
    REQUIRE_FALSE(warpgroups(page_tokens, DType::f32, true));
    REQUIRE_FALSE(warpgroups(page_tokens, DType::f16, true));
  }
  for (const std::uint32_t page_tokens : {24u, 40u, 136u}) REQUIRE_FALSE(warpgroups(page_tokens, DType::bf16, true));
}

TEST_CASE("device prefill refuses windows that it could not carry on from", "[gpu][prefill]") {
  AttendFixture fixture;
  const Problem problem({.head_dim = 64});
  const auto row = fixture.memory<float>(64 * 4);
  PrefillTask task{.q = reinterpret_cast<std::byte*>(row.data()), .kv = fixture.kv(problem), .count = 1};
  const auto refuses = [&] {
    REQUIRE_THROWS_AS(fixture.stages().prefill({&task, 1}, {}, problem.shape(), fixture.stream.get()), Error);
  };
  task.last_window = false;
  refuses();
  task.last_window = true;
  task.key_begin = 3;
  refuses();
}

}  // namespace sluice::test
