#include "scheduler/history/history_journal.hpp"

#include <algorithm>
#include <exception>

namespace sluice::scheduler {
namespace {

/// Lists change in size by little from step to step: memory that fits as well as this serves again.
constexpr std::size_t kJournalSlackShare = 64;

template <class T>
void copy_tightly(const std::vector<T>& from, std::vector<T>& to) {
  if (to.capacity() < from.size() || to.capacity() > from.size() + from.size() / kJournalSlackShare) {
    to = std::vector<T>();
    to.reserve(from.size());
  }
  to.assign(from.begin(), from.end());
}

}  // namespace

void HistoryJournal::begin(std::uint32_t tokens) {
  lessons_ = std::vector<Lesson>(kUndoTokens);
  notes_ = std::vector<Note>();
  oldest_ = tokens;
}

void HistoryJournal::restart(std::uint32_t step) noexcept {
  for (Lesson& lesson : lessons_) lesson = Lesson();
  notes_.clear();
  oldest_ = step;
}

void HistoryJournal::add(const Lesson& lesson, std::uint64_t most_bytes) noexcept {
  if (oldest_ > lesson.step || lessons_.empty()) return restart(lesson.step);
  std::uint32_t oldest = oldest_;
  for (const Lesson& each : lessons_) {
    if (each.step != 0 && each.step + kUndoTokens <= lesson.step) oldest = std::max(oldest, each.step);
  }
  Lesson& place = lessons_[lesson.step % kUndoTokens];
  place.clear(0);  // Its memory serves again.
  forget_before(oldest);
  try {
    copy_tightly(lesson.heads, place.heads);
    copy_tightly(lesson.bits, place.bits);
    place.step = lesson.step;
  } catch (const std::exception&) {
    return restart(lesson.step);
  }
  const auto held = [&] { return scheduler::heap_bytes(lessons_) - kUndoTokens * sizeof(Lesson); };
  for (std::uint64_t bytes = held(); bytes > most_bytes; bytes = held()) forget_before(oldest_lesson()->step);
}

void HistoryJournal::note(const Note& note) noexcept {
  if (oldest_ == kNever) return;
  // Lessons are worth less the older they are. Notes behind the newest one cannot be done without.
  for (Lesson* oldest = oldest_lesson(); oldest != nullptr && notes_.size() >= kMostNotes; oldest = oldest_lesson())
    forget_before(oldest->step);
  try {
    if (notes_.size() >= kMostNotes) throw std::bad_alloc();
    notes_.push_back(note);
  } catch (const std::exception&) {
    restart(kNever);  // Until there is a lesson: its step needs none of them.
  }
}

const Lesson* HistoryJournal::newest(std::uint32_t tokens) const noexcept {
  const auto found = std::ranges::max_element(lessons_, {}, &Lesson::step);
  return found == lessons_.end() || found->step <= tokens ? nullptr : &*found;
}

void HistoryJournal::drop(const Lesson& lesson) noexcept { lessons_[lesson.step % kUndoTokens] = Lesson(); }

void HistoryJournal::drop_notes(std::uint32_t tokens) noexcept {
  std::erase_if(notes_, [&](const Note& note) { return note.step > tokens; });
}

std::uint32_t HistoryJournal::last() const noexcept {
  const Lesson* const lesson = newest(0);
  return lesson != nullptr ? lesson->step : oldest_;
}

std::span<const HistoryJournal::Note> HistoryJournal::notes() const noexcept {
  const auto first = std::ranges::find_if(notes_, [&](const Note& note) { return note.step > last(); });
  return {first, notes_.end()};
}

Lesson* HistoryJournal::oldest_lesson() noexcept {
  Lesson* oldest = nullptr;
  for (Lesson& lesson : lessons_) {
    if (lesson.step != 0 && (oldest == nullptr || lesson.step < oldest->step)) oldest = &lesson;
  }
  return oldest;
}

void HistoryJournal::forget_before(std::uint32_t step) noexcept {
  oldest_ = step;
  for (Lesson& lesson : lessons_) {
    if (lesson.step != 0 && lesson.step <= step) lesson = Lesson();
  }
  std::erase_if(notes_, [&](const Note& note) { return note.step <= step; });
}

}  // namespace sluice::scheduler
