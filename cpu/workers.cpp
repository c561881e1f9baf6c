#include "cpu/workers.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "cpu/arena.hpp"
#include "sluice/error.hpp"

namespace sluice::cpu {
namespace {

constexpr std::uint32_t kMaxThreads = 4096;

/// oneTBB orders a caller's writes before the bodies, and the bodies' writes before the return. The same
/// order is stated here in atomics of our own, which a thread sanitizer can see. This one serves the whole
/// process and exists before any thread: a Job could not publish the Job that it lives in.
constinit std::atomic<std::uint64_t> hand_over{0};

void publish() noexcept { hand_over.fetch_add(1, std::memory_order_release); }
void receive() noexcept { (void)hand_over.load(std::memory_order_acquire); }

/// One parallel_for. Helpers draw indices from `next_` until none is left or a body has thrown.
class Job {
 public:
  Job(std::uint32_t count, const std::function<void(std::uint32_t)>& body) : count_(count), body_(body) {}

  void help() noexcept {
    try {
      while (!failed_.load(std::memory_order_relaxed)) {
        const std::uint64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i >= count_) break;
        body_(static_cast<std::uint32_t>(i));
      }
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    }
    returned_.fetch_add(1, std::memory_order_release);
  }

  void join() const {
    (void)returned_.load(std::memory_order_acquire);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const std::uint32_t count_;
  const std::function<void(std::uint32_t)>& body_;
  alignas(64) std::atomic<std::uint64_t> next_{0};  ///< 64 bits: every helper overshoots `count_` by one
  alignas(64) std::atomic<bool> failed_{false};
  std::atomic<std::uint32_t> returned_{0};
  std::exception_ptr error_;  ///< written by the one helper that raised `failed_`
};

/// Binds a thread that enters the arena to the core of its slot. Threads come and go; most come back to the
/// slot that they had, so the last binding is remembered and the system call saved.
class Pinning {
 public:
  Pinning(const Topology& topology, std::uint32_t numa_node)
      : topology_(topology), pus_(topology.core_order(numa_node)) {}

  void bind(std::uint32_t slot) const noexcept {
    thread_local std::optional<std::uint32_t> bound;
    const std::uint32_t pu = pus_[slot % pus_.size()];
    if (bound != pu && topology_.bind_this_thread(pu)) bound = pu;
  }

 private:
  Topology topology_;
  std::vector<std::uint32_t> pus_;
};

std::uint32_t thread_count(const Topology& topology, const WorkersOptions& options) {
  if (options.threads > kMaxThreads)
    throw Error(Errc::invalid_argument, "threads = " + std::to_string(options.threads) + " is above " +
                                            std::to_string(kMaxThreads) + "; use 0 for one per core");
  return options.threads != 0 ? options.threads : topology.cores();
}

}  // namespace

struct Workers::Impl {
  std::uint32_t threads = 1;
  std::optional<Pinning> pinning;
  std::function<void(std::uint32_t)> on_enter;
  std::unique_ptr<Arena> arena;  ///< null with one thread
};

Workers::Workers(const Topology& topology, const WorkersOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->threads = thread_count(topology, options);
  if (impl_->threads == 1) return;
  if (options.pin && !topology.synthetic()) impl_->pinning.emplace(topology, options.numa_node);
  impl_->on_enter = [this_impl = impl_.get()](std::uint32_t slot) {
    receive();
    if (this_impl->pinning) this_impl->pinning->bind(slot);
    publish();
  };
  publish();
  impl_->arena = std::make_unique<Arena>(impl_->threads, impl_->on_enter);
}

Workers::~Workers() {
  impl_->arena.reset();  // Returns when no thread is in `on_enter` any more.
  receive();
}

std::uint32_t Workers::threads() const noexcept { return impl_->threads; }

void Workers::parallel_for(std::uint32_t count, const std::function<void(std::uint32_t)>& body) const {
  if (count <= 1 || impl_->threads == 1) {
    for (std::uint32_t i = 0; i < count; ++i) body(i);
    return;
  }
  Job job(count, body);
  const std::function<void()> help = [&job] {
    receive();
    job.help();
  };
  publish();
  impl_->arena->run(std::min(count, impl_->threads), help);
  job.join();
}

}  // namespace sluice::cpu
