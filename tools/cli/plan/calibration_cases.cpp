#include "tools/cli/plan/calibration_cases.hpp"

#include <array>

namespace sluice::tools {
namespace {

using Case = CalibrationCase;

constexpr PlacementMode kStream = PlacementMode::stream;
constexpr double kMuchNear = 0.4;
constexpr std::uint32_t kShort = 8192, kLong = 32768, kLongest = 131072;

/// Policies whose forwards are not alike, see PolicyCosts.
struct Other {
  const char* policy;
  std::uint32_t longest_batch;  ///< tokens; 0: no batch is measured
  bool device = true;           ///< which chooses
};
constexpr std::array<Other, 8> kOthers{{{"quest", kLong},
                                        {"twilight", kLong},
                                        {"exact | int4 | top_p=0.95", 0},
                                        {"tactic | int4", 0},
                                        {"streaming", 0},
                                        {"lfps", 16384, false},
                                        {"topk", 16384, false},
                                        {"psa", 16384, false}}};

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

/// Where the device chooses, with so much near that it hardly waits for the CPU; and once as little as the default has,
/// which tells what the CPU takes. Where the CPU chooses, that is most of the time, whatever is near.
void add_others(std::vector<Case>& cases) {
  constexpr Case kLike{.layers = 8, .warm_up = 32, .steps = 12};
  for (const std::uint32_t tokens : {kShort, kLong}) add_dense(cases, tokens, kLike);
  for (const Other& other : kOthers) {
    Case each = kLike;
    each.policy = other.policy;
    each.tokens = kLong;
    if (other.device) {
      cases.push_back(each);
      each.near_share = kMuchNear;
    }
    const auto add = [&](std::uint32_t tokens) {
      each.tokens = tokens;
      cases.push_back(each);
    };
    for (const std::uint32_t tokens : {kShort, kLong}) add(tokens);
    if (other.longest_batch == 0) continue;
    each.rows = kBatchRows;
    if (!other.device) each.layers = 4;
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
    like.near_share = other.device ? kMuchNear : 0.0;
    for (const std::uint32_t tokens : {kTiny, kSmall}) add(tokens);
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
