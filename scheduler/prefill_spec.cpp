#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "sluice/error.hpp"
#include "sluice/prefill.hpp"
#include "sluice/step/prefill_choice.hpp"

namespace sluice {
namespace {

constexpr std::array kModes{PrefillMode::full, PrefillMode::flexprefill, PrefillMode::automatic, PrefillMode::streaming,
                            PrefillMode::minference};
constexpr std::array kPatterns{HeadPattern::vertical_slash, HeadPattern::a_shape, HeadPattern::block_sparse,
                               HeadPattern::best};

template <class Kind, std::size_t kCount>
Kind parse(std::string_view text, const std::array<Kind, kCount>& kinds, const char* what) {
  std::string names;
  for (const Kind kind : kinds) {
    if (text == to_string(kind)) return kind;
    names += (names.empty() ? "" : ", ") + std::string(to_string(kind));
  }
  throw Error(Errc::invalid_argument,
              "unknown " + std::string(what) + " \"" + std::string(text) + "\"; there are " + names);
}

[[noreturn]] void refuse(const std::string& why) { throw Error(Errc::invalid_argument, "prefill: " + why); }

void check_window(const StreamingPrefillSpec& spec, const std::string& what) {
  if (spec.window == 0) refuse(what + ": window is 0 tokens; a query attends at least itself");
}

}  // namespace

const char* to_string(PrefillMode mode) noexcept {
  switch (mode) {
    case PrefillMode::full: return "full";
    case PrefillMode::flexprefill: return "flexprefill";
    case PrefillMode::automatic: return "auto";
    case PrefillMode::streaming: return "streaming";
    case PrefillMode::minference: return "minference";
  }
  return "unknown";
}

PrefillMode parse_prefill_mode(std::string_view text) { return parse(text, kModes, "prefill mode"); }

const char* to_string(HeadPattern pattern) noexcept {
  switch (pattern) {
    case HeadPattern::vertical_slash: return "vertical_slash";
    case HeadPattern::a_shape: return "a_shape";
    case HeadPattern::block_sparse: return "block_sparse";
    case HeadPattern::best: return "best";
  }
  return "unknown";
}

HeadPattern parse_head_pattern(std::string_view text) { return parse(text, kPatterns, "pattern of MInference"); }

std::uint32_t dense_prompt_tokens(const PrefillSpec& spec) noexcept {
  switch (spec.mode) {
    case PrefillMode::full: break;
    case PrefillMode::flexprefill:
    case PrefillMode::automatic: return std::max(2 * kPrefillBlock, spec.flex.min_budget);
    case PrefillMode::streaming: return kPrefillBlock;
    case PrefillMode::minference: return 2 * kPrefillBlock;
  }
  return std::numeric_limits<std::uint32_t>::max();
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
  check_window(spec.streaming, "streaming");
  check_window(spec.minference.a_shape, "a_shape");
  if (std::find(kPatterns.begin(), kPatterns.end(), spec.minference.pattern) == kPatterns.end()) {
    refuse("pattern is " + std::to_string(static_cast<unsigned>(spec.minference.pattern)) +
           "; it must be a value of sluice::HeadPattern");
  }
  if (spec.minference.blocks == 0) refuse("blocks is 0 tokens; a query block attends at least those of one block");
}

}  // namespace sluice
