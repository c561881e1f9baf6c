// Forwards of the traffic: what is planned, and how it is enqueued.
#include <algorithm>
#include <chrono>
#include <utility>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tests/soak/traffic.hpp"

namespace sluice::test {
namespace {

constexpr std::uint32_t kLongestChunk = 100;

using Steady = std::chrono::steady_clock;

/// Adds the time until it goes.
class Watch {
 public:
  explicit Watch(double& seconds) : seconds_(seconds) {}
  ~Watch() { seconds_ += std::chrono::duration<double>(Steady::now() - begin_).count(); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  double& seconds_;
  Steady::time_point begin_ = Steady::now();
};

}  // namespace

std::uint32_t Traffic::free_tensors() const {
  std::uint32_t free = 0;
  while (std::ranges::find(flights_, free, &Flight::tensors) != flights_.end()) ++free;
  return free;
}

bool Traffic::any_doomed() const noexcept {
  return std::ranges::any_of(flights_, [](const Flight& flight) { return flight.doomed; });
}

Bucket Traffic::draw_bucket(bool audit) {
  const EngineOptions& options = driven_.engine.options();
  Bucket bucket = options.largest;
  bucket.audit = audit;
  bucket.max_tokens = 0;
  if (random_.below(2) == 0) bucket.drafts = 1;
  if (random_.below(4) == 0)
    bucket.decode_rows = bucket.drafts * (1 + random_.below(bucket.decode_rows / bucket.drafts));
  if (random_.below(4) == 0) bucket.prefill_rows = bucket.prefills = 0;
  if (random_.below(8) == 0 && bucket.prefill_rows != 0) bucket.decode_rows = 0;
  if (random_.below(4) == 0)
    bucket.max_tokens = std::min(options.page_tokens * (1 + random_.below(kSoakTokens / options.page_tokens)),
                                 options.largest.max_tokens);
  if (random_.below(4) == 0) bucket.unbounded = false;
  if (random_.below(6) == 0) bucket.pages = false;
  return bucket;
}

std::uint32_t Traffic::rows_for(Sequence& sequence, const Bucket& left, std::uint32_t max_tokens, bool prefill) {
  const std::uint32_t end = std::min(kSoakTokens, max_tokens);
  const std::uint32_t room = end - std::min(end, sequence.planned());
  if (prefill) return left.prefills == 0 ? 0 : std::min({room, left.prefill_rows, sequence.prompt_left, kLongestChunk});
  const EngineOptions& options = driven_.engine.options();
  const scheduler::ForwardLimits limits{.shape = scheduler::row_shape(options.shape, options.page_tokens),
                                        .max_window = driven_.engine.sizes().max_window,
                                        .digests = driven_.engine.sizes().digests};
  if (!scheduler::forward_unserved(sequence.spec, left, limits).empty()) return 0;
  const std::uint32_t most = std::min({room, left.decode_rows, sequence.decode_left});
  if (scheduler::chooser(sequence.spec) == scheduler::Chooser::device)
    return std::min(most, random_.below(3) == 0 ? kMostDrafts : 1);
  // A policy of the CPU looks at a prompt that must have come in by then, and chooses once.
  if (sequence.in_flight != 0 && any_doomed()) return 0;
  if (scheduler::samples_for_one(sequence.spec) && left.drafts > 1) return 0;
  return std::min(most, left.drafts);
}

void Traffic::fill(Flight& flight, std::vector<PlanItem>& items, std::vector<std::vector<std::uint32_t>>& tokens) {
  Bucket left = flight.bucket;
  const std::uint32_t max_tokens = left.max_tokens == 0 ? driven_.engine.options().largest.max_tokens : left.max_tokens;
  std::uint32_t row = 0;
  std::vector<Sequence*> order;
  for (const auto& sequence : roster_.all())
    order.insert(order.begin() + random_.below(static_cast<std::uint32_t>(order.size()) + 1), sequence.get());
  for (Sequence* const sequence : order) {
    const bool prefill = sequence->prompt_left != 0;
    const bool answers = !prefill && !has_decoded(*sequence);  // It may well take a while until it does.
    if (sequence->keep != kNone || random_.below(6) == 0 || (answers && random_.below(3) != 0)) continue;
    const std::uint32_t most = rows_for(*sequence, left, max_tokens, prefill);
    if (most == 0) continue;
    const std::uint32_t count = 1 + random_.below(most);
    const std::uint32_t right = prefill || random_.below(2) == 0 ? count : 1 + random_.below(count);
    const auto teams = static_cast<std::uint32_t>(div_up(count, left.drafts));
    (prefill ? left.prefill_rows : left.decode_rows) -= prefill ? count : teams * left.drafts;
    left.prefills -= prefill ? 1 : 0;
    items.push_back({.sequence = sequence->id, .tokens = count, .prefill = prefill});
    flight.parts.push_back({.sequence = sequence,
                            .row = row,
                            .first = sequence->planned(),
                            .count = count,
                            .right = right,
                            .prefill = prefill});
    tokens.push_back(roster_.draw(count));
    for (const std::uint32_t token : tokens.back()) tensors_[flight.tensors].set(row++, driven_.pool, token);
  }
}

bool Traffic::plan(Flight& flight, const std::vector<PlanItem>& items) {
  const bool room = roster_.has_room(items);
  try {
    flight.batch = driven_.engine.plan(items, flight.bucket, driven_.ground.handle());
  } catch (const Error& error) {
    if (error.code() == Errc::out_of_capacity && !room) {
      make_room();
    } else if (!driven_.trouble || !refused(error, items)) {
      throw;
    } else {
      roster_.note_begun(items);
    }
    return false;
  }
  if (!room) throw Failure("a forward is planned for which there are no blocks");
  return true;
}

void Traffic::make_room() {
  ++stats_.refused;
  const Slip last = flights_.empty() ? Slip::none : flights_.back().slip;
  if (last == Slip::not_enqueued || last == Slip::half) return;  // It never ends by itself.
  if (!flights_.empty()) {
    land_all();
  } else if (Sequence* const one = roster_.resting()) {
    roster_.end(*one);
  }
}

bool Traffic::refused(const Error& error, const std::vector<PlanItem>& items) {
  const std::string text = error.what();
  if (text.find("the soak refuses") != std::string::npos) {
    ++stats_.broken;
    ++stats_.failed;
    roster_.plan_in_vain(items);
    return true;
  }
  if (text.find("no more host memory") != std::string::npos) {  // A thread looked at a prompt.
    ++stats_.unchosen;
    ++stats_.failed;
    return true;
  }
  // A prompt did not come in, and a policy is to look at it.
  if (text.find("finish it first") == std::string::npos) return false;
  const std::uint64_t failed = stats_.failed;
  land_all();
  if (stats_.failed == failed) throw Failure("no forward failed, and yet " + text);
  return true;
}

bool Traffic::start(Slip slip, bool audit) {
  Flight flight{.batch = {}, .bucket = draw_bucket(audit), .tensors = free_tensors(), .parts = {}, .slip = slip};
  if (slip == Slip::none && !audit) draw_recorded(flight);
  flight.doomed = slip != Slip::none || any_doomed();
  std::vector<PlanItem> items;
  std::vector<std::vector<std::uint32_t>> tokens;
  tensors_[flight.tensors].spoil();
  fill(flight, items, tokens);
  if (items.empty() && random_.below(4) != 0) return false;
  // Of a forward that is recorded nothing is enqueued yet.
  Recorded* const replay = recorded(flight.recorded, flight.tensors);
  if (replay == nullptr) flight.recorded = kNone;
  const Watch watch(stats_.seconds);
  if (!plan(flight, items)) return false;
  for (std::size_t i = 0; i < flight.parts.size(); ++i) {
    Part& part = flight.parts[i];
    (part.prefill ? part.sequence->prompt_left : part.sequence->decode_left) -= part.count;
    part.call = part.sequence->calls.size();
    roster_.plan(*part.sequence, std::move(tokens[i]), part.prefill, flight.bucket.drafts);
  }
  flights_.push_back(std::move(flight));
  return enqueue(flights_.back());
}

void Traffic::draw_recorded(Flight& flight) {
  if (random_.below(2) == 0) return;
  flight.recorded = random_.below(static_cast<std::uint32_t>(buckets_.size()));
  flight.bucket = buckets_[flight.recorded];
}

Recorded* Traffic::recorded(std::uint32_t bucket, std::uint32_t tensors) {
  if (bucket == kNone) return nullptr;
  const auto [place, added] = recorded_.try_emplace({bucket, tensors});
  if (added) {
    place->second = driven_.ground.record([this, bucket, tensors](void* handle) {
      for (std::uint32_t layer = 0; layer < driven_.pool.shape().layers; ++layer)
        enqueue_layer(tensors, buckets_[bucket], layer, handle);
    });
  }
  return place->second.get();
}

void Traffic::delay(void* handle) {
  constexpr std::chrono::milliseconds kLongestHold{30};
  if (driven_.longest_delay.count() == 0 || random_.below(4) != 0) return;
  const bool holds = random_.below(100) == 0;
  const std::chrono::microseconds longest = holds ? kLongestHold : driven_.longest_delay;
  ++(holds ? stats_.holds : stats_.delays);
  const std::chrono::microseconds time(1 + random_.below(static_cast<std::uint32_t>(longest.count())));
  driven_.ground.delay(handle, time);
}

void Traffic::enqueue_layer(std::uint32_t tensors, const Bucket& bucket, std::uint32_t layer, void* handle) {
  delay(handle);
  tensors_[tensors].attend_layer(driven_.engine, bucket, layer, handle);
}

void Traffic::enqueue_layers(const Flight& flight, std::uint32_t count) {
  for (std::uint32_t layer = 0; layer < count; ++layer)
    enqueue_layer(flight.tensors, flight.bucket, layer, driven_.ground.handle());
}

bool Traffic::enqueue(const Flight& flight) {
  try {
    enqueue_as(flight);
  } catch (const Error& error) {
    if (error.code() != Errc::device || !driven_.trouble || !driven_.ground.refuses()) throw;
    ++stats_.broken;
    ++stats_.failed;
    cancel(flights_.size() - 1);
    return false;
  }
  if (!enqueued_.empty()) driven_.ground.stream()->record(*enqueued_[flight.tensors]);
  return true;
}

void Traffic::enqueue_as(const Flight& flight) {
  const std::uint32_t all = driven_.pool.shape().layers;
  switch (flight.slip) {
    case Slip::none:
      if (flight.recorded == kNone) return enqueue_layers(flight, all);
      ++stats_.replayed;
      return recorded(flight.recorded, flight.tensors)->replay();
    case Slip::not_enqueued: return;
    case Slip::half: return enqueue_layers(flight, 1 + random_.below(all - 1));
    case Slip::twice:
      enqueue_layers(flight, 1);
      enqueue_layers(flight, all);
      ++unplanned_;  // Its second beginning, if all of that is enqueued.
      return;
    case Slip::other_bucket: {
      Flight other = {.batch = {}, .bucket = driven_.engine.options().largest, .tensors = flight.tensors, .parts = {}};
      other.bucket.audit = false;
      if (other.bucket == flight.batch.bucket) other.bucket.max_tokens -= driven_.engine.options().page_tokens;
      return enqueue_layers(other, all);
    }
  }
}

}  // namespace sluice::test
