#include "tools/cli/plan/calibration_cases.hpp"

#include <algorithm>
#include <array>

namespace sluice::tools {
namespace {

using Case = CalibrationCase;

constexpr PlacementMode kStream = PlacementMode::stream;
constexpr std::uint32_t kShort = 8192, kMiddle = 16384, kLong = 32768, kLongest = 131072;

constexpr double kMuchNear = 0.4;
/// Of a short sequence, all but a few of the tokens of a window: the CPU's answer to a short list, beside the one to a
/// longer list where less is near.
constexpr double kMostOfWindow = 0.1;

/// Policies whose forwards are not alike, see PolicyCosts.
struct Other {
  const char* policy;
  std::uint32_t longest_batch = 0;  ///< tokens; 0: no batch is measured
  /// Where the device chooses, of so many that it hardly waits for the CPU; 0: the CPU chooses.
  double near_share = 0.0;
  bool streams = false;  ///< the CPU's choice is timed apart from what it attends

  [[nodiscard]] constexpr bool by_device() const noexcept { return near_share != 0.0; }
};
constexpr std::array<Other, 15> kOthers{{{"quest", kLong, kMuchNear},
                                         {"twilight", kLong, kMuchNear},
                                         {"exact | int4 | top_p=0.95", kLong, kMuchNear},
                                         {"tactic | int4", kLong, 1.0},
                                         {"streaming", 0, kMostOfWindow},
                                         {"lfps", kMiddle, 0.0, true},
                                         {"topk", kMiddle, 0.0, true},
                                         {"psa", kMiddle, 0.0, true},
                                         {"tactic", 0, 0.0, true},
                                         {"magicpig"},
                                         {"snapkv"},
                                         {"double_sparsity"},
                                         {"adamas"},
                                         {"vattention"},
                                         {"infinigen"}}};

/// On a GPU near rows may be attended in `split`, from which windows of two lengths tell them apart.
std::vector<Case> of_default(Effort effort) {
  constexpr Case kWide{.tokens = kLong, .wide = true, .near_share = kMuchNear};
  if (effort == Effort::brief) return {{.tokens = kShort}, {.tokens = kLong}, kWide};
  Case wide_batch = kWide;
  wide_batch.rows = kBatchRows;
  wide_batch.layers = 8;
  return {{.tokens = kShort},
          {.tokens = kLong},
          {.tokens = kLongest, .layers = 8},
          {.tokens = kShort, .placement = kStream},
          {.tokens = kLong, .placement = kStream},
          {.tokens = kShort, .rows = kBatchRows},
          {.tokens = kLong, .rows = kBatchRows, .layers = 8},
          kWide,
          wide_batch};
}

/// Near memory for all tokens tells what the device takes for long lists, and for a few what the CPU does.
void add_dense(std::vector<Case>& cases, std::uint32_t tokens, Case like) {
  like.policy = "full";
  like.tokens = tokens;
  cases.push_back(like);
  like.near_share = 1.0;
  cases.push_back(like);
}

/// Where the device chooses, once as little near as the default has, too, which tells what the CPU takes. Where the CPU
/// chooses, that is most of the time, whatever is near.
void add_others(std::vector<Case>& cases) {
  constexpr Case kLike{.layers = 8, .warm_up = 32, .steps = 12};
  for (const std::uint32_t tokens : {kShort, kLong}) add_dense(cases, tokens, kLike);
  for (const Other& other : kOthers) {
    Case each = kLike;
    each.policy = other.policy;
    const auto add = [&](std::uint32_t tokens) {
      each.tokens = tokens;
      cases.push_back(each);
    };
    for (const std::uint32_t tokens : {kShort, kLong}) {
      add(tokens);
      if (!other.by_device() && !other.streams) continue;
      cases.push_back(each);
      if (other.by_device()) cases.back().near_share = other.near_share;
      if (other.streams) cases.back().placement = kStream;
    }
    if (other.longest_batch == 0) continue;
    each.rows = kBatchRows;
    if (other.by_device()) {
      each.near_share = other.near_share;
    } else {
      each.layers = 4;
    }
    for (const std::uint32_t tokens : {kShort, other.longest_batch}) add(tokens);
  }
}

/// Without a GPU: shorter, and few.
std::vector<Case> on_host(Effort effort) {
  constexpr std::uint32_t kTiny = 1024, kSmall = 4096, kLarge = 16384;
  Case like{.layers = 4, .warm_up = 16, .steps = 12};
  std::vector<Case> cases;
  const auto add = [&](std::uint32_t tokens) {
    like.tokens = tokens;
    cases.push_back(like);
  };
  for (const std::uint32_t tokens : {kTiny, kSmall}) add(tokens);
  if (effort == Effort::brief) return cases;
  add(kLarge);
  like.placement = kStream;
  for (const std::uint32_t tokens : {kSmall, kLarge}) add(tokens);
  like.placement = PlacementMode::hybrid;
  like.rows = kBatchRows;
  for (const std::uint32_t tokens : {kTiny, kSmall}) add(tokens);
  like = {.layers = 2, .warm_up = 8, .steps = 8};
  for (const std::uint32_t tokens : {kTiny, kSmall}) add_dense(cases, tokens, like);
  for (const Other& other : kOthers) {
    like.policy = other.policy;
    like.near_share = other.by_device() ? std::max(other.near_share, kMuchNear) : other.near_share;
    for (const std::uint32_t tokens : {kTiny, kSmall}) {
      add(tokens);
      if (!other.streams) continue;
      cases.push_back(like);
      cases.back().placement = kStream;
    }
  }
  return cases;
}

}  // namespace

std::vector<CalibrationCase> calibration_cases(bool gpu, Effort effort) {
  if (!gpu) return on_host(effort);
  std::vector<Case> cases = of_default(effort);
  if (effort == Effort::thorough) add_others(cases);
  return cases;
}

}  // namespace sluice::tools
