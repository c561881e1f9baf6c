#include "tools/cli/device_flags.hpp"

#include <limits>
#include <optional>
#include <string_view>

#include <CLI/CLI.hpp>

#include "scheduler/numbers.hpp"
#include "sluice/error.hpp"
#include "tools/cli/link/profile_cache.hpp"
#include "tools/cli/link/transfer_profile.hpp"
#include "tools/cli/text/message.hpp"
#include "tools/link/calibrate_transfers.hpp"

namespace sluice::tools {
namespace {

int parse_ordinal(const std::string& text) {
  if (text == "cuda") return 0;
  const std::optional<std::uint64_t> ordinal =
      text.starts_with("cuda:") ? scheduler::read_whole(std::string_view(text).substr(5)) : std::nullopt;
  if (!ordinal || *ordinal > std::uint64_t{std::numeric_limits<int>::max()}) {
    throw Error(Errc::invalid_argument, "--device: '" + text + "' is no device; have host, cuda, cuda:N");
  }
  return static_cast<int>(*ordinal);
}

/// The GPU's profile from the user's cache, or measured now. Null, with a warning, if it cannot be measured.
std::shared_ptr<const TransferProfile> kept_profile(int ordinal) {
  const CudaDeviceFacts facts = cuda_device_facts(ordinal);
  const auto measure = [&] {
    const std::shared_ptr<Device> bench = make_cuda_device({.ordinal = ordinal});
    say("measuring the link of " + facts.name + ", once, for one or two seconds");
    return calibrate_transfers(*bench);
  };
  try {
    return cached_profile(cache_directory(), facts, measure, say);
  } catch (const Error& error) {
    if (error.code() == Errc::unsupported) throw;
    say(std::string("warning: the link cannot be measured, built-in crossovers are used: ") + error.what());
    return nullptr;
  }
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
                 "Crossovers of the transfer paths: auto measures this GPU once and keeps them, none are those built "
                 "in, FILE is of `sluice link --save-profile`")
      ->type_name("auto|none|FILE")
      ->capture_default_str();
  add_count(app, "--link-rows", flags.link_rows,
            "Far rows of a layer, at most, that the device attends itself, over the link, rather than ask the CPU; 0: "
            "none (CUDA device)",
            {.most = 65'536});
}

std::shared_ptr<Device> make_device(const DeviceFlags& flags) {
  CudaDeviceOptions options{.transfer = parse_transfer_path(flags.transfer), .link_rows = flags.link_rows};
  const bool keeps = flags.transfer_profile == "auto";
  if (!keeps && flags.transfer_profile != "none") options.profile = load_transfer_profile(flags.transfer_profile);
  if (flags.device == "host") return nullptr;
  options.ordinal = parse_ordinal(flags.device);
  if (keeps && options.transfer == TransferPath::automatic) options.profile = kept_profile(options.ordinal);
  return make_cuda_device(options);
}

}  // namespace sluice::tools
