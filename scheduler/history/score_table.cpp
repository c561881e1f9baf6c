#include "scheduler/history/score_table.hpp"

#include <algorithm>
#include <cmath>

#include "scheduler/prefetch.hpp"
#include "scheduler/undo.hpp"
#include "sluice/units.hpp"

namespace sluice::scheduler {
namespace {

/// A table grows by one entry per step; doubling would waste half of all tables.
constexpr std::size_t kSlackShare = 128;

/// Scores that decay faster would leave the range of codes while what is forgotten stays where it is.
constexpr double kSlowDecay = 0.85;

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
    state_.max = std::max(state_.max, code);
    state_.sums.replace(0.0, static_cast<double>(from_code(code)));
  }
}

void ScoreTable::extend(std::uint32_t size) {
  if (size > size_) resize(size);
}

void ScoreTable::shrink(std::uint32_t size) noexcept {
  if (size < size_) resize(size);  // Needs no memory.
}

ScoreTable::Undo ScoreTable::decay(double factor) {
  Undo undo{.before = state_};
  state_.g *= factor;
  if (state_.dead != 0 && ++state_.rested == kUndoTokens) {
    undo.octaves = static_cast<std::uint8_t>(state_.dead / kCodesPerOctave);
    (void)fold(undo.octaves);
  }
  if (state_.dead != 0 || state_.g >= kSmallestUnit) return undo;
  int exponent = 0;
  (void)std::frexp(state_.g, &exponent);
  const auto octaves = static_cast<std::uint32_t>(-exponent);
  if (factor >= kSlowDecay) {
    state_.dead = static_cast<ScoreCode>(octaves * kCodesPerOctave);
    state_.rested = 0;
  } else {
    undo.octaves = static_cast<std::uint8_t>(octaves);  // The smallest factor is 2^-149.
    undo.lossy = fold(octaves);
  }
  return undo;
}

bool ScoreTable::fold(std::uint32_t octaves) noexcept {
  const auto drop = static_cast<ScoreCode>(std::min(octaves * kCodesPerOctave, std::uint32_t{kLargestCode}));
  bool lost = false;
  const auto lower = [&](ScoreCode code) {
    lost |= code != 0 && code <= drop;
    return static_cast<ScoreCode>(code - std::min(code, drop));
  };
  for (std::vector<Block>* blocks : {&u_, &most_}) {
    for (Block& block : *blocks) std::ranges::transform(block.codes, block.codes, lower);
  }
  state_.max = lower(state_.max);
  state_.sums.scale(-static_cast<int>(octaves));
  state_.g = std::ldexp(state_.g, static_cast<int>(octaves));
  state_.dead = 0;
  return lost;
}

void ScoreTable::take_back(const Undo& step) noexcept {
  const auto rise = static_cast<ScoreCode>(step.octaves * kCodesPerOctave);
  const auto raise = [&](ScoreCode code) { return code == 0 ? code : static_cast<ScoreCode>(code + rise); };
  for (std::vector<Block>* blocks : {&u_, &most_}) {
    if (rise == 0) break;
    for (Block& block : *blocks) std::ranges::transform(block.codes, block.codes, raise);
  }
  state_ = step.before;
}

void ScoreTable::find_most(std::uint32_t block) noexcept {
  most_of(block * kBlock) = *std::ranges::max_element(u_[block].codes);
}

void ScoreTable::add(std::span<const std::uint32_t> indices, const float* weights, ScoreChange* changes) {
  constexpr std::size_t kAhead = 16;  // Entries lie lines apart; a core keeps about that many misses in flight.
  Moments sums = state_.sums;
  ScoreCode top = state_.max;
  const ScoreStep step = this->step();
  ScoreCode* const u = codes();
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (i + kAhead < indices.size()) prefetch(u + indices[i + kAhead]);
    const std::uint32_t index = indices[i];
    const ScoreCode old = u[index];
    const ScoreCode now = step.after(old, step.gain(weights[i]));
    if (changes != nullptr) changes[i] = {.before = old, .after = now};
    sums.replace(static_cast<double>(from_code(live(old))), static_cast<double>(from_code(now)));
    u[index] = now;
    most_of(index) = std::max(most_of(index), now);
    top = std::max(top, now);
  }
  state_.sums = sums;
  state_.max = top;
}

ScoreTable::Cut ScoreTable::cut(double alpha) const {
  const auto n = static_cast<double>(size_);
  const Moments& sums = state_.sums;
  const double mean = size_ == 0 ? 0.0 : sums.first / n;
  if (mean < kSmallestScore) return {.mean = state_.dead, .threshold = state_.dead, .uniform = true};
  const double square = mean * mean;
  const double variance = sums.second / n - square;
  const auto code = [&](double score) { return std::max(floor_code(score), state_.dead); };
  Cut cut{.mean = code(mean), .threshold = code(mean), .uniform = true};
  if (variance <= 1e-12 * square) return cut;  // Rounding of the sums is below 1e-13 of the square.
  const double fourth =
      sums.fourth / n - 4.0 * mean * (sums.third / n) + 6.0 * square * (sums.second / n) - 3.0 * square * square;
  const double kurtosis = std::max(fourth / (variance * variance), 1.0);  // At least 1 by Jensen; rounding may miss it.
  cut.threshold = code(mean + alpha * (static_cast<double>(from_code(live(state_.max))) - mean) / std::sqrt(kurtosis));
  cut.uniform = false;
  return cut;
}

}  // namespace sluice::scheduler
