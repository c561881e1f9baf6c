#include "tools/cli/device_flags.hpp"

#include <charconv>

#include "sluice/error.hpp"
#include "tools/cli/transfer_profile.hpp"

namespace sluice::tools {
namespace {

int parse_ordinal(const std::string& text) {
  if (text == "cuda") return 0;
  int ordinal = -1;
  const std::string digits = text.starts_with("cuda:") ? text.substr(5) : "";
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), ordinal);
  if (digits.empty() || problem != std::errc() || end != digits.data() + digits.size() || ordinal < 0) {
    throw Error(Errc::invalid_argument, "--device: '" + text + "' is no device; have host, cuda, cuda:N");
  }
  return ordinal;
}

}  // namespace

void add_device_flags(CLI::App& app, DeviceFlags& flags) {
  app.add_option("--device", flags.device, "Where near pages live and near attention runs")
      ->type_name("host|cuda[:N]")
      ->capture_default_str();
  app.add_option("--transfer", flags.transfer, "How scattered pages cross the link (CUDA device)")
      ->type_name("auto|copy-engine|batch|gather|staged")
      ->capture_default_str();
  app.add_option("--transfer-profile", flags.transfer_profile,
                 "Crossovers that `sluice link --save-profile` measured [default: built in]")
      ->type_name("FILE");
}

std::shared_ptr<Device> make_device(const DeviceFlags& flags) {
  CudaDeviceOptions options{.transfer = parse_transfer_path(flags.transfer)};
  if (!flags.transfer_profile.empty()) {
    options.profile = load_transfer_profile(flags.transfer_profile);
  }
  if (flags.device == "host") return nullptr;
  options.ordinal = parse_ordinal(flags.device);
  return make_cuda_device(options);
}

}  // namespace sluice::tools
