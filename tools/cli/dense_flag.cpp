#include "tools/cli/dense_flag.hpp"

#include <CLI/CLI.hpp>

#include "sluice/engine_options.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {

void add_dense_tokens(CLI::App& app, std::optional<std::uint32_t>& tokens, const std::string& otherwise) {
  const auto read = [&tokens](const std::string& text) {
    constexpr CountRange kRange{.most = 0x7fff'ffff};
    tokens = text == "auto" ? kDenseAuto : static_cast<std::uint32_t>(parse_count(text, "--dense-tokens", kRange));
  };
  app.add_option_function<std::string>(
         "--dense-tokens", read,
         "Tokens up to which a sequence attends all of them, as choosing takes longer; auto: as many as device memory "
         "has room for, up to where choosing pays on this device")
      ->type_name("TOKENS|auto")
      ->default_str(otherwise);
}

Json dense_tokens_json(std::uint32_t tokens) { return tokens == kDenseAuto ? Json("auto") : Json(tokens); }

}  // namespace sluice::tools
