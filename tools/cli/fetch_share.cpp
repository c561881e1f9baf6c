#include "tools/cli/fetch_share.hpp"

#include <string>

#include <CLI/CLI.hpp>

#include "tools/cli/text/values.hpp"

namespace sluice::tools {

void add_fetch_share(CLI::App& app, float& share) {
  const auto read = [&share](const std::string& text) {
    share = text == "auto" ? kFetchAuto : static_cast<float>(parse_share(text, "--fetch-share"));
  };
  app.add_option_function<std::string>(
         "--fetch-share", read,
         "With placement hybrid, of what the device chose and is not near, the share that it attends over the link "
         "while the CPU attends the rest; auto: by their rates, in batches with 128 lists (sequences times KV heads)")
      ->type_name("SHARE|auto")
      ->default_str(share == kFetchAuto ? "auto" : "0%");
}

Json fetch_share_json(float share) { return share == kFetchAuto ? Json("auto") : Json(share); }

}  // namespace sluice::tools
