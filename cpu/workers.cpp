#include "cpu/workers.hpp"

#include <memory>
#include <string>
#include <vector>

#include "cpu/team.hpp"
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

}  // namespace

struct Workers::Impl {
  std::uint32_t threads = 1;
  std::unique_ptr<Team> team;  ///< null with one thread
};

Workers::Workers(const Topology& topology, const WorkersOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->threads = thread_count(topology, options);
  if (impl_->threads == 1) return;
  Team::Options team{.helpers = impl_->threads - 1,
                     .spin = spin_time(options, impl_->threads, topology.cores()),
                     .on_start = {}};
  if (options.pin && !topology.synthetic()) {
    // The caller is not bound: it likely runs where it was, so the first core is left to it.
    team.on_start = [topology, pus = topology.core_order(options.numa_node)](std::uint32_t helper) {
      topology.bind_this_thread(pus[(helper + 1) % pus.size()]);
    };
  }
  impl_->team = std::make_unique<Team>(std::move(team));
}

Workers::~Workers() = default;

std::uint32_t Workers::threads() const noexcept { return impl_->threads; }

void Workers::parallel_for(std::uint32_t count, const std::function<void(std::uint32_t)>& body) const {
  if (count <= 1 || !impl_->team) {
    for (std::uint32_t i = 0; i < count; ++i) body(i);
    return;
  }
  impl_->team->run(count, body);
}

}  // namespace sluice::cpu
