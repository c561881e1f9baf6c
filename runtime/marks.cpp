#include "runtime/marks.hpp"

#include <algorithm>
#include <array>
#include <chrono>

#include "runtime/trace.hpp"

namespace sluice::runtime {
namespace {

struct Name {
  Marks::Counter counter;
  const char* text;
};
constexpr std::array kNames = {
    Name{&PromptStats::attend_ns, "prompt attention"},      Name{&PromptStats::select_ns, "prompt block choice"},
    Name{&PromptStats::load_wait_ns, "prompt key wait"},    Name{&PromptStats::flush_ns, "prompt write-through"},
    Name{&PromptStats::tables_ns, "prompt attention sums"}, Name{&PromptStats::digests_ns, "prompt digests"},
    Name{&PromptStats::int4_ns, "prompt 4-bit copies"},
};

}  // namespace

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

void Marks::trace(TraceSink* sink, Lane lane, std::uint32_t layer, const char* first) const noexcept {
  for (std::size_t i = 1; sink != nullptr && i < count_; ++i) {
    const char* name = i == 1 ? first : nullptr;
    for (const Name& known : kNames) {
      if (known.counter == entries_[i].counter) name = known.text;
    }
    if (name != nullptr)
      runtime::trace(sink, name, lane, layer, entries_[i - 1].event->time(), entries_[i].event->time());
  }
}

}  // namespace sluice::runtime
