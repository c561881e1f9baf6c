#include "tools/cli/bench/serve_loop.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "tools/cli/text/interrupt.hpp"

namespace sluice::tools {
namespace {

/// So that Ctrl-C and SIGTERM are noticed between requests.
constexpr std::chrono::milliseconds kNap{50};
/// Of the time in which requests come, what the last ones have to end in.
constexpr double kGrace = 0.5;

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }
double milliseconds(Clock::duration time) { return 1e3 * seconds(time); }

}  // namespace

struct ServeLoop::Request {
  SequenceId sequence{};
  std::uint32_t done = 0;  ///< tokens that its sequence has
  Clock::time_point arrived{};
  std::optional<Clock::time_point> admitted{};
  Clock::time_point newest{};  ///< when it was given its newest token
  bool answered = false;       ///< it was given one
  bool running = false;
};

struct ServeLoop::Run {
  std::span<const LoadRequest> load;
  double seconds_per_gap = 0.0;
  const ServeLimits& limits;
  Clock::time_point start = Clock::now();
  std::size_t come = 0;  ///< of the load
  std::map<RequestId, Request> requests{};
  std::uint64_t wanted = 0;  ///< times between tokens of the whole load
  std::uint64_t late = 0;    ///< beyond the limit: of these,
  std::uint64_t waited = 0;  ///< and of those that were admitted
  ServeResult result{};

  [[nodiscard]] Clock::time_point arrival() const {
    return start + std::chrono::duration_cast<Clock::duration>(
                       std::chrono::duration<double>(load[come].arrival * seconds_per_gap));
  }
};

ServeLoop::ServeLoop(const EngineOptions& engine, const AdmissionOptions& admission, const PolicySpec& policy,
                     const ServeParts& parts)
    : engine_(engine, parts.device),
      admission_(admission),
      policy_(policy),
      on_cpu_(scheduler::chooser(policy) == scheduler::Chooser::cpu),
      forwards_(engine_, parts) {
  forwards_.prepare(policy_);
}

ServeResult ServeLoop::run(std::span<const LoadRequest> load, double rate, const ServeLimits& limits) {
  Run run{.load = load, .seconds_per_gap = rate == 0.0 ? 0.0 : 1.0 / rate, .limits = limits};
  run.result.requests = load.size();
  for (const LoadRequest& request : load) run.wanted += request.answer - 1;
  const EngineStats before = engine_.stats();
  while (!over(run)) {
    stop_if_interrupted();
    submit(run);
    turn(run);
  }
  run.result.seconds = seconds(Clock::now() - run.start);
  leave(run);
  run.result.decoded.stats = since(before, engine_.stats());
  return std::move(run.result);
}

void ServeLoop::submit(Run& run) {
  for (; run.come < run.load.size() && run.arrival() <= Clock::now(); ++run.come) {
    const LoadRequest& next = run.load[run.come];
    const RequestId id{run.come};
    run.result.prompt_tokens += next.prompt;
    try {
      admission_.submit({.id = id, .prompt_tokens = next.prompt, .max_new_tokens = next.answer, .on_cpu = on_cpu_});
    } catch (const Error& error) {
      if (error.code() != Errc::out_of_capacity) throw;
      if (++run.result.refused == run.load.size() && !run.limits.judge()) throw;
      run.wanted -= next.answer - 1;
      continue;
    }
    run.requests[id] = {.arrived = run.arrival()};
  }
}

bool ServeLoop::over(Run& run) const {
  if (run.come == run.load.size() && run.requests.empty()) return true;
  const Clock::time_point now = Clock::now();
  std::uint64_t waited = run.waited + run.result.refused;
  for (const auto& [id, request] : run.requests) {
    const bool waits = !request.admitted && seconds(now - request.arrived) > run.limits.queued_s;
    waited += waits ? 1 : 0;
  }
  run.result.given_up = lost(run.limits, run.load.size(), waited, run.wanted, run.late);
  return run.result.given_up ||
         (run.limits.seconds != 0.0 && seconds(now - run.start) >= (1.0 + kGrace) * run.limits.seconds);
}

void ServeLoop::turn(Run& run) {
  begin(run, admission_.admit());
  const std::vector<TurnItem> items = admission_.next();
  if (items.empty()) {
    const Clock::time_point nap = Clock::now() + kNap;
    std::this_thread::sleep_until(run.come < run.load.size() ? std::min(run.arrival(), nap) : nap);
    return;
  }
  const Clock::time_point start = Clock::now();
  forward(run, items);
  count(run, items, start);
  for (const RequestId id : admission_.complete(seconds(Clock::now() - start))) {
    engine_.end(run.requests[id].sequence);
    run.requests.erase(id);
  }
}

void ServeLoop::begin(Run& run, const AdmissionChanges& changes) {
  for (const RequestId id : changes.preempt) {
    engine_.end(run.requests[id].sequence);
    run.requests[id].running = false;
  }
  for (const RequestId id : changes.admit) {
    Request& request = run.requests[id];
    request.sequence = engine_.begin(policy_);
    request.done = 0;
    request.running = true;
    if (request.admitted) continue;
    request.admitted = Clock::now();
    run.result.queued_s.push_back(seconds(*request.admitted - request.arrived));
    run.waited += run.limits.queued_s != 0.0 && run.result.queued_s.back() > run.limits.queued_s ? 1 : 0;
  }
  run.result.preempted += changes.preempt.size();
  run.result.largest_batch = std::max(run.result.largest_batch, admission_.use().running);
}

void ServeLoop::forward(Run& run, const std::vector<TurnItem>& items) {
  std::vector<ServeItem> served;
  for (const TurnItem& item : items) served.push_back({.sequence = run.requests[item.request].sequence, .turn = item});
  const std::uint64_t before = forwards_.replays();
  forwards_.run(served);
  run.result.replayed += forwards_.replays() - before;
}

void ServeLoop::count(Run& run, const std::vector<TurnItem>& items, Clock::time_point start) {
  const Clock::time_point now = Clock::now();
  ServeResult& result = run.result;
  ++result.forwards;
  (items.back().prefill ? result.chunk_ms : result.decode_ms).push_back(milliseconds(now - start));
  for (const TurnItem& item : items) {
    Request& request = run.requests[item.request];
    request.done += item.tokens;
    result.computed_tokens += item.prefill ? item.tokens : 0;
    if (!item.prefill) {
      ++result.decoded.tokens;
      result.decoded.dense_tokens += request.done;
    }
    if (!item.output) continue;
    auto& times = request.answered ? result.between_ms : result.first_ms;
    times.push_back(milliseconds(now - (request.answered ? request.newest : request.arrived)));
    run.late += request.answered && times.back() > run.limits.between_ms ? 1 : 0;
    request.newest = now;
    request.answered = true;
    ++result.answer_tokens;
  }
}

/// So that the next run finds nothing.
void ServeLoop::leave(Run& run) {
  const Clock::time_point now = Clock::now();
  run.result.unfinished = run.requests.size() + run.load.size() - run.come;
  for (const auto& [id, request] : run.requests) {
    if (request.running) engine_.end(request.sequence);
    admission_.end(id);
    if (request.admitted) continue;
    ++run.result.waiting;
    run.result.queued_s.push_back(seconds(now - request.arrived));
  }
}

}  // namespace sluice::tools
