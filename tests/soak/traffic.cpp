#include "tests/soak/traffic.hpp"

#include <algorithm>
#include <cmath>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"

namespace sluice::test {
namespace {

constexpr double kStepsPerArrival = 3.0;
constexpr std::size_t kBucketsRecorded = 2;

}  // namespace

Traffic::Traffic(const Driven& driven)
    : driven_(driven),
      random_(driven.seed),
      roster_(driven_, random_, stats_),
      unplanned_(driven.engine.stats().unplanned) {
  const EngineOptions& options = driven.engine.options();
  Device& memory = driven.ground.memory();
  for (std::uint32_t i = 0; i <= options.in_flight; ++i) {
    tensors_.emplace_back(memory, driven_.pool.shape(), options.largest.rows());
    if (driven.ground.stream() != nullptr) enqueued_.push_back(memory.create_event());
  }
  while (buckets_.size() < kBucketsRecorded) {
    Bucket bucket = draw_bucket(false);
    bucket.decode_rows = std::max(bucket.decode_rows, bucket.drafts);
    bucket.prefill_rows = bucket.prefills = 0;
    buckets_.push_back(bucket);
  }
}

Traffic::~Traffic() {
  Stream* const stream = driven_.ground.stream();
  try {
    if (stream != nullptr) stream->synchronize(deadline_after(kSoakTimeout));
  } catch (const std::exception&) {
    // Only after a failure, which has been told.
  }
}

void Traffic::run() {
  for (std::uint64_t turn = 0; turn < driven_.turns; ++turn) {
    arrive();
    change();
    step();
    cut_drafts();
    depart();
    roster_.check();
  }
}

void Traffic::leave() {
  land_all();
  drain(driven_);
  cut_drafts();
  if (driven_.engine.stats().unplanned != unplanned_)
    throw Failure("there were " + std::to_string(driven_.engine.stats().unplanned) +
                  " replays without a plan instead of " + std::to_string(unplanned_));
  while (roster_.size() != 0) roster_.end(*roster_.all().front());
  roster_.check();
}

void Traffic::arrive() {
  for (next_arrival_ -= 1.0; next_arrival_ < 0.0; ++waiting_)
    next_arrival_ -= kStepsPerArrival * std::log(1.0 - random_.uniform());
  if (random_.below(4) == 0) roster_.resume();  // Before those that come have taken all room.
  while (waiting_ != 0 && roster_.begin()) --waiting_;
}

void Traffic::depart() {
  for (std::size_t i = roster_.size(); i-- > 0;) {
    Sequence& sequence = *roster_.all()[i];
    const bool done = sequence.prompt_left == 0 && sequence.decode_left == 0;
    if (sequence.rests() && (done || sequence.planned() == kSoakTokens)) roster_.end(sequence);
  }
}

void Traffic::cut_drafts() {
  for (const auto& sequence : roster_.all()) {
    if (!sequence->rests() || sequence->keep == kNone) continue;
    if (sequence->keep < sequence->settled) roster_.truncate(*sequence, sequence->keep);
    sequence->keep = kNone;
  }
}

void Traffic::change() {
  if (roster_.size() == 0) return;
  Sequence& any = *roster_.all()[random_.below(static_cast<std::uint32_t>(roster_.size()))];
  Sequence* const resting = roster_.resting();
  // Between a prompt and its first answer.
  if (resting != nullptr && resting->settled != 0 && resting->prompt_left == 0 && !has_decoded(*resting) &&
      random_.below(2) == 0)
    return roster_.fork(*resting, random_.below(2) == 0);
  switch (random_.below(16)) {
    case 0:
      if (resting != nullptr) roster_.fork(*resting, false);
      return;
    case 1:
      if (resting != nullptr) roster_.fork(*resting, true);
      return;
    case 2:
    case 9:
      if (resting != nullptr) roster_.truncate(*resting, roster_.draw_shorter(*resting));
      return;
    case 3: return import(any);
    case 4: return give_up(any);
    case 5:  // The next turn of a conversation.
      if (any.prompt_left == 0) any.prompt_left = 1 + random_.below(60);
      return;
    case 6: return roster_.misuse(any);
    case 7: return roster_.watch(any);
    case 8:
      if (resting != nullptr) roster_.park(*resting);
      return;
    default: return;
  }
}

void Traffic::import(Sequence& sequence) {
  if (!flights_.empty() && random_.below(2) == 0) return;
  land_all();
  cut_drafts();
  roster_.import(sequence);
}

void Traffic::give_up(Sequence& sequence) {
  while (!sequence.rests()) {
    const auto with = std::ranges::find_if(flights_, [&](const Flight& flight) {
      return std::ranges::find(flight.parts, &sequence, &Part::sequence) != flight.parts.end();
    });
    const auto index = static_cast<std::size_t>(with - flights_.begin());
    // One that something else was finished behind can only be finished.
    random_.below(2) == 0 && with->batch.forward > finished_ ? cancel(index) : complete(index);
  }
  roster_.end(sequence);
}

void Traffic::step() {
  const std::uint32_t in_flight = driven_.engine.options().in_flight;
  while (flights_.size() == in_flight || (!flights_.empty() && random_.below(2) == 0))
    complete(random_.below(static_cast<std::uint32_t>(flights_.size())));
  if (driven_.trouble && random_.below(12) == 0) driven_.trouble();
  switch (random_.below(24)) {
    case 0:
    case 1: return slip();
    case 2: return replay_without_plan();
    case 3: return audit();
    default: (void)start(Slip::none, false);
  }
  if (!flights_.empty() && random_.below(12) == 0) {
    const std::uint32_t index = random_.below(static_cast<std::uint32_t>(flights_.size()));
    if (flights_[index].batch.forward > finished_) cancel(index);
  }
}

void Traffic::slip() {
  constexpr Slip kSlips[] = {Slip::not_enqueued, Slip::half, Slip::twice, Slip::other_bucket};
  const Slip slip = kSlips[random_.below(4)];
  if (!start(slip, false)) return;
  ++stats_.slips;
  if (slip == Slip::twice || slip == Slip::other_bucket) return;
  // What is planned behind one that was not enqueued whole makes it fail; otherwise nothing but this ends it.
  const bool behind = flights_.size() < driven_.engine.options().in_flight && random_.below(3) != 0;
  const std::size_t last = flights_.size() - 1;
  if (!behind || !start(Slip::none, false)) cancel(last);
}

void Traffic::replay_without_plan() {
  if (driven_.calm) driven_.calm();
  Flight flight{.batch = {}, .bucket = draw_bucket(false), .tensors = free_tensors(), .parts = {}};
  draw_recorded(flight);
  Recorded* const replay = recorded(flight.recorded, flight.tensors);
  tensors_[flight.tensors].spoil();
  replay != nullptr ? replay->replay() : enqueue_layers(flight, driven_.pool.shape().layers);
  drain(driven_);
  if (driven_.engine.stats().unplanned != ++unplanned_) throw Failure("a replay without a plan is not counted");
  for (std::uint32_t row = 0; row < flight.bucket.rows(); ++row) {
    const std::vector<float> out = tensors_[flight.tensors].out(row);
    if (!std::ranges::all_of(out, [](float x) { return std::isnan(x); }))
      throw Failure("a replay without a plan has an output that is a number");
  }
}

void Traffic::audit() {
  if (!driven_.engine.options().largest.audit) return;
  land_all();
  cut_drafts();
  if (!start(Slip::none, true)) return;
  const Sequence* const sequence = flights_.back().parts.empty() ? nullptr : flights_.back().parts.front().sequence;
  Bucket single = driven_.engine.options().largest;
  single.drafts = 1;
  const PlanItem item{.sequence = sequence == nullptr ? SequenceId{} : sequence->id};
  if (sequence != nullptr && driven_.engine.options().in_flight > 1) {
    try {
      (void)driven_.engine.plan({&item, 1}, single, driven_.ground.handle());
      throw Failure("something is planned beside an audited forward");
    } catch (const Error& error) {
      if (error.code() != Errc::invalid_argument) throw;
    }
  }
  complete(0);
}

}  // namespace sluice::test
