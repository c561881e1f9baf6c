#include "scheduler/history/score_table.hpp"

#include <algorithm>
#include <cmath>

#include "scheduler/prefetch.hpp"
#include "sluice/units.hpp"

namespace sluice::scheduler {
namespace {

/// A table grows by one entry per step; doubling would waste half of all tables.
constexpr std::size_t kSlackShare = 32;

std::size_t room_for(std::size_t blocks) { return blocks + div_up(blocks, kSlackShare); }

}  // namespace

void ScoreTable::Moments::replace(double from, double to) noexcept {
  const double from2 = from * from, to2 = to * to;
  first += to - from;
  second += to2 - from2;
  third += to2 * to - from2 * from;
  fourth += to2 * to2 - from2 * from2;
}

void ScoreTable::Moments::scale(int octaves) noexcept {
  first = std::ldexp(first, octaves);
  second = std::ldexp(second, 2 * octaves);
  third = std::ldexp(third, 3 * octaves);
  fourth = std::ldexp(fourth, 4 * octaves);
}

std::uint32_t ScoreTable::above(const Block& block, ScoreCode threshold) noexcept {
  // In lanes as wide as codes: twice as many at once as in those of the result.
  constexpr std::uint32_t kHalf = kBlock / 2;
  constexpr std::uint16_t kBit[kHalf] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  std::uint16_t low = 0;
  std::uint16_t high = 0;
#pragma omp simd reduction(| : low, high)
  for (std::uint32_t i = 0; i < kHalf; ++i) {
    low |= block.codes[i] > threshold ? kBit[i] : std::uint16_t{0};
    high |= block.codes[kHalf + i] > threshold ? kBit[i] : std::uint16_t{0};
  }
  return std::uint32_t{high} << kHalf | low;
}

void ScoreTable::resize(std::uint32_t size) {
  const auto grow = [](std::vector<Block>& blocks, std::size_t wanted) {
    if (wanted > blocks.capacity() && !blocks.empty()) blocks.reserve(room_for(wanted));
    blocks.resize(wanted, Block{});
  };
  grow(u_, div_up(size, kBlock));
  grow(most_, div_up(u_.size(), kBlock));
  size_ = size;
}

std::uint64_t ScoreTable::most_heap_bytes(std::uint32_t size) noexcept {
  const std::size_t blocks = div_up(size, kBlock);
  return (room_for(blocks) + room_for(div_up(blocks, kBlock))) * sizeof(Block);
}

void ScoreTable::assign(std::span<const float> scores) {
  *this = ScoreTable();
  resize(static_cast<std::uint32_t>(scores.size()));
  for (std::uint32_t i = 0; i < size_; ++i) {
    const ScoreCode code = to_code(scores[i]);
    codes()[i] = code;
    most_of(i) = std::max(most_of(i), code);
    max_ = std::max(max_, code);
    sums_.replace(0.0, static_cast<double>(from_code(code)));
  }
}

void ScoreTable::extend(std::uint32_t size) {
  if (size > size_) resize(size);
}

void ScoreTable::decay(double factor) {
  g_ *= factor;
  if (g_ < kSmallestUnit) fold();
  per_weight_ = 1.0 / g_;
}

/// Multiplies U by the power of two in g. Exact, except that what falls below kSmallestScore is forgotten.
void ScoreTable::fold() {
  int exponent = 0;
  g_ = std::frexp(g_, &exponent);
  const auto octaves = static_cast<std::uint32_t>(-exponent);
  const auto drop = static_cast<ScoreCode>(std::min(octaves * kCodesPerOctave, std::uint32_t{kLargestCode}));
  const auto lower = [drop](ScoreCode code) { return static_cast<ScoreCode>(code - std::min(code, drop)); };
  for (std::vector<Block>* blocks : {&u_, &most_}) {
    for (Block& block : *blocks) std::ranges::transform(block.codes, block.codes, lower);
  }
  max_ = lower(max_);
  sums_.scale(exponent);
}

void ScoreTable::add(std::span<const std::uint32_t> indices, const float* weights) {
  constexpr std::size_t kAhead = 16;  // Entries lie lines apart; a core keeps about that many misses in flight.
  Moments sums = sums_;
  ScoreCode top = max_;
  ScoreCode* const u = codes();
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (i + kAhead < indices.size()) prefetch(u + indices[i + kAhead]);
    const std::uint32_t index = indices[i];
    const float old = from_code(u[index]);
    const ScoreCode now = to_code(old + static_cast<float>(weights[i] * per_weight_));
    sums.replace(static_cast<double>(old), static_cast<double>(from_code(now)));
    u[index] = now;
    most_of(index) = std::max(most_of(index), now);
    top = std::max(top, now);
  }
  sums_ = sums;
  max_ = top;
}

ScoreTable::Cut ScoreTable::cut(double alpha) const {
  const auto n = static_cast<double>(size_);
  const double mean = size_ == 0 ? 0.0 : sums_.first / n;
  if (mean < kSmallestScore) return {};
  const double square = mean * mean;
  const double variance = sums_.second / n - square;
  Cut cut{.mean = floor_code(mean), .threshold = floor_code(mean), .uniform = true};
  if (variance <= 1e-12 * square) return cut;  // Rounding of the sums is below 1e-13 of the square.
  const double fourth = sums_.fourth / n - 4.0 * mean * (sums_.third / n) + 6.0 * square * (sums_.second / n) -
                        3.0 * square * square;
  const double kurtosis = std::max(fourth / (variance * variance), 1.0);  // At least 1 by Jensen; rounding may miss it.
  cut.threshold = floor_code(mean + alpha * (static_cast<double>(from_code(max_)) - mean) / std::sqrt(kurtosis));
  cut.uniform = false;
  return cut;
}

}  // namespace sluice::scheduler
