#include "cpu/mischief.hpp"

#include <string>

#include "sluice/error.hpp"
#include "sluice/permutation.hpp"

namespace sluice::cpu {
namespace {

double chance_of(Deed deed, const Misbehaviour& misbehaviour) noexcept {
  switch (deed) {
    case Deed::copy: return misbehaviour.fail_copy;
    case Deed::verb: return misbehaviour.fail_verb;
    case Deed::allocation: return misbehaviour.fail_allocation;
    case Deed::registration: return misbehaviour.fail_registration;
    case Deed::other: return 0.0;
  }
  return 0.0;
}

void check_chance(const char* name, double chance) {
  if (chance >= 0.0 && chance <= 1.0) return;  // False for NaN as well.
  throw Error(Errc::invalid_argument,
              std::string("misbehaviour: ") + name + " = " + std::to_string(chance) + " is no chance in [0, 1]");
}

}  // namespace

std::uint64_t Generator::next() noexcept {
  return mixed_bits(state_ += 0x9e3779b97f4a7c15u);
}

void Mischief::validate(const Misbehaviour& misbehaviour) {
  if (misbehaviour.max_delay.count() < 0)
    throw Error(Errc::invalid_argument, "misbehaviour: max_delay is negative; use 0 for none");
  check_chance("fail_copy", misbehaviour.fail_copy);
  check_chance("fail_verb", misbehaviour.fail_verb);
  check_chance("fail_allocation", misbehaviour.fail_allocation);
  check_chance("fail_registration", misbehaviour.fail_registration);
}

void Mischief::change(const Misbehaviour& misbehaviour) {
  const std::lock_guard lock(mutex_);
  now_ = misbehaviour;
  ++epoch_;
}

Fate Dice::roll(Deed deed) {
  const std::lock_guard lock(mischief_.mutex_);
  const Misbehaviour& now = mischief_.now_;
  if (epoch_ != mischief_.epoch_) {
    epoch_ = mischief_.epoch_;
    generator_ = Generator(Generator(now.seed).next() + actor_);
  }
  Fate fate;
  fate.delay = std::chrono::microseconds(generator_.below(static_cast<std::uint64_t>(now.max_delay.count()) + 1));
  fate.reorder = now.reorder_copies;
  fate.fails = generator_.chance() < chance_of(deed, now);
  fate.seed = generator_.next();
  return fate;
}

}  // namespace sluice::cpu
