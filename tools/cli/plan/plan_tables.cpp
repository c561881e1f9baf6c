#include "tools/cli/plan/plan_tables.hpp"

#include "tools/cli/far_flag.hpp"

namespace sluice::tools {

Table plan_table() {
  return {.key = "plan",
          .title =
              "Decoding, attention alone, as the engine plans it (model: with its weights, read once; dense: its "
              "reads, everything in device memory; near hits: of what is attended, measured of structured attention, a "
              "guess, or what there is room for; --near-hits to change)",
          .columns = {{"policy", "policy"},
                      {"placement", "placement"},
                      {"length_tokens", "length"},
                      {"rows", "rows"},
                      {"token_ms", "ms/token", 2},
                      {"model_ms", "model ms", 2},
                      {"layer_us", "us/layer", 1},
                      {"near_hits", "near hits", 0, Column::Show::percent},
                      {"near_hits_from", "hits from"},
                      {"far_budget_tokens", "far budget"},
                      {"bottleneck", "busiest"},
                      {"device_us", "device", 1},
                      {"link_us", "link", 1},
                      {"cpu_us", "cpu", 1},
                      {"speedup_over_dense", "x dense", 2},
                      {"host_bytes", "host B"},
                      {"device_bytes", "device B"},
                      {"fits", "fits"},
                      {"most_rows", "most rows"},
                      {"most_tokens", "most tokens"}}};
}

Table memory_table() {
  using Show = Column::Show;
  return {.key = "memory",
          .title = "Memory of such an engine beside keys and values, as a share of them (policy: the most it may keep)",
          .columns = {{"policy", "policy"},
                      {"placement", "placement"},
                      {"length_tokens", "length"},
                      {"rows", "rows"},
                      {"kv_bytes", "K and V, B"},
                      {"near_share", "near rows", 1, Show::percent},
                      {"codes_share", "copies of keys", 1, Show::percent},
                      {"digests_share", "digests", 1, Show::percent},
                      {"buffers_share", "buffers", 1, Show::percent},
                      {"pinned_share", "host: pinned", 1, Show::percent},
                      {"policies_share", "host: policy", 1, Show::percent}}};
}

std::vector<Json> memory_row(const std::string& name, const Workload& work, const EngineMemoryUse& memory) {
  const auto share = [&](std::uint64_t bytes) {
    return memory.far_pages == 0 ? Json() : Json(static_cast<double>(bytes) / static_cast<double>(memory.far_pages));
  };
  return {name,
          placement_of(work),
          work.tokens,
          work.rows,
          memory.far_pages,
          share(memory.near_pages),
          share(memory.codes),
          share(memory.digests),
          share(memory.buffers),
          share(memory.pinned),
          share(memory.policies)};
}

std::vector<Json> plan_row(const PlanName& name, const Workload& work, const Machine& machine, std::uint64_t reserved,
                           const WorkloadPlan& found) {
  const auto busy = [&](Lane lane) { return found.busy_us[static_cast<std::size_t>(lane)] / work.shape.layers; };
  return {name.policy,
          placement_of(work),
          work.tokens,
          work.rows,
          1e-3 * found.forward_us,
          1e-3 * found.model_us,
          found.forward_us / work.shape.layers,
          work.near_hits,
          name.hits_from,
          far_budget(work.policy, work.shape, work.tokens),
          to_string(found.bottleneck),
          busy(Lane::device),
          busy(Lane::link),
          busy(Lane::cpu),
          found.dense_us / found.forward_us,
          found.memory.host(),
          found.memory.device(),
          found.fits,
          most_rows(work, machine, reserved),
          most_tokens(work, machine, reserved)};
}

Table compared_table() {
  using Show = Column::Show;
  return {.key = "compared",
          .title = "Planned and measured (layer: planned / measured; dense: likewise)",
          .columns = {{"policy", "policy"},
                      {"placement", "placement"},
                      {"kv_dtype", "kv_dtype"},
                      {"length_tokens", "length"},
                      {"rows", "rows"},
                      {"layers", "layers"},
                      {"measured_us", "measured us/layer", 1},
                      {"planned_us", "planned", 1},
                      {"ratio", "ratio", 2},
                      {"within_20_percent", "within 20%"},
                      {"bottleneck", "busiest"},
                      {"dense_measured_us", "dense us", 1},
                      {"dense_ratio", "ratio", 2},
                      {"near_hits", "near", 1, Show::percent},
                      {"attended", "attended", 2, Show::percent}}};
}

std::vector<Json> compared_row(const Measured& measured, const WorkloadPlan& found) {
  constexpr double kFar = 0.2;
  const Workload& work = measured.work;
  const double planned = found.forward_us / work.shape.layers;
  const double ratio = planned / measured.layer_us;
  return {measured.policy,
          placement_of(work),
          to_string(work.kv_dtype),
          work.tokens,
          work.rows,
          work.shape.layers,
          measured.layer_us,
          planned,
          ratio,
          ratio >= 1.0 - kFar && ratio <= 1.0 + kFar,
          to_string(found.bottleneck),
          measured.dense_us,
          found.dense_us / work.shape.layers / measured.dense_us,
          work.near_hits,
          work.attended};
}

}  // namespace sluice::tools
