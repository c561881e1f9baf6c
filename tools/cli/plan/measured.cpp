#include "tools/cli/plan/measured.hpp"

#include <algorithm>

#include "scheduler/plan/fetch_advice.hpp"
#include "sluice/error.hpp"
#include "tools/cli/bench/gpu_cases.hpp"
#include "tools/cli/bench/shapes.hpp"
#include "tools/cli/engine_flags.hpp"
#include "tools/cli/far_flag.hpp"
#include "tools/cli/near_share.hpp"
#include "tools/cli/plan/case_times.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/json_text.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;

/// What is not there is not a number, which `at` and `get` refuse.
double share_of(const json& row, const char* key) { return row.at(key).get<double>(); }

Measured read_row(const json& config, const json& row) {
  Measured measured;
  measured.policy = row.at("method").get<std::string>();
  Workload& work = measured.work;
  work.shape = named_shape(config.at("shape").get<std::string>());
  work.shape.layers = config.at("layers").get<std::uint32_t>();
  work.kv_dtype = parse_kv_dtype(config.at("kv_dtype").get<std::string>(), "kv_dtype");
  work.policy = parse_policy(measured.policy);
  work.policy.dense_layers = work.policy.dense_every = 0;  // As it was timed.
  work.policy.rehearsed = false;
  const Json& near_share = config.at("near");
  work.near_share =
      near_share.is_null() ? usual_near_share(row.at("length_tokens").get<std::uint32_t>()) : near_share.get<double>();
  place(row.at("placement").get<std::string>(), work);
  const Json fetch_share = config.value("fetch_share", Json(0.f));
  if (work.placement == PlacementMode::hybrid && fetch_share.is_number()) work.fetch_share = fetch_share.get<float>();
  work.page_tokens = work.policy.page_tokens == 0 ? kGpuPageTokens : work.policy.page_tokens;
  work.rows = row.at("rows").get<std::uint32_t>();
  work.tokens = row.at("length_tokens").get<std::uint32_t>() + config.at("warm_up").get<std::uint32_t>() +
                config.at("steps").get<std::uint32_t>() / 2;
  const double near = share_of(row, "near_share");
  if (fetch_share.is_string() && work.rows * work.shape.kv_heads >= scheduler::kFetchLists) {  // What it came to.
    const double fetched = share_of(row, "fetched_share"), far = fetched + share_of(row, "far_share");
    work.fetch_share = far == 0.0 ? 0.f : static_cast<float>(fetched / far);
  }
  work.attended = near + share_of(row, "far_share") + share_of(row, "fetched_share");
  work.attended_known = true;
  work.near_hits = work.attended == 0.0 ? 1.0 : near / work.attended;
  const bool links = work.placement == PlacementMode::hybrid && work.fetch_share == 0.f && work.attended != 0.0;
  if (links) work.linked = share_of(row, "fetched_share") / work.attended;
  work.promoted = share_of(row, "promoted") / work.rows;
  work.scored = scored_share(work.policy, row.value("scored_share", 0.0));
  measured.layer_us = share_of(row, "layer_us");
  measured.dense_us = share_of(row, "dense_us");
  return measured;
}

std::vector<Measured> read(const json& report) {
  const json& rows = report.at("results").at("attention");
  const auto replayed = [](const json& row) { return row.value("mode", json()) == "graph"; };
  const bool graphs = std::ranges::any_of(rows, replayed);
  std::vector<Measured> measured;
  for (const json& row : rows) {
    if (row.at("mode").is_null() || (graphs && !replayed(row))) continue;  // Dense attention is in the others' rows.
    measured.push_back(read_row(report.at("config"), row));
  }
  if (measured.empty()) throw Error(Errc::corrupt, "it has no forwards");
  return measured;
}

}  // namespace

std::vector<Measured> load_measured(const std::string& path) {
  const auto refused = [&](const char* cause) {
    return Error(Errc::corrupt, "measured '" + path + "': " + cause +
                                    "; `sluice bench gpu --sections attention -o json --output FILE` writes one");
  };
  const std::string text = read_text_file(path);
  try {
    return read(parse_json(text, "JSON"));
  } catch (const Error& error) {
    throw refused(error.what());
  } catch (const json::exception& error) {
    throw refused(error.what());
  }
}

}  // namespace sluice::tools
