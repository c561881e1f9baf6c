#include "tools/cli/plan/machine.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "scheduler/plan/fitted_cost.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"
#include "tools/cli/plan/calibration.hpp"
#include "tools/cli/text/facts.hpp"
#include "tools/cli/trace/trace.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/json_text.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;
using scheduler::StageCost;

constexpr const char* kKind = "machine";
constexpr int kMachineVersion = 1;
constexpr std::uint64_t kMostBytes = 64 * KiB;
constexpr std::uint64_t kMostBatchRows = 4096;
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
const std::array<std::string, kStages> kStageNames = [] {
  std::array<std::string, kStages> names;
  for (std::uint32_t i = 0; i < kStages; ++i) names[i] = to_string(static_cast<Stage>(i));
  return names;
}();
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

StageCost cost_of(const json& document, const std::string& stage) {
  const auto number = [&](const char* key, double most) {
    const json& value = document.at(key);
    if (!value.is_number() || !(value.get<double>() >= 0.0 && value.get<double>() <= most))
      throw Error(Errc::corrupt, stage + ": " + key + " is " + shown(value) + "; it must be a number in [0, " +
                                     std::to_string(static_cast<int>(most)) + "]");
    return value.get<double>();
  };
  const StageCost cost{.fixed_us = number("fixed_us", 1e6), .share = number("share", scheduler::kMostCostShare)};
  if (cost.share == 0.0) throw Error(Errc::corrupt, stage + ": share is 0; it must be above");
  return cost;
}

/// The stages of `document`, which the file calls `where`.
scheduler::StageCosts costs_of(const json& document, const std::string& where) {
  scheduler::StageCosts costs{};
  const auto stages = document.find("stages");
  if (stages == document.end()) return costs;
  if (!stages->is_object()) throw Error(Errc::corrupt, where + " is " + shown(*stages) + "; it must be an object");
  for (const auto& [name, cost] : stages->items()) {
    const auto which = std::ranges::find(kStageNames, name);
    if (which == kStageNames.end()) throw Error(Errc::corrupt, where + ": there is no stage '" + shortened(name) + "'");
    costs[static_cast<std::size_t>(which - kStageNames.begin())] = cost_of(cost, where + ": " + name);
  }
  return costs;
}

/// What kernels take; files without it describe a machine by its rates alone.
void read_costs(const json& document, scheduler::LaneRates& rates) {
  if (const auto forward = document.find("forward_us"); forward != document.end())
    rates.forward_us = forward->is_number() && *forward == 0.0 ? 0.0 : rate_of(document, "forward_us");
  rates.stages = costs_of(document, "stages");
  const auto batch = document.find("batch");
  if (batch == document.end()) return;
  if (!batch->is_object() || batch->size() != 2)
    throw Error(Errc::corrupt, "batch is " + shown(*batch) + "; it must be an object of rows and stages");
  const std::uint64_t rows = size_of(*batch, "rows");
  if (rows < 2 || rows > kMostBatchRows)
    throw Error(Errc::corrupt, "batch: rows is " + std::to_string(rows) + "; it must be a number in [2, " +
                                   std::to_string(kMostBatchRows) + "]");
  rates.batch_rows = static_cast<std::uint32_t>(rows);
  rates.batch = costs_of(*batch, "batch: stages");
}

std::vector<PolicyCosts> policies_of(const json& document) {
  std::vector<PolicyCosts> policies;
  const auto list = document.find("policies");
  if (list == document.end()) return policies;
  if (!list->is_array()) throw Error(Errc::corrupt, "policies is " + shown(*list) + "; it must be an array");
  for (const json& each : *list) {
    if (!each.is_object()) throw Error(Errc::corrupt, "policies has " + shown(each) + "; it must have objects");
    PolicyCosts costs{.policy = each.at("policy").get<std::string>()};
    const std::string where = "policies: " + shortened(costs.policy);
    try {
      (void)parse_policy(costs.policy);
    } catch (const Error& error) {
      throw Error(Errc::corrupt, where + ": " + error.what());
    }
    costs.stages = costs_of(each, where + ": stages");
    const json batch = each.value("batch", json::object());
    if (!batch.is_object()) throw Error(Errc::corrupt, where + ": batch is " + shown(batch) + "; it must be an object");
    costs.batch = costs_of(batch, where + ": batch: stages");
    const json scored = each.value("scored", json(0.0));
    constexpr double kMostScored = 16.0;  // Of the tokens: a policy may look at some more than once.
    if (!scored.is_number() || !(scored.get<double>() >= 0.0 && scored.get<double>() <= kMostScored))
      throw Error(Errc::corrupt, where + ": scored is " + shown(scored) + "; it must be a number in [0, 16]");
    costs.scored = scored.get<double>();
    policies.push_back(std::move(costs));
  }
  return policies;
}

Machine read(const json& document) {
  if (!document.is_object() || document.value("kind", json()) != kKind)
    throw Error(Errc::corrupt, "it describes no machine");
  if (const json version = document.value("schema_version", json()); version != kMachineVersion)
    throw Error(Errc::corrupt,
                "schema_version is " + shown(version) + "; " + std::to_string(kMachineVersion) + " is read");
  const std::size_t fields = 3 + kRates.size() + kSizes.size() + document.count("forward_us") +
                             document.count("stages") + document.count("batch") + document.count("dense") +
                             document.count("policies");
  if (document.size() > fields) throw Error(Errc::corrupt, "it has fields that no machine has");
  Machine machine{.name = shortened(document.at("name").get<std::string>())};
  for (const RateField& field : kRates) machine.rates.*field.value = rate_of(document, field.key);
  for (const SizeField& field : kSizes) machine.*field.value = size_of(document, field.key);
  read_costs(document, machine.rates);
  if (const auto dense = document.find("dense"); dense != document.end()) machine.dense = cost_of(*dense, "dense");
  machine.policies = policies_of(document);
  return machine;
}

}  // namespace

Machine this_machine(std::shared_ptr<Device> device, std::uint32_t threads, Effort effort) {
  Machine machine{.name = device == nullptr ? cpu_model() : device->info().name};
  machine.rates = measured_rates(device.get(), kPageBytes, threads);
  machine.device_bytes = device == nullptr ? 0 : device->info().memory_bytes;
  machine.host_bytes = memory_facts().available;
  calibrate(machine, std::move(device), threads, effort);
  return machine;
}

Json to_json(const Machine& machine) {
  Json document{{"kind", kKind}, {"schema_version", kMachineVersion}, {"name", machine.name}};
  for (const RateField& field : kRates) document[field.key] = machine.rates.*field.value;
  for (const SizeField& field : kSizes) document[field.key] = machine.*field.value;
  document["forward_us"] = machine.rates.forward_us;
  const auto cost_json = [](const StageCost& cost) { return Json{{"fixed_us", cost.fixed_us}, {"share", cost.share}}; };
  document["dense"] = cost_json(machine.dense);
  const auto costs_json = [&](const scheduler::StageCosts& costs) {
    Json stages = Json::object();
    for (std::uint32_t i = 0; i < kStages; ++i) {
      if (const auto& cost = costs[i]) stages[kStageNames[i]] = cost_json(*cost);
    }
    return stages;
  };
  document["stages"] = costs_json(machine.rates.stages);
  if (machine.rates.batch_rows != 0)
    document["batch"] = {{"rows", machine.rates.batch_rows}, {"stages", costs_json(machine.rates.batch)}};
  for (const PolicyCosts& costs : machine.policies) {
    Json entry{{"policy", costs.policy}, {"stages", costs_json(costs.stages)}};
    if (Json batch = costs_json(costs.batch); !batch.empty()) entry["batch"] = {{"stages", std::move(batch)}};
    if (costs.scored != 0.0) entry["scored"] = costs.scored;
    document["policies"].push_back(std::move(entry));
  }
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
