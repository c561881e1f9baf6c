// Sequences of the roster that leave their engine and come back.
#include <algorithm>
#include <optional>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tests/soak/expect.hpp"
#include "tests/soak/roster.hpp"

namespace sluice::test {

void Roster::park(Sequence& sequence) {
  if (driven_.calm) driven_.calm();
  Parked parked;
  parked.area.resize(driven_.engine.park_bytes(sequence.id));
  require(driven_.engine.park(sequence.id, parked.area) == parked.area.size(),
          "park of " + sequence.name() + " writes another number of bytes than it said");
  parked.passed = pages_.passed(sequence.id);
  driven_.engine.end(sequence.id);
  pages_.end(sequence.id);
  const auto found = std::ranges::find(sequences_, &sequence, &std::unique_ptr<Sequence>::get);
  parked.sequence = std::move(*found);
  sequences_.erase(found);
  parked_.push_back(std::move(parked));
}

void Roster::visit_elsewhere(const Parked& parked) {
  EngineOptions options = driven_.engine.options();
  options.page_tokens = 8u << random_.below(4);
  options.prefill_window = options.page_tokens;
  options.near_bytes = 0;
  options.sequences = options.cpu_sequences = options.in_flight = options.threads = 1;
  options.before_answer = {};
  options.host_bytes =
      (div_up(kSoakTokens, options.page_tokens) + 1) * driven_.pool.shape().layers * block_bytes(options);
  Engine other(options);
  const SequenceId id = other.resume(parked.area);
  std::vector<std::byte> again(other.park_bytes(id));
  (void)other.park(id, again);
  require(again == parked.area, parked.sequence->name() + " is another one after a time with pages of " +
                                    std::to_string(options.page_tokens) + " tokens");
}

void Roster::resume() {
  if (parked_.empty()) return;
  if (driven_.calm) driven_.calm();
  Parked& parked = parked_[random_.below(static_cast<std::uint32_t>(parked_.size()))];
  Sequence& sequence = *parked.sequence;
  SequenceId id{};
  const bool room =
      has_slot(sequence.spec) && pages_.used() + pages_.resumed(sequence.settled, parked.passed) <= blocks();
  if (windowed() && random_.below(3) == 0) visit_elsewhere(parked);
  const auto resume = [&] { id = driven_.engine.resume(parked.area); };
  if (room && random_.below(4) == 0) {
    const std::uint32_t at = random_.below(static_cast<std::uint32_t>(parked.area.size()));
    parked.area[at] ^= std::byte{16};
    require(error_of(resume) == Errc::corrupt,
            sequence.name() + " is resumed with byte " + std::to_string(at) + " damaged");
    parked.area[at] ^= std::byte{16};
  }
  const std::optional<Errc> error = error_of(resume);
  require(error == (room ? std::nullopt : std::optional(Errc::out_of_capacity)),
          "resume of " + sequence.name() + (room ? " fails" : " without room is not refused"));
  stats_.refused += room ? 0 : 1;
  if (!room) return;
  sequence.id = id;
  sequence.audited = 0;
  pages_.resume(id, sequence.settled, parked.passed);
  sequence.calls.push_back({.kind = Call::Kind::park, .count = sequence.settled});
  ++stats_.resumed;
  sequences_.push_back(std::move(parked.sequence));
  std::erase_if(parked_, [](const Parked& each) { return each.sequence == nullptr; });
}

}  // namespace sluice::test
