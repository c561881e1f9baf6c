#include "cpu/device/fault_injector.hpp"

#include <string>

#include "sluice/error.hpp"
#include "sluice/step/permutation.hpp"

namespace sluice::cpu {
namespace {

double chance_of(FaultSite site, const FaultOptions& faults) noexcept {
  switch (site) {
    case FaultSite::copy: return faults.fail_copy;
    case FaultSite::verb: return faults.fail_verb;
    case FaultSite::allocation: return faults.fail_allocation;
    case FaultSite::registration: return faults.fail_registration;
    case FaultSite::other: return 0.0;
  }
  return 0.0;
}

void check_chance(const char* name, double chance) {
  if (chance >= 0.0 && chance <= 1.0) return;  // False for NaN as well.
  throw Error(Errc::invalid_argument,
              std::string("faults: ") + name + " = " + std::to_string(chance) + " is no chance in [0, 1]");
}

}  // namespace

std::uint64_t Generator::next() noexcept {
  return mixed_bits(state_ += 0x9e3779b97f4a7c15u);
}

void FaultInjector::validate(const FaultOptions& faults) {
  if (faults.max_delay.count() < 0)
    throw Error(Errc::invalid_argument, "faults: max_delay is negative; use 0 for none");
  check_chance("fail_copy", faults.fail_copy);
  check_chance("fail_verb", faults.fail_verb);
  check_chance("fail_allocation", faults.fail_allocation);
  check_chance("fail_registration", faults.fail_registration);
}

void FaultInjector::change(const FaultOptions& faults) {
  const std::lock_guard lock(mutex_);
  now_ = faults;
  ++epoch_;
}

Fault FaultSequence::next(FaultSite site) {
  const std::lock_guard lock(injector_.mutex_);
  const FaultOptions& now = injector_.now_;
  if (epoch_ != injector_.epoch_) {
    epoch_ = injector_.epoch_;
    generator_ = Generator(Generator(now.seed).next() + actor_);
  }
  Fault fault;
  fault.delay = std::chrono::microseconds(generator_.below(static_cast<std::uint64_t>(now.max_delay.count()) + 1));
  fault.reorder = now.reorder_copies;
  fault.fails = generator_.chance() < chance_of(site, now);
  fault.seed = generator_.next();
  return fault;
}

}  // namespace sluice::cpu
