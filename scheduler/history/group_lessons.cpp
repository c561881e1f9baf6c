// What a GroupHistory learns from the steps that are observed, and how that is taken back.
#include <algorithm>
#include <cmath>
#include <limits>

#include "scheduler/history/group_history.hpp"

namespace sluice::scheduler {
namespace {

/// What a call needs while it runs.
struct LessonScratch {
  std::vector<std::uint32_t> tokens;
  std::vector<WeightCode> codes;
  std::vector<float> weights;
  std::vector<std::uint32_t> indices;
  std::vector<ScoreChange> vertical, slash;
  Lesson lesson;

  /// What weighs something of what was scored, and its codes. Needs memory.
  void weigh(std::span<const std::uint32_t> scored, std::span<const float> scores);
};

LessonScratch& lesson_scratch() {
  thread_local LessonScratch scratch;
  return scratch;
}

void LessonScratch::weigh(std::span<const std::uint32_t> scored, std::span<const float> scores) {
  float top = -std::numeric_limits<float>::infinity();
  for (const float score : scores) top = score > top && std::isfinite(score) ? score : top;
  tokens.resize(scores.size());
  codes.resize(scores.size());
  std::size_t count = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    // Below a top that is not finite, or of a score that is not, there is no code.
    const std::uint32_t code = weight_code(top - scores[i]);
    tokens[count] = scored[i];
    codes[count] = static_cast<WeightCode>(code);
    count += code < kWeightCodes;
  }
  tokens.resize(count);
  codes.resize(count);
  for (std::vector<ScoreChange>* changes : {&vertical, &slash}) changes->resize(count);
  weights.resize(count);
  indices.resize(count);
}

/// What lessons may take of an observed token. They take 1.6 to 2.2: more, the less the tokens of a step have in common
/// with those before.
constexpr double kBytesPerToken = 2.3;

/// Tokens that a query head observes of so many, at most, if all lessons are to be kept: what a budget of 2% and at
/// least 64 lets it keep.
std::uint32_t usually_observed(std::uint32_t tokens) noexcept {
  constexpr std::uint32_t kLeast = 64;
  constexpr std::uint32_t kInverseShare = 50;
  return std::min(std::max(kLeast, tokens / kInverseShare + 1), tokens);
}

}  // namespace

void GroupHistory::observe(std::uint32_t h, std::span<const std::uint32_t> tokens, std::span<const float> scores) {
  LessonScratch& scratch = lesson_scratch();
  scratch.weigh(tokens, scores);
  const std::size_t count = scratch.tokens.size();
  if (count == 0) return;
  if (in_lesson_) scratch.lesson.reserve(count);
  // From here on nothing fails.
  fresh_ = false;
  float* const weights = scratch.weights.data();
  const WeightCode* const codes = scratch.codes.data();
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) sum += static_cast<double>(kWeights[codes[i]]);
  const auto scale = static_cast<float>(0.5 / sum);
  for (std::size_t i = 0; i < count; ++i) weights[i] = kWeights[codes[i]] * scale;

  Head& head = heads_[h];
  const ScoreTable::Undo vertical = head.vertical.decay(options_.decay);
  const ScoreTable::Undo slash = head.slash.decay(options_.decay);
  std::uint32_t* const indices = scratch.indices.data();
  for (std::size_t i = 0; i < count; ++i) indices[i] = scratch.tokens[i] - sinks_;
  head.vertical.add(scratch.indices, weights, scratch.vertical.data());
  for (std::size_t i = 0; i < count; ++i) indices[i] = tokens_ - 1 - scratch.tokens[i];
  head.slash.add(scratch.indices, weights, scratch.slash.data());
  if (!in_lesson_) return journal_.restart(tokens_);
  lossy_ = lossy_ || vertical.lossy || slash.lossy;
  scratch.lesson.add(Lesson::Head::of(h, scale, vertical, slash), scratch.tokens, codes,
                     {.step = head.vertical.step(), .entries = scratch.vertical.data()},
                     {.step = head.slash.step(), .entries = scratch.slash.data()});
}

void GroupHistory::begin_lesson() noexcept {
  in_lesson_ = true;
  lossy_ = false;
  lesson_scratch().lesson.clear(tokens_);
}

void GroupHistory::end_lesson() noexcept {
  in_lesson_ = false;
  if (lossy_) return journal_.restart(tokens_);
  journal_.add(lesson_scratch().lesson, most_lesson_bytes(static_cast<std::uint32_t>(heads_.size()), tokens_));
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
  BitReader bits(lesson.bits);
  for (const Lesson::Head& undo : lesson.heads) {
    Head& head = heads_[undo.head];
    bits = scheduler::take_back(undo, bits, {.tokens = lesson.step, .sinks = sinks_}, head.vertical, head.slash);
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
  const auto bits = static_cast<std::uint64_t>(kBytesPerToken * usually_observed(tokens));
  return kUndoTokens * group * (sizeof(Lesson::Head) + bits);
}

}  // namespace sluice::scheduler
