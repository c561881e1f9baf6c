#include "capi/options.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "sluice/page_rules.hpp"

namespace sluice::capi {
namespace {

constexpr const char* kName = "sluice_engine_options";
static_assert(SLUICE_DENSE_AUTO == sluice::kDenseAuto && SLUICE_FETCH_AUTO == sluice::kFetchAuto &&
              SLUICE_ALL_SEQUENCES == sluice::kAllSequences);
static_assert(offsetof(sluice_engine_options, policies) + sizeof(const char*) == sizeof(sluice_engine_options));
static_assert(SLUICE_F32 == static_cast<int>(DType::f32) && SLUICE_BF16 == static_cast<int>(DType::bf16) &&
              SLUICE_FP8_E4M3 == static_cast<int>(DType::fp8_e4m3));

struct Feature {
  std::uint32_t bit;
  bool Bucket::*field;
};
constexpr Feature kFeatures[] = {
    {SLUICE_BUCKET_TOP_K, &Bucket::top_k},         {SLUICE_BUCKET_UNBOUNDED, &Bucket::unbounded},
    {SLUICE_BUCKET_PAGES, &Bucket::pages},         {SLUICE_BUCKET_AUDIT, &Bucket::audit},
    {SLUICE_BUCKET_REHEARSED, &Bucket::rehearsed}, {SLUICE_BUCKET_SCORES, &Bucket::scores}};

[[noreturn]] void refuse(const char* field, std::int64_t value, const char* remedy) {
  throw Error(Errc::invalid_argument,
              std::string(kName) + "." + field + " is " + std::to_string(value) + "; it must be " + remedy);
}

DType dtype_of(std::int32_t value) {
  if (value < SLUICE_F32 || value > SLUICE_FP8_E4M3)
    refuse("kv_dtype", value, "SLUICE_F32, SLUICE_F16, SLUICE_BF16 or SLUICE_FP8_E4M3");
  return static_cast<DType>(value);
}

/// What programs said themselves before version 9, and policies say now.
void require_unused(const sluice_engine_options& options) {
  constexpr const char* kNames[] = {"prompt_queries", "max_picks", "digests", "max_ranked", "max_window"};
  const auto require = [](const char* name, std::uint64_t value) {
    if (value != 0) refuse(name, static_cast<std::int64_t>(value), "0, as policies say it: name them in policies");
  };
  for (std::size_t i = 0; i < std::size(kNames); ++i) require(kNames[i], options.unused_sizes[i]);
  require("max_clusters", options.unused_clusters);
  require("forecasts", options.unused_forecasts);
  require("code_bits", options.unused_code_bits);
}

std::uint32_t digests_of(const std::optional<DigestKind>& kind) noexcept {
  if (!kind) return SLUICE_DIGESTS_NONE;
  return *kind == DigestKind::box ? SLUICE_DIGESTS_BOX : SLUICE_DIGESTS_CUBOID_MEAN;
}

PlacementMode placement_of(std::uint32_t value) {
  switch (value) {
    case SLUICE_PLACE_HYBRID: return PlacementMode::hybrid;
    case SLUICE_PLACE_STREAM: return PlacementMode::stream;
    default: refuse("placement", value, "SLUICE_PLACE_HYBRID or SLUICE_PLACE_STREAM");
  }
}

static_assert(static_cast<int>(Handover::automatic) == SLUICE_HANDOVER_AUTO &&
              static_cast<int>(Handover::device) == SLUICE_HANDOVER_DEVICE &&
              static_cast<int>(Handover::stream) == SLUICE_HANDOVER_STREAM &&
              static_cast<int>(Handover::host) == SLUICE_HANDOVER_HOST);
Handover handover_of(std::uint32_t value) {
  if (value > SLUICE_HANDOVER_HOST)
    refuse("handover", value,
           "SLUICE_HANDOVER_AUTO, SLUICE_HANDOVER_DEVICE, SLUICE_HANDOVER_STREAM or SLUICE_HANDOVER_HOST: begin "
           "with sluice_engine_options_init");
  return static_cast<Handover>(value);
}

PrefillMode mode_of(std::uint32_t value) {
  switch (value) {
    case SLUICE_PREFILL_FULL: return PrefillMode::full;
    case SLUICE_PREFILL_FLEX: return PrefillMode::flexprefill;
    case SLUICE_PREFILL_AUTOMATIC: return PrefillMode::automatic;
    default: refuse("prefill_mode", value, "SLUICE_PREFILL_FULL, SLUICE_PREFILL_FLEX or SLUICE_PREFILL_AUTOMATIC");
  }
}

std::uint32_t mode_of(PrefillMode mode) noexcept {
  switch (mode) {
    case PrefillMode::full: return SLUICE_PREFILL_FULL;
    case PrefillMode::flexprefill: return SLUICE_PREFILL_FLEX;
    case PrefillMode::automatic: return SLUICE_PREFILL_AUTOMATIC;
    case PrefillMode::streaming:
    case PrefillMode::minference: break;  // Baselines, of C++ alone.
  }
  return SLUICE_PREFILL_FULL;
}

Bucket largest_of(const sluice_engine_options& options) {
  Bucket largest{.decode_rows = options.largest_decode_rows,
                 .drafts = std::max(options.largest_drafts, 1u),
                 .prefill_rows = options.largest_prefill_rows,
                 .prefills = options.largest_prefills,
                 .max_tokens = options.largest_max_tokens};
  set_features(options.largest_features, "sluice_engine_options.largest_features", largest);
  return largest;
}

PrefillSpec prefill_of(const sluice_engine_options& options) {
  return {.mode = mode_of(options.prefill_mode),
          .flex = {.gamma = options.prefill_gamma,
                   .tau = options.prefill_tau,
                   .min_budget = options.prefill_min_budget,
                   .max_budget = options.prefill_max_budget,
                   .lines = switch_of(options.prefill_lines, "sluice_engine_options.prefill_lines")}};
}

/// What 32 bits do not hold becomes the largest number that they do, which engines refuse.
std::uint32_t narrowed(std::uint64_t value) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(value, kNone));
}

AttentionShape shape_of(const sluice_engine_options& options) noexcept {
  return {.layers = options.layers,
          .q_heads = options.q_heads,
          .kv_heads = options.kv_heads,
          .head_dim = options.head_dim,
          .value_dim = narrowed(options.value_dim)};
}

/// An array is not read before its count is one that can be: behind its end lies memory of others.
void require_count(const char* field, std::uint64_t count, std::uint64_t most, const char* what) {
  if (count > most)
    refuse(field, static_cast<std::int64_t>(count),
           ("at most " + std::to_string(most) + what + ": begin with sluice_engine_options_init").c_str());
}

std::vector<std::uint32_t> cores_of(const sluice_engine_options& options) {
  if (options.core_count == 0) return {};
  const long processors = ::sysconf(_SC_NPROCESSORS_CONF);
  require_count("core_count", options.core_count, static_cast<std::uint64_t>(std::max(processors, 1L)),
                ", the processors of this machine");
  require_pointer(options.cores, "sluice_engine_options.cores, of which core_count says there are some,");
  return {options.cores, options.cores + options.core_count};
}

std::vector<std::uint32_t> windows_of(const sluice_engine_options& options) {
  if (options.window_count == 0) return {};
  sluice::validate(shape_of(options));  // A number of layers can be wrong, too.
  if (options.window_count != options.layers)
    refuse("window_count", options.window_count, ("0, or that of layers, " + std::to_string(options.layers)).c_str());
  require_pointer(options.windows, "sluice_engine_options.windows, of which window_count says there are some,");
  return {options.windows, options.windows + options.window_count};
}

std::vector<PolicySpec> policies_of(const sluice_engine_options& options) {
  if (options.policy_count == 0) return {};
  constexpr std::uint64_t kMostPolicies = 1024;
  require_count("policy_count", options.policy_count, kMostPolicies, "");
  require_pointer(options.policies, "sluice_engine_options.policies, of which policy_count says there are some,");
  std::vector<PolicySpec> policies;
  for (std::uint64_t i = 0; i < options.policy_count; ++i) {
    require_pointer(options.policies[i], ("sluice_engine_options.policies[" + std::to_string(i) + "]").c_str());
    policies.push_back(parse_policy(options.policies[i]));
  }
  return policies;
}

/// sluice::default_policies(), by their names.
constexpr const char* kPolicies[] = {"sluice"};

}  // namespace

sluice_engine_options default_options() {
  sluice_engine_options options = from_engine(EngineOptions{});
  options.device_type = SLUICE_DEVICE_CPU;
  options.policy_count = std::size(kPolicies);
  options.policies = kPolicies;
  return options;
}

sluice_engine_options read_options(const sluice_engine_options* options) {
  sluice_engine_options read = read_sized(options, kName, default_options());
  // A count without its array, as a caller's struct may end between them, says nothing of the array that is there.
  if (options->struct_size < offsetof(sluice_engine_options, policies) + sizeof(read.policies)) {
    read.policy_count = std::size(kPolicies);
    read.policies = kPolicies;
  }
  return read;
}

EngineOptions to_engine(const sluice_engine_options& options) {
  const std::uint32_t page = options.page_tokens;
  if (page < 8 || page > 256 || (page & (page - 1)) != 0) refuse("page_tokens", page, "a power of two in [8, 256]");
  require_unused(options);
  return {.shape = shape_of(options),
          .scale = options.scale,
          .softcap = options.softcap,
          .windows = windows_of(options),
          .window_slack = narrowed(options.window_slack),
          .page_tokens = page,
          .kv_dtype = dtype_of(options.kv_dtype),
          .host_bytes = options.host_bytes,
          .near_bytes = options.near_bytes,
          .promotions = options.promotions,
          .placement = placement_of(options.placement),
          .fetch_share = options.fetch_share,
          .fetch_lists = narrowed(options.fetch_lists),
          .dense_tokens = options.dense_tokens,
          .policies = policies_of(options),
          .largest = largest_of(options),
          .in_flight = options.in_flight,
          .sequences = options.sequences,
          .cpu_sequences = options.cpu_sequences,
          .policy_bytes = options.policy_bytes,
          .cluster_sequences = options.cluster_sequences,
          .import_rows = options.import_rows,
          .prefill_window = options.prefill_window,
          .prefill = prefill_of(options),
          .prefix_bytes = options.prefix_bytes,
          .prefix_decoded = switch_of(options.prefix_decoded, "sluice_engine_options.prefix_decoded"),
          .threads = options.threads,
          .cores = cores_of(options),
          .pin_threads = switch_of(options.pin_threads, "sluice_engine_options.pin_threads"),
          .handover = handover_of(options.handover),
          .answer_timeout = std::chrono::milliseconds(options.answer_timeout_ms),
          .timeout = std::chrono::milliseconds(options.timeout_ms)};
}

sluice_engine_options from_engine(const EngineOptions& options) {
  sluice_engine_options out{};
  out.struct_size = sizeof out;
  out.kv_dtype = static_cast<std::int32_t>(options.kv_dtype);
  out.layers = options.shape.layers;
  out.q_heads = options.shape.q_heads;
  out.kv_heads = options.shape.kv_heads;
  out.head_dim = options.shape.head_dim;
  out.host_bytes = options.host_bytes;
  out.near_bytes = options.near_bytes;
  out.page_tokens = options.page_tokens;
  out.promotions = options.promotions;
  out.placement = options.placement == PlacementMode::stream ? SLUICE_PLACE_STREAM : SLUICE_PLACE_HYBRID;
  out.prefix_decoded = options.prefix_decoded ? 1 : 0;
  out.prefix_bytes = options.prefix_bytes;
  out.largest_decode_rows = options.largest.decode_rows;
  out.largest_drafts = options.largest.drafts;
  out.largest_prefill_rows = options.largest.prefill_rows;
  out.largest_prefills = options.largest.prefills;
  out.largest_max_tokens = options.largest.max_tokens;
  out.largest_features = features_of(options.largest);
  out.in_flight = options.in_flight;
  out.sequences = options.sequences;
  out.cpu_sequences = options.cpu_sequences;
  out.import_rows = options.import_rows;
  out.prefill_window = options.prefill_window;
  out.prefill_mode = mode_of(options.prefill.mode);
  out.prefill_min_budget = options.prefill.flex.min_budget;
  out.prefill_max_budget = options.prefill.flex.max_budget;
  out.prefill_lines = options.prefill.flex.lines ? 1 : 0;
  out.prefill_gamma = options.prefill.flex.gamma;
  out.prefill_tau = options.prefill.flex.tau;
  out.threads = options.threads;
  out.pin_threads = options.pin_threads ? 1 : 0;
  out.answer_timeout_ms = static_cast<std::uint32_t>(options.answer_timeout.count());
  out.timeout_ms = static_cast<std::uint32_t>(options.timeout.count());
  out.policy_bytes = options.policy_bytes;
  out.core_count = static_cast<std::uint32_t>(options.cores.size());
  out.cores = options.cores.empty() ? nullptr : options.cores.data();
  out.scale = options.scale;
  out.softcap = options.softcap;
  out.window_count = static_cast<std::uint32_t>(options.windows.size());
  out.windows = options.windows.empty() ? nullptr : options.windows.data();
  out.window_slack = options.window_slack;
  out.fetch_share = options.fetch_share;
  out.fetch_lists = options.fetch_lists;
  out.value_dim = options.shape.value_dim;
  out.cluster_sequences = options.cluster_sequences;
  out.dense_tokens = options.dense_tokens;
  out.handover = static_cast<std::uint32_t>(options.handover);
  return out;
}

sluice_engine_sizes from_sizes(const EngineSizes& sizes) noexcept {
  return {.struct_size = sizeof(sluice_engine_sizes),
          .prompt_queries = sizes.prompt_queries,
          .max_picks = sizes.max_picks,
          .digests = digests_of(sizes.digests),
          .max_ranked = sizes.max_ranked,
          .max_window = sizes.max_window,
          .max_clusters = sizes.max_clusters,
          .code_bits = sizes.code_bits,
          .forecasts = sizes.forecasts ? 1u : 0u,
          .cpu_sequences = sizes.cpu_sequences,
          .cluster_sequences = sizes.cluster_sequences};
}

std::uint32_t features_of(const Bucket& bucket) noexcept {
  std::uint32_t features = 0;
  for (const Feature& feature : kFeatures) features |= bucket.*feature.field ? feature.bit : 0;
  return features;
}

void set_features(std::uint32_t features, const char* name, Bucket& bucket) {
  std::uint32_t unknown = features;
  for (const Feature& feature : kFeatures) {
    bucket.*feature.field = (features & feature.bit) != 0;
    unknown &= ~feature.bit;
  }
  require(unknown == 0, std::string(name) + " is " + std::to_string(features) +
                            ", which has a bit that this library does not know; make it of SLUICE_BUCKET_* alone");
}

bool switch_of(std::uint32_t value, const char* name) {
  require(value <= 1, std::string(name) + " is " + std::to_string(value) + "; it must be 0 or 1");
  return value == 1;
}

}  // namespace sluice::capi

using namespace sluice;

sluice_status sluice_engine_options_init(sluice_engine_options* options, size_t struct_size) {
  return capi::guarded([&] { capi::init_sized(options, struct_size, capi::default_options(), capi::kName); });
}

sluice_status sluice_engine_options_resolve(sluice_engine_options* options) {
  return capi::guarded([&] {
    const sluice_engine_options given = capi::read_options(options);
    const EngineOptions found = resolved(capi::to_engine(given));
    sluice_engine_options out = capi::from_engine(found);
    out.device_type = given.device_type;
    out.device_id = given.device_id;
    out.device_bytes = given.device_bytes;
    out.cores = given.cores;
    out.windows = given.windows;
    out.policy_count = given.policy_count;
    out.policies = given.policies;
    capi::write_sized(out, options, capi::kName);
  });
}
