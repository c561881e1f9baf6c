#include "tools/link/bench.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <numeric>
#include <string>

#include "gpu/device/cuda_error.hpp"
#include "sluice/error.hpp"
#include "sluice/step/permutation.hpp"

namespace sluice::tools {
namespace {

/// Operations that certainly fit into the driver's queue of a stream. One more than fit, and the thread that should
/// open the gate would wait for it.
constexpr std::uint32_t kQueue = 400;
constexpr std::chrono::seconds kPatience{30};
/// At a sample beside a load.
constexpr int kAttempts = 3;

/// SplitMix64's output i.
std::uint64_t random_word(std::uint64_t i) noexcept { return mixed_bits((i + 1) * 0x9e3779b97f4a7c15u); }

/// A step through n places that visits each once and never two neighbours in a row, near `share` of n.
std::uint64_t step_through(std::uint64_t n, double share) noexcept {
  std::uint64_t step = static_cast<std::uint64_t>(static_cast<double>(n) * share) | 1;
  while (std::gcd(step, n) != 1) step += 2;
  return step;
}

std::string name_of(const TransferCase& what) {
  return std::to_string(what.blocks) + " blocks of " + std::to_string(what.block_bytes) + " bytes " +
         (what.to_device ? "to" : "from") + " the device by path '" + to_string(what.choice.path) + "'";
}

double microseconds(Clock::duration span) { return std::chrono::duration<double, std::micro>(span).count(); }

}  // namespace

double median(std::vector<double> samples) {
  if (samples.empty()) return 0.0;
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

TransferBench::Lap TransferBench::make_lap() {
  return {.begin = gpu::make_event(cudaEventDefault), .end = gpu::make_event(cudaEventDefault)};
}

TransferBench::TransferBench(gpu::CudaDevice& device, std::uint64_t bytes, std::span<std::byte> host)
    : device_(device),
      bytes_(host.empty() ? bytes : std::min<std::uint64_t>(bytes, host.size())),
      owned_host_(host.empty() ? device.allocate_pinned(bytes_) : nullptr),
      host_(host.empty() ? std::span(owned_host_->data(), bytes_) : host.first(bytes_)),
      near_(device.allocate(bytes_)),
      gate_memory_(device.allocate_pinned(sizeof(Flag))),
      gate_(new (gate_memory_->data()) Flag),
      stream_(device.create_queue("transfer bench")),
      reverse_(device.create_queue("transfer bench, other way")),
      raw_(stream_->handle()),
      raw_reverse_(reverse_->handle()),
      lap_(make_lap()),
      reverse_lap_(make_lap()) {
  fill();
}

/// Random words, each different: zeros travel as fast, but prove nothing.
void TransferBench::fill() {
  for (std::uint64_t i = 0; i < host_.size() / sizeof(std::uint64_t); ++i) {
    const std::uint64_t word = random_word(i);
    std::memcpy(host_.data() + i * sizeof word, &word, sizeof word);
  }
  const Copy all{.to = near_->data(), .from = host_.data(), .bytes = host_.size()};
  stream_->copy(std::span(&all, 1));
  finish();
}

void TransferBench::finish() {
  stream_->synchronize(deadline_after(kPatience));
  reverse_->synchronize(deadline_after(kPatience));
}

std::uint32_t TransferBench::most_blocks(std::uint64_t block_bytes) const noexcept {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes_ / block_bytes / 2, 1u << 20));
}

bool TransferBench::gateable(const TransferCase& what) const noexcept {
  const bool short_enough = what.choice.path == TransferPath::gather || what.blocks <= kQueue;
  return device_.memory_operations() && short_enough && what.choice.path != TransferPath::staged;
}

/// Sources lie in one half of their buffer, targets in the other half of theirs, so that a case and its mirror image
/// may run at once. `variant` turns the places, so that no sample finds data in a cache.
void TransferBench::place(const TransferCase& what, std::uint32_t variant, std::vector<Copy>& batch) const {
  const std::uint64_t places = most_blocks(what.block_bytes);
  if (what.blocks > places)
    throw Error(Errc::invalid_argument, "transfer bench: " + name_of(what) + " exceed the buffer");
  const std::uint64_t from_step = step_through(places, 0.618);
  const std::uint64_t to_step = step_through(places, 0.382);
  const std::uint64_t half = places * what.block_bytes;
  std::byte* const host = host_.data() + (what.to_device ? 0 : half);
  std::byte* const near = near_->data() + (what.to_device ? half : 0);
  batch.clear();
  for (std::uint64_t i = 0; i < what.blocks; ++i) {
    const std::uint64_t from = (i + variant * 7919u) * from_step % places * what.block_bytes;
    const std::uint64_t to = i * to_step % places * what.block_bytes;
    batch.push_back(what.to_device ? Copy{.to = near + to, .from = host + from, .bytes = what.block_bytes}
                                   : Copy{.to = host + to, .from = near + from, .bytes = what.block_bytes});
  }
}

void TransferBench::verify(const TransferCase& what) {
  place(what, 0, batch_);
  for (const Copy& copy : batch_) {
    if (what.to_device) {
      gpu::check(cudaMemsetAsync(copy.to, 0xa5, copy.bytes, raw_), "clear a target");
    } else {
      std::memset(copy.to, 0xa5, copy.bytes);
    }
  }
  finish();
  stream_->copy(batch_, what.choice);
  finish();
  check_bytes(what);
}

void TransferBench::check_bytes(const TransferCase& what) {
  std::vector<std::byte> seen(what.block_bytes);
  for (const Copy& copy : batch_) {
    const std::byte* const on_device = what.to_device ? copy.to : copy.from;
    const std::byte* const on_host = what.to_device ? copy.from : copy.to;
    gpu::check(cudaMemcpyAsync(seen.data(), on_device, seen.size(), cudaMemcpyDeviceToHost, raw_), "read a block back");
    gpu::check(cudaStreamSynchronize(raw_), "read a block back");
    if (std::memcmp(seen.data(), on_host, seen.size()) != 0)
      throw Error(Errc::device, "transfer bench: wrong bytes after copying " + name_of(what) +
                                    "; choose another path and report this");
  }
}

double TransferBench::between_us(cudaEvent_t from, cudaEvent_t to) const {
  float milliseconds = 0.f;
  gpu::check(cudaEventElapsedTime(&milliseconds, from, to), "time a batch");
  return static_cast<double>(milliseconds) * 1e3;
}

/// Once; again if the load ended meanwhile, unless it ends every time.
TransferTiming TransferBench::sample(const TransferCase& what, std::uint32_t variant) {
  place(what, variant, batch_);
  for (int attempt = 1;; ++attempt) {
    finish();
    if (load_ != nullptr) load_->renew();
    gpu::check(cudaEventRecord(lap_.begin.get(), raw_), "time a batch");
    const Clock::time_point begin = Clock::now();
    stream_->copy(batch_, what.choice);
    const Clock::time_point enqueued = Clock::now();
    gpu::check(cudaEventRecord(lap_.end.get(), raw_), "time a batch");
    finish();
    const bool beside_load = load_ != nullptr && load_->running();
    if (load_ != nullptr && !beside_load && attempt < kAttempts) continue;
    return {.host_us = microseconds(enqueued - begin),
            .device_us = between_us(lap_.begin.get(), lap_.end.get()),
            .path = stream_->last_path(),
            .beside_load = beside_load};
  }
}

TransferTiming TransferBench::landed(const TransferCase& what, int samples) {
  return landed(std::span(&what, 1), {.samples = samples}).front();
}

std::vector<TransferTiming> TransferBench::landed(std::span<const TransferCase> rivals, const TransferEffort& effort) {
  struct Lot {
    std::vector<double> host_us;
    std::vector<double> device_us;
    double spent_us = 0.0;
  };
  std::vector<Lot> lots(rivals.size());
  std::vector<TransferTiming> timings(rivals.size(), TransferTiming{.beside_load = true});
  for (int turn = 0; turn <= effort.samples; ++turn) {
    for (std::size_t i = 0; i < rivals.size(); ++i) {
      Lot& lot = lots[i];
      if (lot.spent_us > effort.enough_us) continue;
      // Each sample reads other places, or a rival would find in caches what the one before has read.
      const TransferTiming one = sample(rivals[i], static_cast<std::uint32_t>(turn * rivals.size() + i));
      if (turn == 0) continue;  // the one that warms up
      lot.host_us.push_back(one.host_us);
      lot.device_us.push_back(one.device_us);
      lot.spent_us += one.device_us;
      timings[i].path = one.path;
      timings[i].beside_load = timings[i].beside_load && one.beside_load;
    }
  }
  for (std::size_t i = 0; i < rivals.size(); ++i) {
    timings[i].host_us = median(std::move(lots[i].host_us));
    timings[i].device_us = median(std::move(lots[i].device_us));
  }
  return timings;
}

std::optional<double> TransferBench::gated_us(const TransferCase& what, int samples) {
  if (!gateable(what)) return std::nullopt;
  std::vector<double> times;
  for (int sample = 0; sample <= samples; ++sample) {
    place(what, static_cast<std::uint32_t>(sample), batch_);
    finish();
    stream_->wait(*gate_, ++gate_value_);
    gpu::check(cudaEventRecord(lap_.begin.get(), raw_), "time a batch");
    stream_->copy(batch_, what.choice);
    gpu::check(cudaEventRecord(lap_.end.get(), raw_), "time a batch");
    gate_->signal(gate_value_);
    finish();
    if (sample != 0) times.push_back(between_us(lap_.begin.get(), lap_.end.get()));
  }
  return median(times);
}

double TransferBench::both_us(const TransferCase& what, int samples) {
  TransferCase mirrored = what;
  mirrored.to_device = !what.to_device;
  if (mirrored.choice.path == TransferPath::staged) mirrored.choice.path = TransferPath::copy_engine;
  const bool gated = gateable(what) && gateable(mirrored);
  std::vector<double> times;
  for (int sample = 0; sample <= samples; ++sample) {
    place(what, static_cast<std::uint32_t>(sample), batch_);
    place(mirrored, static_cast<std::uint32_t>(sample), reverse_batch_);
    finish();
    ++gate_value_;
    if (gated) {
      stream_->wait(*gate_, gate_value_);
      reverse_->wait(*gate_, gate_value_);
    }
    gpu::check(cudaEventRecord(lap_.begin.get(), raw_), "time a batch");
    stream_->copy(batch_, what.choice);
    reverse_->copy(reverse_batch_, mirrored.choice);
    gpu::check(cudaEventRecord(lap_.end.get(), raw_), "time a batch");
    gpu::check(cudaEventRecord(reverse_lap_.end.get(), raw_reverse_), "time a batch");
    gate_->signal(gate_value_);
    finish();
    if (sample == 0) continue;
    times.push_back(
        std::max(between_us(lap_.begin.get(), lap_.end.get()), between_us(lap_.begin.get(), reverse_lap_.end.get())));
  }
  return median(times);
}

}  // namespace sluice::tools
