#include "tools/cli/command.hpp"

#include "tools/cli/values.hpp"

namespace sluice::tools {

ExitCode exit_code_of(Errc code) noexcept {
  switch (code) {
    case Errc::invalid_argument:
    case Errc::not_found:
    case Errc::corrupt: return kUsage;
    case Errc::unsupported: return kUnsupported;
    case Errc::out_of_capacity:
    case Errc::io:
    case Errc::device:
    case Errc::timeout: return kFailed;
  }
  return kFailed;
}

CLI::Option* add_size(CLI::App& app, const std::string& name, std::uint64_t& target, const std::string& help) {
  const auto read = [name, &target](const std::string& text) { target = parse_size(text, name); };
  return app.add_option_function<std::string>(name, read, help)->type_name("BYTES");
}

CLI::Option* add_dtype(CLI::App& app, const std::string& name, DType& target, const std::string& help) {
  const auto read = [name, &target](const std::string& text) { target = parse_dtype(text, name); };
  return app.add_option_function<std::string>(name, read, help)
      ->type_name("f32|f16|bf16")
      ->default_str(to_string(target));
}

void add_output(CLI::App& app, OutputOptions& target) {
  const auto read = [&target](const std::string& text) { target.format = parse_format(text); };
  app.add_option_function<std::string>("-o,--format", read, "Format of the result")
      ->type_name("md|json|csv")
      ->default_str("md");
  app.add_option("--output", target.path, "Write the result to this file, which appears whole or not at all")
      ->type_name("FILE");
}

}  // namespace sluice::tools
