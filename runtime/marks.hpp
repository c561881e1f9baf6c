#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sluice/device.hpp"
#include "sluice/plan.hpp"
#include "sluice/stats.hpp"
#include "sluice/trace.hpp"

namespace sluice::runtime {

/// Points of a stream, and what it did between them. Used again and again; makes an event only for a longer list than
/// ever before.
class Marks {
 public:
  /// A counter of nanoseconds, or null for a stretch that nobody counts.
  using Counter = std::uint64_t PromptStats::*;

  explicit Marks(Device& device) : device_(device) {}

  void clear() noexcept { count_ = 0; }
  [[nodiscard]] bool empty() const noexcept { return count_ == 0; }
  /// Records a point; the time since the one before it counts as `counter`.
  Event& mark(Stream& stream, Counter counter = nullptr);
  /// The newest.
  [[nodiscard]] Event& last() const noexcept { return *entries_[count_ - 1].event; }
  /// The stream has passed all of them.
  [[nodiscard]] bool passed() const noexcept { return count_ == 0 || last().state() != Event::State::pending; }
  /// Why something between the points failed; empty if nothing did. Once they are passed.
  [[nodiscard]] std::string failure() const;
  void add_to(PromptStats& stats) const noexcept;
  /// Every stretch that counts, and the first one by the name `first`, if it has one.
  void trace(TraceSink* sink, Lane lane, std::uint32_t layer, const char* first = nullptr) const noexcept;

 private:
  struct Entry {
    std::unique_ptr<Event> event;
    Counter counter = nullptr;
  };
  Device& device_;
  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

}  // namespace sluice::runtime
