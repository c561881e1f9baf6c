// What a GroupHistory learns from the steps that are observed, and how that is taken back.
#include <algorithm>
#include <cmath>
#include <limits>

#include "scheduler/fast_exp.hpp"
#include "scheduler/history/group_history.hpp"

namespace sluice::scheduler {
namespace {

/// What a call needs while it runs.
struct Scratch {
  std::vector<float> weights;
  std::vector<std::uint32_t> indices;
  Lesson lesson;
};

Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

/// Tokens that a query head observes of so many, at most, if all lessons are to be kept: what a budget of 2% and at
/// least 64 lets it keep.
std::uint32_t usually_observed(std::uint32_t tokens) noexcept {
  constexpr std::uint32_t kLeast = 64;
  constexpr std::uint32_t kInverseShare = 50;
  return std::min(std::max(kLeast, tokens / kInverseShare + 1), tokens);
}

/// Calls visit() for the tokens of a lesson's heads, one after the other.
class Gaps {
 public:
  explicit Gaps(const std::uint8_t* gaps) noexcept : at_(gaps) {}
  [[nodiscard]] std::uint32_t next() noexcept {
    constexpr std::uint8_t kGoesOn = 255;
    for (; *at_ == kGoesOn; ++at_) token_ += kGoesOn;
    return token_ += *at_++;
  }
  /// The next head's.
  [[nodiscard]] Gaps following() const noexcept { return Gaps(at_); }

 private:
  const std::uint8_t* at_;
  std::uint32_t token_ = 0;
};

}  // namespace

void GroupHistory::observe(std::uint32_t h, std::span<const std::uint32_t> tokens, std::span<const float> scores) {
  float top = -std::numeric_limits<float>::infinity();
  for (const float score : scores) top = score > top && std::isfinite(score) ? score : top;
  Scratch& scratch = scratch_of_thread();
  scratch.weights.resize(scores.size());
  float* weights = scratch.weights.data();
  const float* in = scores.data();
  const std::size_t count = scores.size();
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < count; ++i) {
    // +inf minus a finite top is +inf: not below zero, hence no weight. NaN fails both comparisons.
    const float x = in[i] - top;
    weights[i] = x <= 0.f ? fast_exp(x) : 0.f;
    sum += weights[i];
  }
  if (!(sum > 0.0)) return;
  const auto scale = static_cast<float>(0.5 / sum);
  scratch.indices.resize(count);
  if (!in_lesson_) scratch.lesson.clear(tokens_);
  ScoreCode* const codes = scratch.lesson.reserve(tokens);  // From here on nothing fails.
  fresh_ = false;
  Head& head = heads_[h];
  const Lesson::Head undo{.head = h,
                          .tokens = static_cast<std::uint32_t>(count),
                          .vertical = head.vertical.decay(options_.decay),
                          .slash = head.slash.decay(options_.decay)};
  std::uint32_t* const indices = scratch.indices.data();
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) {
    weights[i] *= scale;
    indices[i] = tokens[i] - sinks_;
  }
  head.vertical.add(scratch.indices, weights, codes);
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) indices[i] = tokens_ - 1 - tokens[i];
  head.slash.add(scratch.indices, weights, codes + count);
  scratch.lesson.add(undo);
  lossy_ = lossy_ || undo.vertical.lossy || undo.slash.lossy;
  if (!in_lesson_) journal_.restart(tokens_);
}

void GroupHistory::begin_lesson() noexcept {
  in_lesson_ = true;
  lossy_ = false;
  scratch_of_thread().lesson.clear(tokens_);
}

void GroupHistory::end_lesson() noexcept {
  in_lesson_ = false;
  if (lossy_) return journal_.restart(tokens_);
  journal_.add(scratch_of_thread().lesson, most_lesson_bytes(static_cast<std::uint32_t>(heads_.size()), tokens_));
}

void GroupHistory::truncate(std::uint32_t tokens) noexcept {
  for (const Lesson* lesson = journal_.newest(tokens); lesson != nullptr; lesson = journal_.newest(tokens)) {
    take_back(*lesson);
    journal_.drop(*lesson);
  }
  journal_.drop_notes(tokens);
  // As large as the forecast that came next found them.
  const std::uint32_t size = journal_.last() + 1 - std::min(journal_.last() + 1, sinks_);
  for (Head& head : heads_) {
    head.vertical.shrink(size);
    head.slash.shrink(size);
  }
  fresh_ = false;
  stale_ = true;
}

void GroupHistory::take_back(const Lesson& lesson) noexcept {
  const ScoreCode* codes = lesson.codes.data();
  Gaps gaps(lesson.gaps.data());
  for (const Lesson::Head& undo : lesson.heads) {
    Head& head = heads_[undo.head];
    Gaps again = gaps;
    head.vertical.undo(undo.vertical, codes, undo.tokens, [&] { return gaps.next() - sinks_; });
    head.slash.undo(undo.slash, codes + undo.tokens, undo.tokens, [&] { return lesson.step - 1 - again.next(); });
    codes += 2 * std::size_t{undo.tokens};
    gaps = gaps.following();
  }
}

void GroupHistory::catch_up(std::uint32_t tokens) {
  if (!stale_) return;
  const std::uint32_t last = journal_.last();
  if (follows()) {
    forecast(last + 1);
    stale_ = true;  // Should there be no memory, once more from the beginning.
    for (const HistoryJournal::Note& note : journal_.notes()) {
      follow(note.step);
      widen(note.token);
    }
    if (tokens > last) follow(tokens);
  }
  stale_ = false;
}

std::uint64_t GroupHistory::most_lesson_bytes(std::uint32_t group, std::uint32_t tokens) noexcept {
  return kUndoTokens * Lesson::most_heap_bytes(group, usually_observed(tokens), tokens);
}

}  // namespace sluice::scheduler
