#include "tools/cli/fetch_share.hpp"

#include <cmath>
#include <string>

#include <CLI/CLI.hpp>

#include "scheduler/plan/cost_model.hpp"
#include "sluice/units.hpp"
#include "tools/cli/text/message.hpp"
#include "tools/cli/text/values.hpp"
#include "tools/cli/trace/trace.hpp"

namespace sluice::tools {

void add_fetch_share(CLI::App& app, FetchShare& share) {
  const auto read = [&share](const std::string& text) {
    share.advised = text == "auto";
    if (!share.advised) share.share = static_cast<float>(parse_share(text, "--fetch-share"));
  };
  app.add_option_function<std::string>(
         "--fetch-share", read,
         "With placement hybrid, of what the device chose and is not near, the share that it attends over the link "
         "while the CPU attends the rest; auto: link / (link + CPU), by their rates")
      ->type_name("SHARE|auto")
      ->default_str("0%");
}

void advise(FetchShare& share, const Device* device, std::uint32_t threads) {
  if (!share.advised) return;
  share.advised = false;
  if (device == nullptr) {
    share.share = 0.f;
    say("--fetch-share auto: 0%, there is no link without a GPU");
    return;
  }
  constexpr std::uint64_t kPageBytes = 8 * KiB;  // Keys and values of 16 tokens of head_dim 128.
  const scheduler::LaneRates rates = measured_rates(device, kPageBytes, threads);
  share.share = scheduler::advised_fetch_share(rates);
  say("--fetch-share auto: " + std::to_string(std::lround(100.f * share.share)) + "%, by a link of " +
      std::to_string(std::lround(rates.link_gbps)) + " GB/s and host memory that is read with " +
      std::to_string(std::lround(rates.cpu_gbps)) + " GB/s, scattered rows more slowly");
}

}  // namespace sluice::tools
