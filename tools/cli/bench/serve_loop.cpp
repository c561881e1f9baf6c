#include "tools/cli/bench/serve_loop.hpp"

#include <algorithm>
#include <map>
#include <thread>

#include "scheduler/plan/forward_rows.hpp"
#include "tools/cli/bench/device_copies.hpp"
#include "tools/cli/bench/random_numbers.hpp"
#include "tools/cli/text/interrupt.hpp"

namespace sluice::tools {
namespace {

constexpr std::uint64_t kLeastElements = 8u << 20;
/// So that Ctrl-C is noticed between requests.
constexpr std::chrono::milliseconds kNap{50};

double milliseconds(Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

}  // namespace

RandomRows::RandomRows(Device& device, const AttentionShape& shape, std::uint32_t rows) : shape_(shape) {
  const std::uint64_t most = std::uint64_t{rows} * shape.q_heads * shape.head_dim;
  elements_ = std::max(kLeastElements, 2 * most);
  std::vector<std::uint16_t> numbers(elements_);
  fill_random_bf16(numbers);
  const auto stream = device.create_stream("bench");
  pool_ = uploaded(device, *stream, std::as_bytes(std::span(numbers)));
  out_ = device.allocate(most * sizeof(std::uint16_t));
}

TensorView RandomRows::rows(std::uint64_t salt, std::uint32_t rows, std::uint32_t heads) const {
  const std::uint64_t places = (elements_ - std::uint64_t{rows} * heads * shape_.head_dim) / shape_.head_dim;
  const std::byte* data = pool_->data() + salt * 2'654'435'761u % places * shape_.head_dim * sizeof(std::uint16_t);
  return dense_view(data, DType::bf16, rows, heads, shape_.head_dim);
}

MutableTensorView RandomRows::out(std::uint32_t rows) const {
  return dense_view(out_->data(), DType::bf16, rows, shape_.q_heads, shape_.head_dim);
}

struct ServeLoop::Request {
  SequenceId sequence{};
  std::uint32_t tokens = 0;  ///< that it has, those that it was given included
  std::uint32_t prompt = 0;  ///< of them, those that it was admitted with
  std::uint32_t done = 0;    ///< that its sequence has
  Clock::time_point arrived{};
  Clock::time_point newest{};  ///< when it was given its newest token
  bool answered = false;       ///< it was given one
};

struct ServeLoop::Run {
  std::span<const LoadRequest> load;
  double seconds_per_gap = 0.0;
  Clock::time_point start = Clock::now();
  std::size_t come = 0;  ///< of the load
  std::map<RequestId, Request> requests{};
  ServeResult result{};

  [[nodiscard]] Clock::time_point arrival() const {
    return start + std::chrono::duration_cast<Clock::duration>(
                       std::chrono::duration<double>(load[come].arrival * seconds_per_gap));
  }
};

ServeLoop::ServeLoop(const EngineOptions& engine, const AdmissionOptions& admission, const PolicySpec& policy,
                     std::shared_ptr<Device> device, const RandomRows& rows, void* stream)
    : engine_(engine, std::move(device)),
      admission_(admission),
      policy_(policy),
      on_cpu_(scheduler::chooser(policy) == scheduler::Chooser::cpu),
      rows_(rows),
      stream_(stream) {}

ServeResult ServeLoop::run(std::span<const LoadRequest> load, double rate) {
  Run run{.load = load, .seconds_per_gap = rate == 0.0 ? 0.0 : 1.0 / rate};
  while (run.come < load.size() || !run.requests.empty()) {
    stop_if_interrupted();
    for (; run.come < load.size() && run.arrival() <= Clock::now(); ++run.come) {
      const RequestId id{run.come};
      admission_.submit({.id = id,
                         .prompt_tokens = load[run.come].prompt,
                         .max_new_tokens = load[run.come].answer,
                         .on_cpu = on_cpu_});
      run.requests[id] = {.tokens = load[run.come].prompt, .arrived = run.arrival()};
      run.result.prompt_tokens += load[run.come].prompt;
    }
    turn(run);
  }
  run.result.seconds = std::chrono::duration<double>(Clock::now() - run.start).count();
  return std::move(run.result);
}

void ServeLoop::turn(Run& run) {
  begin(run, admission_.admit());
  const std::vector<TurnItem> items = admission_.next();
  if (items.empty()) {
    std::this_thread::sleep_until(std::min(run.arrival(), Clock::now() + kNap));
    return;
  }
  const Clock::time_point start = Clock::now();
  forward(run, items);
  const Clock::time_point now = Clock::now();
  for (const TurnItem& item : items) {
    Request& request = run.requests[item.request];
    request.done += item.tokens;
    run.result.computed_tokens += item.prefill ? item.tokens : 0;
    if (!item.output) continue;
    ++request.tokens;
    auto& times = request.answered ? run.result.between_ms : run.result.first_ms;
    times.push_back(milliseconds(now - (request.answered ? request.newest : request.arrived)));
    request.newest = now;
    request.answered = true;
    ++run.result.answer_tokens;
  }
  for (const RequestId id : admission_.complete(1e-3 * milliseconds(now - start))) {
    engine_.end(run.requests[id].sequence);
    run.requests.erase(id);
  }
}

void ServeLoop::begin(Run& run, const AdmissionChanges& changes) {
  for (const RequestId id : changes.preempt) engine_.end(run.requests[id].sequence);
  for (const RequestId id : changes.admit) {
    Request& request = run.requests[id];
    request.sequence = engine_.begin(policy_);
    request.prompt = request.tokens;
    request.done = 0;
  }
  run.result.preempted += changes.preempt.size();
  run.result.largest_batch = std::max(run.result.largest_batch, admission_.use().running);
}

void ServeLoop::forward(Run& run, const std::vector<TurnItem>& items) {
  Bucket bucket = engine_.options().largest;
  bucket.decode_rows = bucket.prefill_rows = bucket.prefills = 0;
  std::vector<PlanItem> planned;
  for (const TurnItem& item : items) {
    planned.push_back(
        {.sequence = run.requests[item.request].sequence, .tokens = item.tokens, .prefill = item.prefill});
    (item.prefill ? bucket.prefill_rows : bucket.decode_rows) += item.tokens;
    bucket.prefills += item.prefill ? 1 : 0;
  }
  const AttentionShape& shape = engine_.options().shape;
  const Batch batch = engine_.plan(planned, bucket, stream_);
  for (LayerId layer{0}; layer.value < shape.layers; ++layer.value, salt_ += 3) {
    engine_.attend(bucket, layer, rows_.rows(salt_, bucket.rows(), shape.q_heads),
                   rows_.rows(salt_ + 1, bucket.rows(), shape.kv_heads),
                   rows_.rows(salt_ + 2, bucket.rows(), shape.kv_heads), rows_.out(bucket.rows()), stream_);
  }
  engine_.finish(batch);
  ++run.result.forwards;
}

}  // namespace sluice::tools
