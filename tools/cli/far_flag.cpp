#include "tools/cli/far_flag.hpp"

#include <algorithm>

#include <CLI/CLI.hpp>

#include "scheduler/plan/far_advice.hpp"
#include "scheduler/plan/forward_rows.hpp"
#include "sluice/error.hpp"
#include "sluice/policy.hpp"

namespace sluice::tools {
namespace {

/// Whether a policy has none and can have one.
bool takes_far(const PolicySpec& policy) {
  PolicySpec cut = policy;
  cut.far = {.min_tokens = 1, .share = 0.f};
  return policy.far.all() && unsupported_reasons(cut).empty() &&
         scheduler::chooser(policy) != scheduler::Chooser::neither;
}

FarOptions advised(const PolicySpec& policy, const FarPlace& place, const scheduler::LaneRates& rates) {
  const scheduler::RowShape shape = scheduler::row_shape(place.shape, place.page_tokens);
  const scheduler::ForwardNeeds needs = scheduler::forward_needs(policy, place.tokens, shape);
  Bucket bucket = needs.bucket;
  bucket.decode_rows = place.rows;
  const scheduler::WorkPlace work{
      .shape = place.shape,
      .layout = {.page_tokens = place.page_tokens, .head_dim = place.shape.head_dim, .dtype = place.kv_dtype},
      .placement = place.placement,
      .bucket = bucket,
      .code_bits = scheduler::code_bits_for(policy)};
  FarOptions far = scheduler::advised_far(rates, work, scheduler::forward_row(policy, place.tokens, shape), place.rows,
                                          place.near_hits);
  PolicySpec cut = policy;
  cut.far = far;
  const std::uint64_t least = scheduler::least_far_tokens(cut, shape);
  if (!far.all()) far.min_tokens = static_cast<std::uint32_t>(std::max<std::uint64_t>(far.min_tokens, least));
  return far;
}

}  // namespace

void add_far(CLI::App& app, std::string& far) {
  app.add_option(
         "--far", far,
         "Budget of far tokens of a layer, written behind the policy: COUNT, SHARE, max(COUNT, SHARE), or auto: "
         "what the machine attends in the time of near tokens [default: the policy's]")
      ->type_name("auto|COUNT|SHARE");
}

double usual_near_hits(double near_share) noexcept {
  constexpr double kUsual = 0.5;
  return near_share <= 0.0 ? 0.0 : std::max(kUsual, std::min(near_share, 1.0));
}

std::string with_far(const std::string& policy, const std::string& far, const FarPlace& place,
                     const std::function<scheduler::LaneRates()>& rates) {
  if (far.empty()) return policy;
  if (far != "auto") {
    const std::string text = policy + " | far=" + far;
    (void)parse_policy(text);
    return text;
  }
  const PolicySpec spec = parse_policy(policy);
  if (!takes_far(spec)) return policy;
  const FarOptions found = advised(spec, place, rates());
  return found.all() ? policy : policy + " | far=" + std::to_string(found.min_tokens);
}

Json far_budget(const PolicySpec& policy, const AttentionShape& shape, std::uint32_t tokens) {
  if (policy.far.all()) return {};
  return scheduler::far_tokens(policy.far, tokens, scheduler::row_shape(shape, 1));
}

}  // namespace sluice::tools
