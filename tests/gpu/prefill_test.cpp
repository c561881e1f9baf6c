#include "tests/gpu/attend_support.hpp"
#include "tests/support/random.hpp"

namespace sluice::test {
namespace {

constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();

/// Queries of all tokens [tokens, group, head_dim] in a dtype, with gaps between the rows.
struct Queries {
  Queries(AttendFixture& fixture, const Problem& problem, DType type)
      : dtype(type),
        head_stride(problem.options().head_dim + 3),
        token_stride(problem.options().group * head_stride + 5),
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

}  // namespace sluice::test
