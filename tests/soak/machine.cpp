#include "tests/soak/machine.hpp"

#include <algorithm>
#include <iterator>

#include "scheduler/plan/forward_rows.hpp"
#include "scheduler/plan/layer_stacks.hpp"
#include "sluice/error.hpp"
#include "sluice/page_rules.hpp"
#include "sluice/step/forward.hpp"
#include "tests/soak/expect.hpp"
#include "tests/soak/traffic.hpp"
#include "tests/support/engine_named.hpp"

namespace sluice::test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::uint64_t kAttempts = 100;

constexpr MachineKind kKinds[] = {
    {.name = "at-once", .number = 1, .at_once = true},
    {.name = "plain", .number = 2},
    {.name = "crowded", .number = 4, .crowded = true},
    {.name = "prompts", .number = 5, .prompts = true},
    {.name = "audited", .number = 6, .audits = true},
    {.name = "stalled", .number = 7, .stalls = true},
    {.name = "stalled-at-once", .number = 8, .at_once = true, .crowded = true, .stalls = true},
    {.name = "deep", .number = 9, .stalls = true, .deep = true},
    {.name = "broken", .number = 11, .breaks = true},
    {.name = "refusing", .number = 17, .refuses = true},
    {.name = "learning", .number = 12, .stalls = true, .learns = true},
    {.name = "starved", .number = 16, .learns = true, .starves = true},
    {.name = "windows", .number = 13, .windows = true},
    {.name = "windows-late", .number = 14, .stalls = true, .deep = true, .windows = true},
    {.name = "windows-crowded", .number = 15, .crowded = true, .windows = true},
    {.name = "kept", .number = 10, .kept = true},
};

/// Policies that attend every token.
constexpr const char* kDense[] = {"full", "full | near=0,sinks=4,recent=20", "topk:budget=100%", "exact | top_k=all"};

/// Beside the presets.
constexpr const char* kCompositions[] = {
    "pages:box | progressive=0.8,microbatch=2 | near=0,sinks=4,recent=20",
    "pages:box | progressive=0.9,microbatch=1,rule=certified | near=0,sinks=0,recent=0 | dense=0,every=2",
    "pages | progressive=0.7,microbatch=3,rule=median | near=0,sinks=4,recent=20",
    "pages:box,pages=4 | int4 | top_p=0.9 | near=0,sinks=4,recent=0",
    "exact | int4 | top_p=0.7 | near=0,sinks=3,recent=9",
    "exact | int4 | top_k=24 | near=0,sinks=3,recent=9 | dense=1",
    "clusters:recluster=64,least=64,size=4 | fitted=0.8 | near=0,sinks=3,recent=18",
    "clusters:recluster=64,least=64,size=8,candidates=64+history:observe_every=4 | top_k=48 | near=0,sinks=4,recent=16",
    "clusters:recluster=64,least=64,size=8,candidates=64+lsh:bits=4,tables=20 | top_k=48 | near=0,sinks=4,recent=16",
    "lsh:bits=5,tables=30 | sampled | near=0,sinks=4,recent=64 | dense=0,every=2",
    "labels:channels=4,budget=24 | top_k=max(1, 100%) | near=0,sinks=4,recent=9",
    "snapshot:budget=40,window=8,pyramid=3,floor=20% | top_k=all | near=0,sinks=0,recent=0",
    "exact | verified=0.2,heavy=16 | near=0,sinks=4,recent=20",
    "exact | hadamard | top_k=24 | near=0,sinks=4,recent=9 | dense=1",
    "history+pages | top_k=32 | near=0,sinks=4,recent=16",
    "history:share_group=on+pages | top_p=0.9 | near=0,sinks=4,recent=16",
    "history | top_k=24 | near=0,sinks=4,recent=16 | bypass=sink:0.85",
    "history:local=2 | top_k=8 | near=0,sinks=1,recent=4",
    "none | near=0,sinks=4,recent=40"};

/// Every fourth round nothing goes wrong, every fourth things are late, else a little.
cpu::FaultOptions faults_of(std::uint64_t seed) {
  const std::uint64_t kind = seed % 4;
  if (kind == 0) return {};
  return {.seed = seed, .max_delay = microseconds(kind == 1 ? 200 : 20), .reorder_copies = true};
}

template <class T, std::size_t kCount>
T one_of(Random& random, const T (&all)[kCount]) {
  return all[random.below(kCount)];
}

/// Options that serve as many of the policies as go together, and which those are.
EngineOptions options_for(const MachineKind& kind, EngineOptions options, std::vector<std::string>& policies) {
  policies.clear();
  const auto serve = [&](const std::string& policy) {
    if (kind.learns && !scheduler::remembers(parse_policy(policy))) return;
    options.policies.push_back(parse_policy(policy));
    try {
      (void)resolved(options);
      policies.push_back(policy);
    } catch (const Error& error) {
      if (error.code() != Errc::unsupported) throw;
      options.policies.pop_back();
    }
  };
  // Dense ones more often: their outputs are known.
  for (int twice = 0; twice < 2; ++twice) {
    for (const char* const policy : kDense) serve(policy);
  }
  for (const PolicyPreset& preset : policy_presets()) {
    if (!kind.learns) serve(preset.spec.name);  // Those that learn attend nearly all of so few tokens.
  }
  for (const char* const policy : kCompositions) serve(policy);
  return options;
}

EngineOptions options_of(const MachineKind& kind, const Terrain& terrain, std::uint64_t seed,
                         std::vector<std::string>& policies) {
  Random random(seed);
  EngineOptions options{.shape = terrain.shape, .page_tokens = one_of(random, {8u, 16u, 16u, 32u, 64u})};
  options.kv_dtype = terrain.kv_dtypes[random.below(static_cast<std::uint32_t>(terrain.kv_dtypes.size()))];
  options.largest = {.drafts = one_of(random, {1u, 1u, 2u, 3u, 4u}), .prefill_rows = 8 + random.below(150)};
  options.largest.decode_rows = options.largest.drafts * (1 + random.below(10 / options.largest.drafts));
  options.largest.prefills = 1 + random.below(std::min(options.largest.prefill_rows, 4u));
  options.largest.audit = kind.audits;
  options.in_flight = kind.deep ? kMostForwards : 1 + random.below(4);
  options.sequences = 2 + random.below(6);
  options.cpu_sequences = kind.learns ? options.sequences : 1 + random.below(options.sequences);
  options.import_rows = 16 + random.below(200);
  options.prefill_window = std::max(options.page_tokens * one_of(random, {1u, 4u, 64u}), terrain.least_window);
  options = named(options, {kManyTokens, many_pages(one_of(random, {DigestKind::box, DigestKind::cuboid_mean}))});
  options.promotions = one_of(random, {0u, 8u, 64u, 256u, kMostPromotions});
  const std::uint64_t block = block_bytes(options);
  const std::uint64_t most = div_up(kSoakTokens, options.page_tokens);
  const std::uint64_t wanted = options.sequences * most + 1;
  options.host_bytes = block * (kind.crowded ? most + most / 2 : wanted);
  options.near_bytes = block * one_of(random, {std::uint64_t{0}, std::uint64_t{3}, most / 2 + 1, wanted});
  if (kind.windows) {
    const std::uint32_t window = one_of(random, {1u, 5u, 17u, 40u, 130u});
    const std::uint32_t other = one_of(random, {0u, window, 9u});
    options.windows = {random.below(2) == 0 ? 0 : window, other, window};
    options.window_slack = kSoakSlack;
    const scheduler::LayerStacks stacks(options);
    const std::uint64_t whole = stacks.blocks(most);
    options.host_bytes = block / terrain.shape.layers * stacks.layers() *
                         (kind.crowded ? whole + whole / 2 : options.sequences * stacks.count() * most + 8);
  }
  options.threads = 1 + random.below(3);
  options.pin_threads = false;
  options.answer_timeout = kind.stalls ? terrain.short_timeout : kSoakTimeout;
  options.timeout = kSoakTimeout;
  if (kind.prompts) {
    options.prefill = {.mode = one_of(random, {PrefillMode::flexprefill, PrefillMode::automatic}),
                       .flex = {.gamma = one_of(random, {0.5f, 0.7f, 0.95f}), .min_budget = 128}};
  }
  options.placement = one_of(random, {PlacementMode::hybrid, PlacementMode::hybrid, PlacementMode::stream});
  if (options.placement == PlacementMode::hybrid) options.fetch_share = one_of(random, {0.f, 0.f, 0.4f, 1.f});
  return options_for(kind, options, policies);
}

}  // namespace

std::span<const MachineKind> machine_kinds() { return kKinds; }

Machine::Machine(const MachineKind& kind, World& world, std::shared_ptr<Faults> faults, const Pool& pool)
    : kind_(kind), world_(world), pool_(pool), faults_(std::move(faults)) {}

Machine::~Machine() { destroy(); }

void Machine::destroy() {
  faults_->stop();
  alone_.reset();
  engine_.reset();
  ground_.reset();
}

std::uint64_t Machine::build(std::uint64_t seed) {
  EngineOptions options = options_of(kind_, world_.terrain(), seed, policies_);
  options.before_answer = [faults = faults_] { faults->answer(); };
  ground_ = world_.ground({.at_once = kind_.at_once, .breaks = kind_.breaks, .refuses = kind_.refuses});
  std::uint64_t failed = 0;
  for (std::uint64_t attempt = 0; !engine_; ++attempt) {
    // What an engine is built from may fail; without faults it must not.
    const double chance = attempt < kAttempts && seed % 4 > 1 ? 0.1 : 0.0;
    ground_->inject(
        {.seed = seed + attempt, .fail_copy = chance, .fail_allocation = chance, .fail_registration = chance});
    try {
      engine_ = std::make_unique<Engine>(options, ground_->device());
    } catch (const Error& error) {
      if (chance == 0.0 || (error.code() != Errc::device && error.code() != Errc::out_of_capacity)) throw;
      ++failed;
    }
  }
  ground_->inject({});
  return failed;
}

void Machine::make_trouble(Random& random) {
  if (kind_.stalls) faults_->stall(random.below(40), engine_->options().answer_timeout * 3 / 2);
  if (kind_.starves) faults_->starve_answers(random.below(20), random.below(3));
  if (!kind_.breaks && !kind_.refuses) return;
  if (random.below(2) == 0) return faults_->break_one(random.below(20));
  faults_->starve_apply(random.below(4));
}

RoundStats Machine::run(std::uint64_t seed, std::uint64_t kept_seed, std::uint64_t turns) {
  RoundStats stats;
  if (!engine_) stats.unbuilt = build(kind_.kept ? kept_seed : seed);
  const cpu::FaultOptions faults = faults_of(seed);
  ground_->inject(faults);
  faults_->begin(seed, faults.max_delay * 2);
  Random random(seed + 1);
  Driven driven{.engine = *engine_,
                .pool = pool_,
                .ground = *ground_,
                .policies = policies_,
                .seed = seed,
                .turns = turns,
                .longest_delay = faults.max_delay,
                .compare_alone = [&](const Sequence& sequence) {
                  if (!alone_) alone_ = std::make_unique<Alone>(engine_->options(), pool_, world_);
                  alone_->compare(sequence, stats);
                }};
  if (kind_.stalls || kind_.breaks || kind_.refuses || kind_.starves) driven.trouble = [&] { make_trouble(random); };
  if (kind_.starves || ground_->refuses()) driven.calm = [this] { faults_->stop(); };
  {
    Traffic traffic(driven);
    traffic.run();
    ground_->inject({});
    faults_->stop();
    traffic.leave();
    stats.add(traffic.stats());
  }
  require(engine_->memory().far_pages_used == 0, "without sequences blocks are held");
  if (!kind_.kept) destroy();
  return stats;
}

}  // namespace sluice::test
