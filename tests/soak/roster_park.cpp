// Sequences of the roster that leave their engine and come back.
#include <algorithm>
#include <optional>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tests/soak/roster.hpp"

namespace sluice::test {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw Failure(what);
}

std::optional<Errc> error_of_resume(Engine& engine, std::span<const std::byte> area, SequenceId& id) {
  try {
    id = engine.resume(area);
  } catch (const Error& error) {
    return error.code();
  }
  return std::nullopt;
}

}  // namespace

void Roster::park(Sequence& sequence) {
  Parked parked;
  parked.area.resize(driven_.engine.park_bytes(sequence.id));
  require(driven_.engine.park(sequence.id, parked.area) == parked.area.size(),
          "park of " + sequence.name() + " writes another number of bytes than it said");
  driven_.engine.end(sequence.id);
  pages_.end(sequence.id);
  const auto found = std::ranges::find(sequences_, &sequence, &std::unique_ptr<Sequence>::get);
  parked.sequence = std::move(*found);
  sequences_.erase(found);
  parked_.push_back(std::move(parked));
}

void Roster::resume() {
  if (parked_.empty()) return;
  Parked& parked = parked_[random_.below(static_cast<std::uint32_t>(parked_.size()))];
  Sequence& sequence = *parked.sequence;
  SequenceId id{};
  const bool room =
      has_slot(sequence.spec) && (windowed() || pages_.used() + pages_.pages_of(sequence.settled) <= blocks());
  if (room && random_.below(4) == 0) {
    const std::uint32_t at = random_.below(static_cast<std::uint32_t>(parked.area.size()));
    parked.area[at] ^= std::byte{16};
    require(error_of_resume(driven_.engine, parked.area, id) == Errc::corrupt,
            sequence.name() + " is resumed with byte " + std::to_string(at) + " damaged");
    parked.area[at] ^= std::byte{16};
  }
  const std::optional<Errc> error = error_of_resume(driven_.engine, parked.area, id);
  require(error == (room ? std::nullopt : std::optional(Errc::out_of_capacity)),
          "resume of " + sequence.name() + (room ? " fails" : " without room is not refused"));
  stats_.refused += room ? 0 : 1;
  if (!room) return;
  sequence.id = id;
  sequence.audited = 0;
  pages_.begin(id);
  pages_.grow(id, 0, sequence.settled);
  sequence.calls.push_back({.kind = Call::Kind::park, .count = sequence.settled});
  ++stats_.resumed;
  sequences_.push_back(std::move(parked.sequence));
  std::erase_if(parked_, [](const Parked& each) { return each.sequence == nullptr; });
}

}  // namespace sluice::test
