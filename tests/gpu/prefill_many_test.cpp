// Prefill of more work than the device does at once.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "tests/gpu/prefill_support.hpp"

namespace sluice::test {

namespace {

/// What every row of a chunk attends that begins anywhere, of one prompt.
class RowsOfPrompt {
 public:
  RowsOfPrompt(const Problem& problem, const Queries& queries) : problem_(problem), queries_(queries) {}

  /// [group, head_dim]; zeros where keys [begin, token] are none.
  [[nodiscard]] std::vector<double> row(std::uint32_t token, std::uint32_t begin) {
    const ProblemOptions& options = problem_.options();
    if (token < begin) return std::vector<double>(std::size_t{options.group} * options.head_dim);
    auto& known = known_[{token, begin}];
    if (known.empty()) {
      for (std::uint32_t head = 0; head < options.group; ++head) {
        for (std::uint32_t i = 0; i < options.head_dim; ++i)
          problem_.set_q(head, i, static_cast<float>(queries_.at(token, head, i)));
      }
      const Attention expected = reference::attend(problem_, attended(begin, token + 1));
      known.assign(expected.out.begin(), expected.out.end());
    }
    return known;
  }

 private:
  Problem problem_;
  const Queries& queries_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<double>> known_;
};

}  // namespace

TEST_CASE("device prefill of more blocks of queries than it attends at once, call after call", "[gpu][prefill]") {
  struct Case {
    std::uint32_t group, head_dim, page_tokens;
    DType dtype;
  };
  const auto c = GENERATE(Case{4, 128, 16, DType::bf16}, Case{2, 64, 128, DType::f16}, Case{3, 128, 64, DType::bf16},
                          Case{1, 128, 256, DType::f16}, Case{6, 64, 8, DType::bf16});
  CAPTURE(c.group, c.head_dim, c.page_tokens, to_string(c.dtype));
  struct Part {
    std::uint32_t first, count, key_begin;
  };
  // Blocks of one row and of all; none; a chunk behind a prefix; one whose first blocks see no key of the window.
  constexpr auto kParts = std::to_array<Part>(
      {{21, 389, 0}, {0, 0, 0}, {127, 1, 0}, {0, 410, 256}, {128, 128, 0}, {100, 30, 256}, {127, 130, 0}, {0, 300, 0}});
  AttendFixture fixture;
  const Problem problem({.dtype = c.dtype,
                         .tokens = 420,
                         .head_dim = c.head_dim,
                         .group = c.group,
                         .page_tokens = c.page_tokens,
                         .seed = 78});
  const Queries queries(fixture, problem, c.dtype, false);
  RowsOfPrompt rows(problem, queries);
  const KvView kv = fixture.kv(problem);
  const std::size_t row_size = std::size_t{c.group} * c.head_dim;
  for (const std::size_t count : {96u, 1u, 3u, 200u, 8u}) {
    CAPTURE(count);
    std::vector<PrefillTask> tasks;
    std::vector<std::span<float>> outs;
    for (std::size_t i = 0; i < count; ++i) {
      const Part& part = kParts[i % kParts.size()];
      outs.push_back(fixture.memory<float>(part.count * row_size + 1));
      std::ranges::fill(outs.back(), kUnwritten);
      KvView window = kv;
      window.frames += part.key_begin / c.page_tokens;
      tasks.push_back({.q = queries.row(part.first),
                       .kv = window,
                       .first = part.first,
                       .count = part.count,
                       .out = reinterpret_cast<std::byte*>(outs.back().data()),
                       .key_begin = part.key_begin});
    }
    fixture.stages().prefill(tasks,
                             {.q_dtype = c.dtype,
                              .q_token_stride = queries.token_stride,
                              .q_head_stride = queries.head_stride,
                              .out_token_stride = row_size,
                              .out_head_stride = c.head_dim},
                             problem.shape(), fixture.stream.get());
    fixture.wait();
    for (std::size_t i = 0; i < count; ++i) {
      REQUIRE(std::isnan(outs[i].back()));
      for (std::uint32_t row = 0; row < tasks[i].count; ++row) {
        CAPTURE(i, row);
        const std::vector<double> expected = rows.row(tasks[i].first + row, tasks[i].key_begin);
        REQUIRE(relative_l2(outs[i].subspan(row * row_size, row_size), expected) <=
                (c.dtype == DType::f16 ? 1e-3 : 5e-3));
      }
    }
  }
}

}  // namespace sluice::test
