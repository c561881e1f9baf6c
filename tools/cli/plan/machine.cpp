#include "tools/cli/plan/machine.hpp"

#include <array>
#include <cmath>

#include "cpu/backend/rates.hpp"
#include "cpu/machine/topology.hpp"
#include "cpu/threads/workers.hpp"
#include "sluice/error.hpp"
#include "sluice/page.hpp"
#include "sluice/units.hpp"
#include "tools/cli/text/facts.hpp"
#include "tools/cli/trace/trace.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/json_text.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;

constexpr const char* kKind = "machine";
constexpr int kMachineVersion = 1;
constexpr std::uint64_t kMostBytes = 64 * KiB;
/// The larger, the better a transfer pays; what most policies have at head_dim 128.
constexpr std::uint64_t kPageBytes = 2 * 16 * 128 * 2;

struct RateField {
  const char* key;
  double scheduler::LaneRates::*value;
};
constexpr std::array<RateField, 5> kRates{{{"device_gbps", &scheduler::LaneRates::device_gbps},
                                           {"link_gbps", &scheduler::LaneRates::link_gbps},
                                           {"cpu_gbps", &scheduler::LaneRates::cpu_gbps},
                                           {"launch_us", &scheduler::LaneRates::launch_us},
                                           {"hand_over_us", &scheduler::LaneRates::hand_over_us}}};
struct SizeField {
  const char* key;
  std::uint64_t Machine::*value;
};
constexpr std::array<SizeField, 2> kSizes{
    {{"device_bytes", &Machine::device_bytes}, {"host_bytes", &Machine::host_bytes}}};

double rate_of(const json& document, const char* key) {
  const json& value = document.at(key);
  constexpr double kMost = 1e9;
  if (!value.is_number() || !(value.get<double>() > 0.0 && value.get<double>() <= kMost))
    throw Error(Errc::corrupt, std::string(key) + " is " + shown(value) + "; it must be a number above 0");
  return value.get<double>();
}

std::uint64_t size_of(const json& document, const char* key) {
  const json& value = document.at(key);
  if (!value.is_number_unsigned())
    throw Error(Errc::corrupt, std::string(key) + " is " + shown(value) + "; it must be a whole number of bytes");
  return value.get<std::uint64_t>();
}

Machine read(const json& document) {
  if (!document.is_object() || document.value("kind", json()) != kKind)
    throw Error(Errc::corrupt, "it describes no machine");
  if (const json version = document.value("schema_version", json()); version != kMachineVersion)
    throw Error(Errc::corrupt,
                "schema_version is " + shown(version) + "; " + std::to_string(kMachineVersion) + " is read");
  const std::size_t fields = 3 + kRates.size() + kSizes.size();
  if (document.size() > fields) throw Error(Errc::corrupt, "it has fields that no machine has");
  Machine machine{.name = shortened(document.at("name").get<std::string>())};
  for (const RateField& field : kRates) machine.rates.*field.value = rate_of(document, field.key);
  for (const SizeField& field : kSizes) machine.*field.value = size_of(document, field.key);
  return machine;
}

}  // namespace

Machine this_machine(const Device* device, std::uint32_t threads) {
  Machine machine{.name = device == nullptr ? cpu_model() : device->info().name};
  machine.rates = measured_rates(device, kPageBytes, threads);
  machine.device_bytes = device == nullptr ? 0 : device->info().memory_bytes;
  machine.host_bytes = memory_facts().available;
  return machine;
}

Json to_json(const Machine& machine) {
  Json document{{"kind", kKind}, {"schema_version", kMachineVersion}, {"name", machine.name}};
  for (const RateField& field : kRates) document[field.key] = machine.rates.*field.value;
  for (const SizeField& field : kSizes) document[field.key] = machine.*field.value;
  return document;
}

Machine load_machine(const std::string& path) {
  try {
    return read(parse_json(read_text_file(path, kMostBytes), "JSON"));
  } catch (const Error& error) {
    throw Error(error.code(),
                "machine '" + path + "': " + error.what() + "; `sluice doctor --machine FILE` writes one");
  } catch (const json::exception& error) {
    throw Error(Errc::corrupt,
                "machine '" + path + "': " + error.what() + "; `sluice doctor --machine FILE` writes one");
  }
}

}  // namespace sluice::tools
