// How forwards of the traffic end: their outputs, and what becomes of the tokens.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <string_view>
#include <thread>
#include <utility>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "sluice/run_clock.hpp"
#include "tests/soak/traffic.hpp"

namespace sluice::test {
namespace {

/// Chunks that end before this attend densely, whatever the engine does with longer ones.
constexpr std::uint32_t kDensePrompt = 2 * kPrefillBlock;

/// What a row attends in a layer, as far as that is known.
Window window_of_row(const EngineOptions& options, const Flight& flight, const Part& part, std::uint32_t row,
                     std::uint32_t layer) {
  if (!options.windows.empty() && options.windows[layer] != 0)
    return {.known = true, .sinks = 0, .recent = options.windows[layer]};
  if (!part.prefill) {
    Window window = window_of(part.sequence->spec, layer);
    window.recent += row % flight.bucket.drafts;  // As the first row of a team has it, and the team's tokens since.
    return window;
  }
  return {.known = options.prefill.mode == PrefillMode::full || part.first + part.count <= kDensePrompt};
}

bool all_nan(std::span<const float> values) {
  return std::ranges::all_of(values, [](float x) { return std::isnan(x); });
}
/// As ForwardTensors::spoil left it.
bool untouched(std::span<const float> values) {
  return std::ranges::all_of(values, [](float x) { return x == 1e30f; });
}

/// An error names what has no new tokens.
void require_named(const Flight& flight, const std::string& text) {
  for (const Part& part : flight.parts) {
    const std::string name = " sequence " + std::to_string(part.sequence->id.value);
    const auto ends = [&](std::size_t at) { return at == text.size() || text[at] == ' ' || text[at] == ';'; };
    std::size_t at = text.find(name);
    while (at != std::string::npos && !ends(at + name.size())) at = text.find(name, at + 1);
    if (at == std::string::npos) throw Failure("an error does not name" + name + ": " + text);
  }
}

}  // namespace

Flight Traffic::take(std::size_t index) {
  Flight flight = std::move(flights_[index]);
  flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(index));
  for (const Part& part : flight.parts) --part.sequence->in_flight;
  return flight;
}

void Traffic::complete(std::size_t index) {
  Flight flight = take(index);
  std::string why;
  try {
    const auto begin = std::chrono::steady_clock::now();
    driven_.engine.finish(flight.batch);
    stats_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  } catch (const Error& error) {
    why = error.what();
    if (error.code() != Errc::device || !(flight.doomed || driven_.trouble)) throw;
  }
  if (why.empty() && flight.doomed) throw Failure("a forward got to its end that must fail");
  if (why.find("could not choose") != std::string::npos) return retract_unchosen(std::move(flight), why);
  why.empty() ? succeed(flight) : fail(flight, why);
}

void Traffic::land_all() {
  while (!flights_.empty()) complete(random_.below(static_cast<std::uint32_t>(flights_.size())));
}

void Traffic::succeed(const Flight& flight) {
  await_outputs(flight);
  ++stats_.forwards;
  finished_ = std::max(finished_, flight.batch.forward);
  const ForwardTensors& tensors = tensors_[flight.tensors];
  const EngineOptions& options = driven_.engine.options();
  std::uint32_t rows = 0;
  for (const Part& part : flight.parts) {
    Sequence& sequence = *part.sequence;
    const std::uint32_t some = random_.below(part.count);
    for (std::uint32_t i = 0; i < part.count; ++i) {
      if (part.prefill && i != 0 && i != some && i + 1 != part.count) continue;  // All would take too long.
      std::vector<float> out = tensors.out(part.row + i);
      for (std::uint32_t layer = 0; layer < driven_.pool.shape().layers; ++layer)
        require_right(driven_.pool, sequence, part.first + i, layer, window_of_row(options, flight, part, i, layer),
                      std::span(out).subspan(layer * driven_.pool.row(), driven_.pool.row()), stats_);
      // What `automatic` does depends on which chunks were finished in time.
      const bool repeatable = !part.prefill || options.prefill.mode != PrefillMode::automatic;
      if (sequence.sampled && repeatable) sequence.said.push_back({.call = part.call, .row = i, .out = std::move(out)});
    }
    sequence.settled += part.count;
    roster_.settle(sequence);
    sequence.audited += flight.bucket.audit && !part.prefill ? part.count : 0;
    stats_.decoded += part.prefill ? 0 : part.count;
    if (!part.prefill && part.first >= sequence.begun_again) sequence.begun_again = kNone;
    if (part.right != part.count) sequence.keep = std::min(sequence.keep, part.first + part.right);
    rows += part.count;
  }
  for (std::uint32_t row = rows; row < flight.bucket.rows(); ++row) {
    const std::vector<float> out = tensors.out(row);
    if (!std::ranges::all_of(out, [](float x) { return x == 0.f; })) throw Failure("padding has an output");
  }
}

void Traffic::fail(const Flight& flight, const std::string& why) {
  const bool broken = why.find("could not do a part") != std::string::npos;
  ++stats_.failed;
  stats_.broken += broken ? 1 : 0;
  const bool late = why.find("not answered in time") != std::string::npos;
  stats_.late += late ? 1 : 0;
  require_named(flight, why);
  // Of one that was left off before its end, the device may not have been able to do a part, too.
  const bool partly =
      broken || (late && driven_.pool.terrain().in_parts) || (flight.slip != Slip::none && driven_.trouble);
  drain(driven_);  // What it enqueued in vain may still run.
  for (const Part& part : flight.parts) {
    for (std::uint32_t i = 0; i < part.count; ++i) require_no_more(flight, part, i, partly);
  }
  for (Flight& behind : flights_) behind.doomed |= behind.batch.forward > flight.batch.forward;
  retract(flight, false);
  if (!flights_.empty()) land_all();  // Nothing that is planned behind them could succeed.
}

void Traffic::await_outputs(const Flight& flight) const {
  if (enqueued_.empty()) return;
  const Event& end = *enqueued_[flight.tensors];
  const Deadline deadline = deadline_after(kSoakTimeout);
  while (end.state() == Event::State::pending) {
    if (RunClock::now() >= deadline) throw Failure("a forward has ended, and its stream does not get there");
    std::this_thread::yield();
  }
  if (end.state() != Event::State::done && !driven_.trouble) throw Failure("a forward has ended; " + end.reason());
}

void Traffic::retract_unchosen(Flight flight, const std::string& why) {
  ++stats_.failed;
  ++stats_.unchosen;
  constexpr std::string_view kFirst = "forward ";
  const std::uint64_t first = std::stoull(why.substr(why.find(kFirst) + kFirst.size()));
  if (why.find(" and those behind it were taken back") == std::string::npos) throw Failure("not said: " + why);
  flights_.push_back(std::move(flight));
  for (const Part& part : flights_.back().parts) ++part.sequence->in_flight;
  std::ranges::sort(flights_, {}, [](const Flight& each) { return each.batch.forward; });
  while (!flights_.empty() && flights_.back().batch.forward >= first) {
    const Flight last = take(flights_.size() - 1);
    require_named(last, why);
    retract(last, true);
    for (const Part& part : last.parts) part.sequence->uncertain |= scheduler::remembers(part.sequence->spec);
  }
}

void Traffic::require_no_more(const Flight& flight, const Part& part, std::uint32_t row, bool partly) const {
  const std::uint32_t layers = driven_.pool.shape().layers;
  const std::size_t floats = driven_.pool.row();
  const std::vector<float> out = tensors_[flight.tensors].out(part.row + row);
  const auto values = [&](std::uint32_t layer) { return std::span(out).subspan(layer * floats, floats); };
  const auto none = [&](std::uint32_t layer) {
    return all_nan(values(layer)) || (flight.slip != Slip::none && untouched(values(layer)));
  };
  std::uint32_t end = 0;  // Of layers that have outputs.
  while (end < layers && !none(end)) ++end;
  for (std::uint32_t layer = end; layer < layers; ++layer) {
    if (!none(layer)) throw Failure("a forward that failed goes on: " + part.sequence->story());
  }
  // A chunk may have been attended before the far part of other rows was too late.
  if (end == layers && !part.prefill && !partly)
    throw Failure("a forward that failed has all of a row's outputs: " + part.sequence->story());
  RoundStats ignored;
  // Of a layer that could not be done there may be a part.
  for (std::uint32_t layer = 0; layer + (partly ? 1 : 0) < end; ++layer)
    require_right(driven_.pool, *part.sequence, part.first + row, layer,
                  window_of_row(driven_.engine.options(), flight, part, row, layer), values(layer), ignored);
}

void Traffic::retract(const Flight& flight, bool ran) {
  for (const Part& part : flight.parts) {
    Sequence& sequence = *part.sequence;
    const bool remembers = scheduler::remembers(sequence.spec);
    sequence.disturbed = true;
    if (part.prefill) sequence.queries_from = part.first;
    // Threads may have learnt more than can be taken back; a policy that has looked at a prompt in vain has forgotten.
    const bool learns_much = sequence.spec.uses(Source::history) && sequence.spec.budget.kind == BudgetKind::top_p;
    if (remembers && (part.prefill ? has_decoded(sequence) : ran && learns_much)) sequence.uncertain = true;
    if (remembers && !part.prefill && begins_again(sequence, part.call)) sequence.begun_again = part.first;
    (part.prefill ? sequence.prompt_left : sequence.decode_left) += part.count;
    sequence.tokens.resize(std::min<std::size_t>(sequence.tokens.size(), part.first));
    sequence.calls.resize(std::min(sequence.calls.size(), part.call));
    for (Vain& behind : sequence.vain) behind.call = std::min(behind.call, part.call);
    sequence.vain.push_back({.call = part.call, .prefill = part.prefill, .tokens = part.count});
    std::erase_if(sequence.said, [&](const Said& said) { return said.call >= part.call; });
  }
}

void Traffic::cancel(std::size_t index) {
  driven_.engine.cancel(flights_[index].batch);
  while (flights_.size() > index) {
    ++stats_.cancelled;
    retract(take(flights_.size() - 1), true);
  }
}

}  // namespace sluice::test
