#include "tools/cli/link/transfer_profile.hpp"

#include <cmath>
#include <limits>
#include <utility>

#include "sluice/error.hpp"
#include "tools/cli/text/output.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/json_text.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;

constexpr const char* kKind = "transfer_profile";
/// Of these files; since 2 every sample says whether the device was busy.
constexpr int kProfileVersion = 2;
constexpr std::uint32_t kMostGatherBlocks = 65'535;
/// Of a file and its samples; a calibration writes some hundreds. A path is chosen among all of them.
constexpr std::uint64_t kMostBytes = 16 * MiB;
constexpr std::size_t kMostSamples = 16'384;

[[noreturn]] void refuse(const std::string& path, const std::string& cause) {
  throw Error(Errc::corrupt,
              "transfer profile '" + path + "': " + cause + "; write it anew by `sluice link --save-profile`");
}

json parse(const std::string& path) {
  json document;
  try {
    document = parse_json(read_text_file(path, kMostBytes), "JSON");
  } catch (const Error& error) {
    if (error.code() == Errc::corrupt) refuse(path, error.what());
    throw Error(error.code(),
                "transfer profile '" + path + "': " + error.what() + ", or write one by `sluice link --save-profile`");
  }
  if (!document.is_object() || document.value("kind", json()) != kKind) refuse(path, "is no transfer profile");
  const json version = document.value("schema_version", json());
  if (version != kProfileVersion)
    refuse(path, "has schema_version " + shown(version) + " where " + std::to_string(kProfileVersion) + " is read" +
                     (version == 1 ? ", which tells a busy device from an idle one" : ""));
  return document;
}

template <class T>
T whole_number(const json& object, const char* key) {
  const json& value = object.at(key);
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() == 0 ||
      value.get<std::uint64_t>() > std::numeric_limits<T>::max())
    throw Error(Errc::corrupt, std::string(key) + " is no whole number above 0");
  return value.get<T>();
}

double microseconds(const json& object, const char* key) {
  const json& value = object.at(key);
  if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0.0)
    throw Error(Errc::corrupt, std::string(key) + " is no time");
  if (value.get<double>() > kMostTransfer_us)
    throw Error(Errc::corrupt, std::string(key) + " is too long for a transfer");
  return value.get<double>();
}

std::uint32_t thread_blocks(const json& object, const char* key) {
  const auto blocks = whole_number<std::uint32_t>(object, key);
  if (blocks > kMostGatherBlocks) throw Error(Errc::corrupt, std::string(key) + " is too large");
  return blocks;
}

TransferLoad load_of(const json& object) {
  const auto text = object.at("load").get<std::string>();
  for (const TransferLoad load : {TransferLoad::idle, TransferLoad::busy}) {
    if (text == to_string(load)) return load;
  }
  throw Error(Errc::corrupt, "load is neither idle nor busy");
}

TransferSample sample_of(const json& object) {
  const auto direction = object.at("direction").get<std::string>();
  if (direction != "h2d" && direction != "d2h") throw Error(Errc::corrupt, "direction is neither h2d nor d2h");
  TransferSample sample{.path = parse_transfer_path(shortened(object.at("path").get<std::string>())),
                        .load = load_of(object),
                        .to_device = direction == "h2d",
                        .block_bytes = whole_number<std::uint64_t>(object, "block_bytes"),
                        .blocks = whole_number<std::uint32_t>(object, "blocks"),
                        .host_us = microseconds(object, "host_us"),
                        .device_us = microseconds(object, "device_us")};
  if (sample.path == TransferPath::automatic) throw Error(Errc::corrupt, "'auto' is no path of its own");
  if (sample.device_us == 0.0) throw Error(Errc::corrupt, "device_us is 0");
  return sample;
}

CudaDeviceFacts facts_of(const json& document) {
  CudaDeviceFacts facts;
  const auto text = [&](const char* key) {
    const auto at = document.find(key);
    return at != document.end() && at->is_string() ? at->get<std::string>() : std::string{};
  };
  facts.name = text("device");
  facts.pci_bus_id = text("pci_bus_id");
  const auto driver = document.find("cuda_driver");
  if (driver != document.end() && driver->is_number_integer()) facts.driver = driver->get<int>();
  return facts;
}

}  // namespace

std::shared_ptr<const TransferProfile> load_transfer_profile(const std::string& path) {
  return load_measured_profile(path).profile;
}

MeasuredProfile load_measured_profile(const std::string& path) {
  const json document = parse(path);
  auto profile = std::make_shared<TransferProfile>();
  std::size_t index = 0;
  try {
    profile->gather_blocks = thread_blocks(document, "gather_blocks");
    profile->busy_gather_blocks = thread_blocks(document, "busy_gather_blocks");
    const json& samples = document.at("samples");
    if (!samples.is_array() || samples.size() > kMostSamples)
      throw Error(Errc::corrupt, "samples is no list of at most " + std::to_string(kMostSamples));
    for (const json& object : samples) {
      ++index;
      profile->samples.push_back(sample_of(object));
    }
  } catch (const Error& error) {
    refuse(path, (index == 0 ? "" : "sample " + std::to_string(index) + ": ") + error.what());
  } catch (const json::exception& error) {
    refuse(path, (index == 0 ? "" : "sample " + std::to_string(index) + ": ") + error.what());
  }
  if (profile->samples.empty()) refuse(path, "has no samples");
  return {.profile = std::move(profile), .facts = facts_of(document)};
}

void save_transfer_profile(const TransferProfile& profile, const CudaDeviceFacts& facts, const std::string& path) {
  Json samples = Json::array();
  for (const TransferSample& sample : profile.samples) {
    samples.push_back({{"path", to_string(sample.path)},
                       {"load", to_string(sample.load)},
                       {"direction", sample.to_device ? "h2d" : "d2h"},
                       {"block_bytes", sample.block_bytes},
                       {"blocks", sample.blocks},
                       {"host_us", sample.host_us},
                       {"device_us", sample.device_us}});
  }
  const Json document = {{"schema_version", kProfileVersion},
                         {"kind", kKind},
                         {"device", facts.name},
                         {"pci_bus_id", facts.pci_bus_id},
                         {"cuda_driver", facts.driver},
                         {"gather_blocks", profile.gather_blocks},
                         {"busy_gather_blocks", profile.busy_gather_blocks},
                         {"samples", std::move(samples)}};
  OutputTarget(path).commit(document.dump(1) + "\n");
}

}  // namespace sluice::tools
