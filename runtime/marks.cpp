#include "runtime/marks.hpp"

#include <algorithm>
#include <chrono>

namespace sluice::runtime {

Event& Marks::mark(Stream& stream, Counter counter) {
  if (count_ == entries_.size()) entries_.push_back({.event = device_.create_event()});
  Entry& entry = entries_[count_++];
  entry.counter = counter;
  stream.record(*entry.event);
  return *entry.event;
}

std::string Marks::failure() const {
  for (std::size_t i = 0; i < count_; ++i) {
    if (entries_[i].event->state() == Event::State::failed) return entries_[i].event->reason();
  }
  return {};
}

void Marks::add_to(PromptStats& stats) const noexcept {
  for (std::size_t i = 1; i < count_; ++i) {
    if (entries_[i].counter == nullptr) continue;
    const auto spent = std::chrono::nanoseconds(entries_[i].event->time() - entries_[i - 1].event->time()).count();
    stats.*entries_[i].counter += static_cast<std::uint64_t>(std::max<std::int64_t>(spent, 0));
  }
}

}  // namespace sluice::runtime
