#include "cpu/machine/core_shares.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "cpu/machine/limits.hpp"

namespace sluice::cpu {
namespace {

using Core = Topology::Core;

/// Part `index` of `parts` equal ones.
constexpr std::uint64_t part_of(std::uint64_t whole, std::uint64_t index, std::uint64_t parts) noexcept {
  return (index + 1) * whole / parts - index * whole / parts;
}

/// One of those who have not named their cores.
struct Sharer {
  const CoreClaim* claim;
  CoreShare* share;
  std::vector<Core> cores{};  ///< that no share has named, in its order

  [[nodiscard]] bool near(const Core& core) const noexcept { return core.numa_node == claim->numa_node; }
};

enum class Reach : std::uint8_t { near, all };

/// Takes free cores within reach, until the share has `most`.
void take(Sharer& sharer, std::uint64_t most, Reach reach, std::set<std::uint32_t>& taken) {
  for (const Core& core : sharer.cores) {
    if (sharer.share->pus.size() >= most) return;
    if ((reach == Reach::all || sharer.near(core)) && taken.insert(core.core).second)
      sharer.share->pus.push_back(core.pu);
  }
}

/// Those near to several are theirs in equal parts, before a share takes what is far from it.
void take_near(std::span<Sharer> sharers, std::set<std::uint32_t>& taken) {
  for (std::size_t i = 0; i < sharers.size(); ++i) {
    Sharer& sharer = sharers[i];
    const auto same = [&](const Sharer& other) { return other.claim->numa_node == sharer.claim->numa_node; };
    const auto near = std::ranges::count_if(sharer.cores, [&](const Core& core) { return sharer.near(core); });
    const auto before = std::count_if(sharers.begin(), sharers.begin() + static_cast<std::ptrdiff_t>(i), same);
    const std::uint64_t most =
        part_of(static_cast<std::uint64_t>(near), static_cast<std::uint64_t>(before),
                static_cast<std::uint64_t>(std::ranges::count_if(sharers, same)));
    take(sharer, std::min(most, part_of(sharer.cores.size(), i, sharers.size())), Reach::near, taken);
  }
}

/// `named_cores` are busy with what others do.
void divide(std::span<Sharer> sharers, std::uint64_t named_cores) {
  std::set<std::uint32_t> taken;
  take_near(sharers, taken);
  for (std::size_t i = 0; i < sharers.size(); ++i) {
    Sharer& sharer = sharers[i];
    CoreShare& share = *sharer.share;
    take(sharer, part_of(sharer.cores.size(), i, sharers.size()), Reach::all, taken);
    if (share.pus.empty()) share.pus.push_back(sharer.cores[i % sharer.cores.size()].pu);
    const std::uint64_t quota = sharer.claim->topology.quota();
    const std::uint64_t left = quota == kNoLimit ? sharer.cores.size() : quota - std::min(quota, named_cores);
    share.cores = static_cast<std::uint32_t>(
        std::clamp<std::uint64_t>(part_of(left, i, sharers.size()), 1, share.pus.size()));
  }
}

}  // namespace

std::vector<CoreShare> divided(std::span<const CoreClaim* const> claims) {
  std::vector<CoreShare> shares(claims.size());
  std::vector<Sharer> sharers;
  std::set<std::uint32_t> named;
  std::uint64_t named_cores = 0;
  for (std::size_t i = 0; i < claims.size(); ++i) {
    const CoreClaim& claim = *claims[i];
    if (!claim.named) {
      sharers.push_back({.claim = &claim, .share = &shares[i]});
      continue;
    }
    shares[i] = {.pus = claim.topology.core_order(claim.numa_node), .cores = claim.topology.cores()};
    for (const Core& core : claim.topology.cores_near(claim.numa_node)) named.insert(core.core);
    named_cores += shares[i].cores;
  }
  for (Sharer& sharer : sharers) {
    const std::vector<Core> all = sharer.claim->topology.cores_near(sharer.claim->numa_node);
    std::ranges::copy_if(all, std::back_inserter(sharer.cores),
                         [&](const Core& core) { return !named.contains(core.core); });
    if (sharer.cores.empty()) sharer.cores = all;  // All are named: better there than nowhere.
  }
  divide(sharers, named_cores);
  return shares;
}

CoreShares& CoreShares::of_process() {
  static auto& shares = *new CoreShares;
  return shares;
}

CoreShares::Lease CoreShares::take(CoreClaim claim) {
  std::unique_ptr<const CoreClaim> owned = std::make_unique<const CoreClaim>(std::move(claim));
  {
    const std::lock_guard lock(mutex_);
    claims_.push_back(owned.get());
    generation_.fetch_add(1, std::memory_order_release);
  }
  return Lease({owned.release(), Lease::GiveBack{this}});
}

void CoreShares::forget(const CoreClaim& claim) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(claims_, &claim);
  generation_.fetch_add(1, std::memory_order_release);
}

CoreShare CoreShares::Lease::share() const {
  const CoreShares& all = *claim_.get_deleter().from;
  const std::lock_guard lock(all.mutex_);
  const auto at = std::ranges::find(all.claims_, claim_.get()) - all.claims_.begin();
  return divided(all.claims_)[static_cast<std::size_t>(at)];
}

std::vector<CoreShare> CoreShares::shares() const {
  const std::lock_guard lock(mutex_);
  return divided(claims_);
}

}  // namespace sluice::cpu
