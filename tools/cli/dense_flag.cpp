#include "tools/cli/dense_flag.hpp"

#include "scheduler/plan/dense_advice.hpp"
#include "sluice/policy.hpp"
#include "tools/cli/text/values.hpp"

namespace sluice::tools {

void add_dense(CLI::App& app, std::string& dense) {
  app.add_option(
         "--dense", dense,
         "Tokens up to which everything is attended, written behind the policy: auto: what takes no longer than "
         "choosing, by what a core is taken to need (without a GPU; with one, none); off; or COUNT")
      ->type_name("auto|off|COUNT")
      ->capture_default_str();
}

std::string with_dense(const std::string& policy, const std::string& dense, const Device* device,
                       const AttentionShape& shape, DType kv_dtype) {
  const PolicySpec spec = parse_policy(policy);
  if (dense == "off") return policy;
  std::uint32_t tokens = 0;
  if (dense != "auto") {
    tokens = static_cast<std::uint32_t>(parse_count(dense, "--dense", {.least = 1, .most = 0x7fff'ffffu}));
  } else if (device == nullptr && spec.dense_tokens == 0) {
    tokens = scheduler::advised_dense_tokens(spec, shape, kv_dtype);
  }
  if (tokens == 0) return policy;
  std::string text = policy + " | dense=" + std::to_string(spec.dense_layers);
  if (spec.dense_every != 0) text += ",every=" + std::to_string(spec.dense_every);
  text += ",until=" + std::to_string(tokens);
  (void)parse_policy(text);
  return text;
}

}  // namespace sluice::tools
