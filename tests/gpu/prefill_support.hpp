#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "sluice/step/prefill_choice.hpp"
#include "tests/gpu/attend_support.hpp"
#include "tests/support/random.hpp"

/// Chunks of prompts in memory of both sides, and what a prefill must make of them.
namespace sluice::test {

inline constexpr float kUnwritten = std::numeric_limits<float>::quiet_NaN();

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
      fixture_.stages().prefill({&task, 1},
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
    const double lse_within = 1e-3 + device_tolerance(problem_);
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
                             std::span(expected.lse).subspan(head, 1)) <= lse_within);
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

}  // namespace sluice::test
