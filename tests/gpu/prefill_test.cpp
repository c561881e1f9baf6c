#include "sluice/error.hpp"
#include "tests/gpu/attend_support.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();

/// Queries of all tokens [tokens, group, head_dim] in a dtype, with gaps between the rows or dense.
struct Queries {
  Queries(AttendFixture& fixture, const Problem& problem, DType type, bool gaps = true)
      : dtype(type),
        head_stride(problem.options().head_dim + (gaps ? 3 : 0)),
        token_stride(problem.options().group * head_stride + (gaps ? 5 : 0)),
        data(fixture.memory<std::byte>(problem.options().tokens * token_stride * bytes_of(type))) {
    Random random(5);
    for (std::uint64_t i = 0; i < problem.options().tokens * token_stride; ++i) {
      store_element(data.data(), dtype, i, random.normal());
    }
  }
  [[nodiscard]] std::byte* row(std::uint32_t token) const {
    return data.data() + token * token_stride * bytes_of(dtype);
  }
  [[nodiscard]] double at(std::uint32_t token, std::uint32_t head, std::uint32_t i) const {
    return load_element(data.data(), dtype, token * token_stride + head * head_stride + i);
  }
  DType dtype;
  std::uint64_t head_stride;
  std::uint64_t token_stride;
  std::span<std::byte> data;
};

}  // namespace

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
    fixture.backend().prefill({&task, 1},
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

TEST_CASE("device prefill: several tasks and 16-bit outputs in one call", "[gpu]") {
  AttendFixture fixture;
  const auto dtype = GENERATE(DType::bf16, DType::f16);
  CAPTURE(to_string(dtype));
  constexpr std::uint32_t kFirst = 21;  // Inside a page; the tasks differ in length.
  const Problem problem({.dtype = dtype, .tokens = 90, .head_dim = 64, .group = 4});
  const Queries queries(fixture, problem, DType::f32);
  const KvView kv = fixture.kv(problem);
  const std::uint32_t lengths[] = {69, 0, 30};
  std::vector<std::span<std::byte>> outs;
  std::vector<PrefillTask> tasks;
  for (const std::uint32_t length : lengths) {
    outs.push_back(fixture.memory<std::byte>(std::size_t{length} * 4 * 64 * 2));
    tasks.push_back({.q = queries.row(kFirst), .kv = kv, .first = kFirst, .count = length, .out = outs.back().data()});
  }
  fixture.backend().prefill(tasks,
                            {.q_dtype = DType::f32,
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

/// A chunk behind a prefix, whose keys come in windows that begin at `windows` and of which a mask may choose blocks.
struct Chunk {
  enum class Mask { none, random, diagonal, empty };
  std::uint32_t first, count, group, head_dim, page_tokens;
  DType dtype = DType::bf16;
  DType q_dtype = DType::bf16;
  Mask mask = Mask::none;
  std::vector<std::uint32_t> windows{0};
  DType out_dtype = DType::f32;
  bool gaps = true;  ///< between rows, of odd length; otherwise rows are dense
  double outlier = 1.0;
};

/// What a chunk's calls read and write.
class ChunkRun {
 public:
  explicit ChunkRun(const Chunk& chunk)
      : chunk_(chunk),
        problem_({.dtype = chunk.dtype,
                  .tokens = chunk.first + chunk.count + 150,  // Keys that nobody may see.
                  .head_dim = chunk.head_dim,
                  .group = chunk.group,
                  .page_tokens = chunk.page_tokens,
                  .seed = 11,
                  .outlier = chunk.outlier}),
        queries_(fixture_, problem_, chunk.q_dtype, chunk.gaps),
        kv_(fixture_.kv(problem_)),
        head_stride_(chunk.head_dim + (chunk.gaps ? 3 : 0)),
        token_stride_(chunk.group * head_stride_ + (chunk.gaps ? 2 : 0)),
        out_(fixture_.memory<std::byte>(chunk.count * token_stride_ * bytes_of(chunk.out_dtype))),
        lse_(fixture_.memory<float>(std::size_t{chunk.count} * chunk.group)),
        so_far_(fixture_.memory<float>(lse_.size() * chunk.head_dim)) {
    for (std::uint64_t i = 0; i < chunk.count * token_stride_; ++i) {
      store_element(out_.data(), chunk.out_dtype, i, kUnwritten);
    }
    std::fill(lse_.begin(), lse_.end(), kUnwritten);
    std::fill(so_far_.begin(), so_far_.end(), kUnwritten);
    for (std::uint32_t token = end(); token < problem_.options().tokens; ++token) {
      for (std::uint32_t c = 0; c < chunk.head_dim; ++c) {
        store_element(kv_.k_row(token), chunk.dtype, c, kUnwritten);
        store_element(kv_.v_row(token), chunk.dtype, c, kUnwritten);
      }
    }
    choose_blocks();
  }

  void prefill() {
    for (std::size_t i = 0; i < chunk_.windows.size(); ++i) {
      const bool last = i + 1 == chunk_.windows.size();
      const std::uint32_t begin = chunk_.windows[i];
      const PrefillTask task{
          .q = queries_.row(chunk_.first),
          .kv = {.base = kv_.base, .frames = kv_.frames + begin / chunk_.page_tokens, .layout = kv_.layout},
          .first = chunk_.first,
          .count = chunk_.count,
          .out = out_.data(),
          .key_begin = begin,
          .key_end = last ? kNone : chunk_.windows[i + 1],
          .blocks = blocks_.empty() ? nullptr : blocks_.data(),
          .lse = lse_.data(),
          .so_far = so_far_.data(),
          .first_window = i == 0,
          .last_window = last};
      fixture_.backend().prefill({&task, 1},
                                 {.q_dtype = chunk_.q_dtype,
                                  .out_dtype = chunk_.out_dtype,
                                  .q_token_stride = queries_.token_stride,
                                  .q_head_stride = queries_.head_stride,
                                  .out_token_stride = token_stride_,
                                  .out_head_stride = head_stride_},
                                 problem_.shape(), fixture_.stream.get());
    }
    fixture_.wait();
  }

  void require_reference(double within) {
    Problem query = problem_;
    for (std::uint32_t token = chunk_.first; token < end(); ++token) {
      for (std::uint32_t head = 0; head < chunk_.group; ++head) {
        for (std::uint32_t c = 0; c < chunk_.head_dim; ++c) {
          query.set_q(head, c, static_cast<float>(queries_.at(token, head, c)));
        }
      }
      const Attention expected = reference::attend(query, keys_of(token));
      for (std::uint32_t head = 0; head < chunk_.group; ++head) {
        CAPTURE(token, head);
        REQUIRE(relative_l2(row(token, head),
                            std::span(expected.out).subspan(head * chunk_.head_dim, chunk_.head_dim)) <= within);
        REQUIRE(max_abs_diff(lse_.subspan((token - chunk_.first) * chunk_.group + head, 1),
                             std::span(expected.lse).subspan(head, 1)) <= 1e-3 + device_tolerance(problem_));
        if (chunk_.gaps) REQUIRE(std::isnan(element(token, head, chunk_.head_dim)));
      }
    }
  }

 private:
  [[nodiscard]] std::uint32_t end() const { return chunk_.first + chunk_.count; }

  void choose_blocks() {
    if (chunk_.mask == Chunk::Mask::none) return;
    const std::uint32_t query_blocks = prefill_blocks(chunk_.first, chunk_.count);
    const std::uint32_t words = prefill_mask_words(end());
    blocks_ = fixture_.memory<std::uint32_t>(std::size_t{chunk_.group} * query_blocks * words);
    std::fill(blocks_.begin(), blocks_.end(), 0u);
    if (chunk_.mask == Chunk::Mask::empty) return;
    Random random(3);
    for (std::uint32_t head = 0; head < chunk_.group; ++head) {
      for (std::uint32_t block = 0; block < query_blocks; ++block) {
        const std::uint32_t diagonal = chunk_.first / kPrefillBlock + block;
        std::uint32_t* const row = blocks_.data() + (std::size_t{head} * query_blocks + block) * words;
        for (std::uint32_t i = 0; i < 32 * words; ++i) {
          const bool set = chunk_.mask == Chunk::Mask::diagonal ? i == diagonal : random.normal() > 0.3;
          row[i / 32] |= std::uint32_t{set} << i % 32;
        }
        if (chunk_.mask == Chunk::Mask::random && block % 3 == 2) std::fill_n(row, words, 0u);
      }
    }
  }

  [[nodiscard]] std::vector<Attended> keys_of(std::uint32_t token) const {
    std::vector<Attended> keys = attended(0, token + 1);
    if (blocks_.empty()) return keys;
    const std::uint32_t query_blocks = prefill_blocks(chunk_.first, chunk_.count);
    const std::uint32_t words = prefill_mask_words(end());
    const std::uint32_t block = token / kPrefillBlock - chunk_.first / kPrefillBlock;
    for (Attended& key : keys) {
      key.members = 0;
      for (std::uint32_t head = 0; head < chunk_.group; ++head) {
        const std::uint32_t bit = key.token / kPrefillBlock;
        const std::uint32_t word = blocks_[(std::size_t{head} * query_blocks + block) * words + bit / 32];
        key.members |= (word >> bit % 32 & 1) << head;
      }
    }
    return keys;
  }

  [[nodiscard]] float element(std::uint32_t token, std::uint32_t head, std::uint32_t c) const {
    const std::uint64_t at = (token - chunk_.first) * token_stride_ + head * head_stride_ + c;
    return static_cast<float>(load_element(out_.data(), chunk_.out_dtype, at));
  }
  [[nodiscard]] std::vector<float> row(std::uint32_t token, std::uint32_t head) const {
    std::vector<float> values(chunk_.head_dim);
    for (std::uint32_t c = 0; c < chunk_.head_dim; ++c) values[c] = element(token, head, c);
    return values;
  }

  Chunk chunk_;
  AttendFixture fixture_;
  Problem problem_;
  Queries queries_;
  KvView kv_;
  std::uint64_t head_stride_;
  std::uint64_t token_stride_;
  std::span<std::byte> out_;
  std::span<float> lse_;
  std::span<float> so_far_;
  std::span<std::uint32_t> blocks_;
};

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
      Chunk{.first = 640, .count = 256, .group = 1, .head_dim = 64, .page_tokens = 8, .outlier = 100.0});
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

TEST_CASE("device prefill refuses windows that it could not carry on from", "[gpu][prefill]") {
  AttendFixture fixture;
  const Problem problem({.head_dim = 64});
  const auto row = fixture.memory<float>(64 * 4);
  PrefillTask task{.q = reinterpret_cast<std::byte*>(row.data()), .kv = fixture.kv(problem), .count = 1};
  const auto refuses = [&] {
    REQUIRE_THROWS_AS(fixture.backend().prefill({&task, 1}, {}, problem.shape(), fixture.stream.get()), Error);
  };
  task.last_window = false;
  refuses();
  task.last_window = true;
  task.key_begin = 3;
  refuses();
}

}  // namespace sluice::test
