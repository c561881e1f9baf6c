#include "cpu/threads/workers.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/threads/team.hpp"
#include "sluice/error.hpp"

namespace sluice::cpu {
namespace {

constexpr std::uint32_t kMaxThreads = 4096;

std::uint32_t thread_count(const Topology& topology, const WorkersOptions& options) {
  if (options.threads > kMaxThreads)
    throw Error(Errc::invalid_argument, "threads = " + std::to_string(options.threads) + " is above " +
                                            std::to_string(kMaxThreads) + "; use 0 for one per core");
  return options.threads != 0 ? options.threads : topology.cores();
}

std::chrono::microseconds spin_time(const WorkersOptions& options, std::uint32_t threads, std::uint32_t cores) {
  if (options.spin.count() >= 0) return options.spin;
  if (threads > cores) return std::chrono::microseconds(0);
  return std::chrono::microseconds(cores > 4 ? 1000 : 20);
}

/// The core of each helper. The caller is not bound: it likely runs where it was, so the first core is left to it.
std::vector<std::uint32_t> helper_cores(const Topology& topology, const WorkersOptions& options,
                                        std::uint32_t helpers) {
  const std::vector<std::uint32_t> pus = topology.core_order(options.numa_node);
  std::vector<std::uint32_t> cores(helpers);
  for (std::uint32_t i = 0; i < helpers; ++i) cores[i] = pus[(i + 1) % pus.size()];
  return cores;
}

}  // namespace

struct Workers::Impl {
  std::uint32_t threads = 1;
  std::unique_ptr<Team> team;  ///< null with one thread
};

Workers::Workers(const Topology& topology, const WorkersOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->threads = thread_count(topology, options);
  if (options.timeout.count() < 1)
    throw Error(Errc::invalid_argument, "timeout = " + std::to_string(options.timeout.count()) +
                                            " ms; workers need at least 1 ms to return");
  if (impl_->threads == 1) return;
  Team::Options team{.helpers = impl_->threads - 1,
                     .spin = spin_time(options, impl_->threads, topology.cores()),
                     .timeout = options.timeout,
                     .cores = {},
                     .on_start = {},
                     .before_body = options.before_body};
  if (options.pin && !topology.synthetic()) {
    team.cores = helper_cores(topology, options, team.helpers);
    team.on_start = [topology, cores = team.cores](std::uint32_t helper) { topology.bind_this_thread(cores[helper]); };
  }
  impl_->team = std::make_unique<Team>(std::move(team));
}

Workers::~Workers() = default;

std::uint32_t Workers::threads() const noexcept { return impl_->threads; }

void Workers::parallel_for(std::uint32_t count, std::function<void(std::uint32_t)> body) const {
  if (!impl_->team || (count <= 1 && !lost())) {
    for (std::uint32_t i = 0; i < count; ++i) body(i);
    return;
  }
  impl_->team->run(count, std::move(body));
}

bool Workers::lost() const noexcept { return impl_->team && impl_->team->lost(); }

void Workers::keep(std::unique_ptr<Kept> memory) const noexcept {
  if (impl_->team) impl_->team->keep(std::move(memory));
}

}  // namespace sluice::cpu
