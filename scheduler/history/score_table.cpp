#include "scheduler/history/score_table.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "scheduler/prefetch.hpp"

namespace sluice::scheduler {
namespace {

/// g falls no lower than this before it is folded into U: U^4 stays far inside float64, U inside float32.
constexpr double kSmallestUnit = 0x1p-48;

/// The largest float that is not above `x`: for every float u, u > floor(x) is the same as u > x.
float floor_to_float(double x) noexcept {
  const auto nearest = static_cast<float>(x);
  return nearest > x ? std::nextafter(nearest, 0.f) : nearest;
}

}  // namespace

std::uint32_t ScoreTable::bucket_of(float u) noexcept {
  static_assert(kBucketsPerOctave == 2);
  return std::bit_cast<std::uint32_t>(u) >> (23 - 1);
}

void ScoreTable::assign(std::span<const float> scores) {
  u_.assign(scores.begin(), scores.end());
  place_.assign(scores.size(), 0);
  g_ = per_weight_ = 1.0;
  m1_ = m2_ = m3_ = m4_ = 0.0;
  max_ = 0.f;
  for (const float score : scores) {
    const double u = score;
    m1_ += u;
    m2_ += u * u;
    m3_ += u * u * u;
    m4_ += u * u * u * u;
    max_ = std::max(max_, score);
  }
  rebuild_lists();
}

void ScoreTable::extend(std::uint32_t size) {
  if (size <= u_.size()) return;
  if (size > u_.capacity()) {  // A table grows by one entry per step; doubling would waste half of all tables.
    const std::size_t room = size + std::max<std::size_t>(64, size / 16);
    u_.reserve(room);
    place_.reserve(room);
  }
  u_.resize(size, 0.f);
  place_.resize(size, 0);
}

void ScoreTable::decay(double factor) {
  g_ *= factor;
  if (g_ < kSmallestUnit) fold();
  per_weight_ = 1.0 / g_;
}

/// Multiplies U by the power of two in g. Exact, except that what underflows float32 is forgotten: it is
/// smaller than 2^-78 of what one step adds.
void ScoreTable::fold() {
  int exponent = 0;
  g_ = std::frexp(g_, &exponent);
  const float factor = std::ldexp(1.f, exponent);
  for (float& u : u_) u *= factor;
  m1_ = std::ldexp(m1_, exponent);
  m2_ = std::ldexp(m2_, 2 * exponent);
  m3_ = std::ldexp(m3_, 3 * exponent);
  m4_ = std::ldexp(m4_, 4 * exponent);
  max_ = std::ldexp(max_, exponent);
  rebuild_lists();
}

void ScoreTable::add(std::span<const std::uint32_t> indices, const float* weights) {
  constexpr std::size_t kAhead = 16;  // Entries lie lines apart; a core keeps about that many misses in flight.
  double d1 = 0.0, d2 = 0.0, d3 = 0.0, d4 = 0.0;
  float top = max_;
  float* const u = u_.data();
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (i + kAhead < indices.size()) {
      prefetch(u + indices[i + kAhead]);
      prefetch(place_.data() + indices[i + kAhead]);
    }
    const std::uint32_t index = indices[i];
    const float old = u[index];
    const float now = old + static_cast<float>(weights[i] * per_weight_);
    const double a = old, b = now;
    const double a2 = a * a, b2 = b * b;
    d1 += b - a;
    d2 += b2 - a2;
    d3 += b2 * b - a2 * a;
    d4 += b2 * b2 - a2 * a2;
    top = now > top ? now : top;
    u[index] = now;
    const std::uint32_t from = bucket_of(old), to = bucket_of(now);
    if (from != to && to >= floor_) move(index, from, to);
  }
  m1_ += d1;
  m2_ += d2;
  m3_ += d3;
  m4_ += d4;
  max_ = top;
}

void ScoreTable::move(std::uint32_t index, std::uint32_t from, std::uint32_t to) {
  // Only after a decay by many octaves at once; the mean is at least this entry's 2^-32, so far above the new floor.
  if (to - floor_ >= kLists) raise_floor(to - kLists + 1);
  if (from >= floor_) {
    auto& list = lists_[from % kLists];
    const std::uint32_t last = list.back();
    list[place_[index]] = last;
    place_[last] = place_[index];
    list.pop_back();
  }
  auto& list = lists_[to % kLists];
  place_[index] = static_cast<std::uint32_t>(list.size());
  list.push_back(index);
  top_ = std::max(top_, to);
}

ScoreTable::Cut ScoreTable::cut(double alpha) {
  const auto n = static_cast<double>(u_.size());
  const double mean = u_.empty() ? 0.0 : m1_ / n;
  if (mean < std::numeric_limits<float>::min()) return {};
  const double square = mean * mean;
  const double variance = m2_ / n - square;
  const std::uint32_t mean_bucket = bucket_of(floor_to_float(mean));
  if (mean_bucket < floor_) {  // The first scores since the table was empty, or it doubled without an update.
    rebuild_lists();
  } else if (mean_bucket > floor_ + kBucketsPerOctave) {
    raise_floor(mean_bucket - kBucketsPerOctave);
  }
  Cut cut{.mean = floor_to_float(mean), .threshold = floor_to_float(mean), .uniform = true};
  if (variance <= 1e-12 * square) return cut;  // Rounding of the sums is below 1e-13 of the square.
  const double fourth = m4_ / n - 4.0 * mean * (m3_ / n) + 6.0 * square * (m2_ / n) - 3.0 * square * square;
  const double kurtosis = std::max(fourth / (variance * variance), 1.0);  // At least 1 by Jensen; rounding may miss it.
  cut.threshold = floor_to_float(mean + alpha * (max_ - mean) / std::sqrt(kurtosis));
  cut.uniform = false;
  return cut;
}

void ScoreTable::raise_floor(std::uint32_t floor) {
  // Frees the lists: kept, each of the ring's slots would hold room for the fullest bucket, the one at the mean.
  for (; floor_ < floor; ++floor_) {
    if (floor_ <= top_) std::vector<std::uint32_t>().swap(lists_[floor_ % kLists]);
  }
}

void ScoreTable::rebuild_lists() {
  for (auto& list : lists_) list.clear();
  const double mean = u_.empty() ? 0.0 : m1_ / static_cast<double>(u_.size());
  floor_ = kUnlisted;
  top_ = bucket_of(max_);
  if (mean < std::numeric_limits<float>::min()) return;
  lists_.resize(kLists);
  const std::uint32_t mean_bucket = bucket_of(floor_to_float(mean));
  floor_ = mean_bucket > kBucketsPerOctave ? mean_bucket - kBucketsPerOctave : 1;
  for (std::uint32_t i = 0; i < u_.size(); ++i) {
    const std::uint32_t bucket = bucket_of(u_[i]);
    if (bucket < floor_) continue;
    auto& list = lists_[bucket % kLists];
    place_[i] = static_cast<std::uint32_t>(list.size());
    list.push_back(i);
  }
}

std::size_t ScoreTable::listed() const noexcept {
  std::size_t count = 0;
  for (const auto& list : lists_) count += list.size();
  return count;
}

}  // namespace sluice::scheduler
