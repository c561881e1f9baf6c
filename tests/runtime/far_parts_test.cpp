// Lists of far rows, cut into parts that threads attend in any order.
#include "runtime/far/far_parts.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>

#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::runtime;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t kTokens = 5'000;
constexpr std::uint32_t kGroup = 2;
constexpr std::uint32_t kDim = 32;

/// Two KV heads whose rows are far, all of them.
struct Desk {
  Desk() : far(std::size_t{2} * kPages * 2 * 16 * kDim), lists(std::size_t{2} * kTokens), counts(2) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (float& x : far) x = normal(random);
    for (float& x : q) x = 2.f * normal(random);
    memory.shape = {.layers = 1, .q_heads = 2 * kGroup, .kv_heads = 2, .head_dim = kDim};
    memory.layout = memory.far_layout = {.page_tokens = 16, .head_dim = kDim, .dtype = DType::f32};
    memory.page_shift = 4;
    memory.first_plane = 0;
    memory.blocks = kPages;
    memory.largest.decode_rows = 1;
    memory.largest.max_tokens = kTokens;
    memory.largest.unbounded = true;
    memory.far = reinterpret_cast<std::byte*>(far.data());
    memory.far_rows = lists.data();
    memory.far_counts = counts.data();
    memory.far_q = q.data();
    memory.far_out = out.data();
    memory.far_lse = lse.data();
    choice.emplace(memory, cpu::fastest_kernels(), 1s);
  }

  /// Attends `count` rows of each head, which are in no order, its parts as `shuffle` has them.
  void attend(std::uint32_t count, std::mt19937* shuffle) {
    for (std::uint32_t list = 0; list < 2; ++list) {
      const auto first = lists.begin() + list * kTokens;
      std::iota(first, first + kTokens, 0);
      std::shuffle(first, first + kTokens, std::mt19937(list + 3));
      counts[list] = count;
    }
    if (!far_parts) far_parts.emplace(memory, *choice, kThreads);
    FarParts& parts = *far_parts;
    const FarQuestion question{.asked = ++asked, .forward = 1, .layer = 0, .drafts = 1, .lists = 2};
    std::vector<FarPart> claimed;
    for (std::uint32_t list = 0; list < 2; ++list) {
      parts.open(question.asked, list);
      for (FarPart part; (part = parts.claim(question, list)).parts != 0;) claimed.push_back(part);
    }
    if (shuffle != nullptr) std::shuffle(claimed.begin(), claimed.end(), *shuffle);
    for (std::size_t i = 0; i < claimed.size(); ++i)
      parts.attend(question, claimed[i], static_cast<std::uint32_t>(i % kThreads));
    for (std::size_t i = 0; i < claimed.size(); ++i) (void)parts.finish();
    (void)parts.close();
  }

  /// What query head h of a list should get, in float64.
  [[nodiscard]] std::vector<double> expected(std::uint32_t list, std::uint32_t h, std::uint32_t count) const {
    std::vector<double> result(kDim + 1);
    double sum = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint32_t row = lists[list * kTokens + i];
      const float* const k = reinterpret_cast<const float*>(memory.far_key(list, row));
      const float* const v = k + memory.far_layout.half_bytes() / sizeof(float);
      double score = 0;
      for (std::uint32_t c = 0; c < kDim; ++c) score += double{q[(list * kGroup + h) * kDim + c]} * k[c];
      const double weight = std::exp(score * memory.shape.score_scale());
      for (std::uint32_t c = 0; c < kDim; ++c) result[c] += weight * v[c];
      sum += weight;
    }
    for (std::uint32_t c = 0; c < kDim; ++c) result[c] /= sum;
    result[kDim] = std::log(sum);
    return result;
  }

  static constexpr std::uint32_t kPages = (kTokens + 15) / 16;
  static constexpr std::uint32_t kThreads = 3;
  std::vector<float> far;
  std::vector<std::uint32_t> lists;
  std::vector<std::uint32_t> counts;
  std::vector<float> q = std::vector<float>(2 * kGroup * kDim);
  std::vector<float> out = std::vector<float>(2 * kGroup * kDim);
  std::vector<float> lse = std::vector<float>(2 * kGroup);
  ForwardMemory memory;
  std::optional<FarParts> far_parts;
  std::uint64_t asked = 0;
  std::optional<FarChoice> choice;  // Sized by the memory.
};

}  // namespace

TEST_CASE("a list's parts give the same answer in whatever order they are attended", "[far_parts]") {
  Desk desk;
  const auto count = GENERATE(1u, 63u, 64u, 65u, 129u, 200u, 700u, 1'999u, 2'048u, 2'049u, kTokens);
  CAPTURE(count);
  desk.attend(count, nullptr);
  const std::vector<float> out = desk.out;
  const std::vector<float> lse = desk.lse;
  for (std::uint32_t list = 0; list < 2; ++list) {
    for (std::uint32_t h = 0; h < kGroup; ++h) {
      const std::vector<double> expected = desk.expected(list, h, count);
      const std::uint32_t at = list * kGroup + h;
      CHECK(lse[at] == Approx(expected[kDim]).margin(1e-4));
      for (std::uint32_t c = 0; c < kDim; ++c) CHECK(out[at * kDim + c] == Approx(expected[c]).margin(1e-4));
    }
  }
  std::mt19937 random(11);
  for (int turn = 0; turn < 8; ++turn) {
    std::fill(desk.out.begin(), desk.out.end(), std::nanf(""));
    desk.attend(count, &random);
    CHECK(std::memcmp(desk.out.data(), out.data(), out.size() * sizeof(float)) == 0);
    CHECK(std::memcmp(desk.lse.data(), lse.data(), lse.size() * sizeof(float)) == 0);
  }
}
