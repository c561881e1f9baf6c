#include <algorithm>
#include <array>
#include <string>

#include "sluice/error.hpp"
#include "sluice/prefill.hpp"

namespace sluice {
namespace {

constexpr std::array<PrefillMode, 3> kModes{PrefillMode::full, PrefillMode::flexprefill, PrefillMode::automatic};

[[noreturn]] void refuse(const std::string& why) { throw Error(Errc::invalid_argument, "prefill: " + why); }

}  // namespace

const char* to_string(PrefillMode mode) noexcept {
  switch (mode) {
    case PrefillMode::full: return "full";
    case PrefillMode::flexprefill: return "flexprefill";
    case PrefillMode::automatic: return "auto";
  }
  return "unknown";
}

PrefillMode parse_prefill_mode(std::string_view text) {
  std::string names;
  for (const PrefillMode mode : kModes) {
    if (text == to_string(mode)) return mode;
    names += (names.empty() ? "" : ", ") + std::string(to_string(mode));
  }
  throw Error(Errc::invalid_argument, "unknown prefill mode \"" + std::string(text) + "\"; there are " + names);
}

void validate(const PrefillSpec& spec) {
  if (std::find(kModes.begin(), kModes.end(), spec.mode) == kModes.end()) {
    refuse("mode is " + std::to_string(static_cast<unsigned>(spec.mode)) +
           "; it must be a value of sluice::PrefillMode");
  }
  const FlexPrefillSpec& flex = spec.flex;
  if (!(flex.gamma > 0.f && flex.gamma <= 1.f)) refuse("gamma is " + std::to_string(flex.gamma) + "; it is in (0, 1]");
  if (!(flex.tau >= 0.f && flex.tau <= 1.f)) refuse("tau is " + std::to_string(flex.tau) + "; it is in [0, 1]");
  if (flex.max_budget != 0 && flex.max_budget < flex.min_budget) {
    refuse("max_budget of " + std::to_string(flex.max_budget) + " tokens is less than min_budget of " +
           std::to_string(flex.min_budget) + "; raise it, or lower min_budget");
  }
  if (flex.flattened && flex.max_budget != 0) {
    refuse("max_budget bounds what a query block chooses, and flattened lets all of them choose together; drop one");
  }
}

}  // namespace sluice
