#include "tests/soak/machine.hpp"

#include "tests/soak/traffic.hpp"

namespace sluice::test {
namespace {

constexpr std::uint32_t kMostSequences = 4;

constexpr MachineKind kKinds[] = {
    {.name = "embedded", .number = 1, .embedded = true},
    {.name = "shared", .number = 2},
    {.name = "shared-ordered", .number = 3, .ordered = true},
    {.name = "separate", .number = 4, .separate_memory = true},
    {.name = "separate-ordered", .number = 5, .separate_memory = true, .ordered = true},
    {.name = "stream", .number = 6, .separate_memory = true, .placement = PlacementMode::stream},
    {.name = "stream-ordered",
     .number = 7,
     .separate_memory = true,
     .ordered = true,
     .placement = PlacementMode::stream},
    {.name = "near", .number = 8, .separate_memory = true, .placement = PlacementMode::near, .near_pages = 2000},
    {.name = "near-ordered",
     .number = 9,
     .separate_memory = true,
     .ordered = true,
     .placement = PlacementMode::near,
     .near_pages = 2000},
    {.name = "automatic", .number = 10, .separate_memory = true, .placement = PlacementMode::automatic},
    {.name = "audited", .number = 11, .separate_memory = true, .audit_every = 3},
};

RuntimeOptions options_of(const MachineKind& kind) {
  RuntimeOptions options = toy_options(kSoakShape, (kMostSequences + 1) * kSoakTokens);
  options.placement = kind.placement;
  options.near_bytes = kind.near_pages * options.layout().page_bytes();
  options.audit_every = kind.audit_every;
  options.timeout = kSoakTimeout;
  return options;
}

/// Every fourth round nothing goes wrong, every fourth things are late and out of order, else calls fail, too.
cpu::Misbehaviour misbehaviour_of(std::uint64_t seed) {
  const std::uint64_t kind = seed % 4;
  if (kind == 0) return {};
  return {.seed = seed,
          .max_delay = std::chrono::microseconds(kind == 1 ? 200 : 20),
          .reorder_copies = true,
          .fail_copy = kind == 1 ? 0.0 : 0.02,
          .fail_verb = kind == 1 ? 0.0 : 0.005};
}

void require(bool holds, const std::string& what) {
  if (!holds) throw Failure(what);
}

void require_empty(const Runtime& runtime) {
  const RuntimeInfo info = runtime.info();
  require(info.host_pages_free == info.host_pages, "without sequences " + std::to_string(info.host_pages_free) +
                                                       " of " + std::to_string(info.host_pages) +
                                                       " host pages are free");
  require(info.near_slots_free == info.near_slots, "without sequences " + std::to_string(info.near_slots_free) +
                                                       " of " + std::to_string(info.near_slots) +
                                                       " near slots are free");
  const Stats stats = runtime.stats();
  require(stats.attended_tokens == stats.near_tokens + stats.far_tokens + stats.fetched_tokens,
          "tokens attended are not those near, far and fetched");
}

}  // namespace

std::span<const MachineKind> machine_kinds() { return kKinds; }

Machine::Machine(const MachineKind& kind, std::shared_ptr<const cpu::Workers> workers, std::span<const Toy> toys)
    : kind_(kind), workers_(std::move(workers)), toys_(toys) {
  rebuild();
}

void Machine::rebuild() {
  runtime_.reset();
  device_.reset();
  if (!kind_.embedded) {
    device_ = std::make_shared<cpu::HostDevice>(
        workers_, cpu::HostDeviceOptions{
                      .flag_timeout = kSoakTimeout, .separate_memory = kind_.separate_memory, .misbehaviour = {}});
  }
  runtime_ = std::make_unique<Runtime>(options_of(kind_), device_);
}

RoundStats Machine::run(std::uint64_t seed) {
  const auto stop_faults = [this] {
    if (device_) device_->misbehave({});
  };
  if (device_) device_->misbehave(misbehaviour_of(seed));
  Traffic traffic(
      *runtime_, toys_,
      {.ordered = kind_.ordered, .most_sequences = kMostSequences, .seed = seed, .stop_faults = stop_faults});
  RoundStats stats = traffic.run();
  stop_faults();
  traffic.leave();
  require_empty(*runtime_);
  return stats;
}

}  // namespace sluice::test
