#include "cpu/machine/core_shares.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::cpu;

namespace {

using Pus = std::vector<std::uint32_t>;

/// Two nodes of four cores; core c has the PUs 2c and 2c + 1.
const Topology& machine() {
  static const Topology topology("numa:2 core:4 pu:2");
  return topology;
}

std::vector<CoreShare> divide(const std::vector<CoreClaim>& claims) {
  std::vector<const CoreClaim*> list;
  for (const CoreClaim& claim : claims) list.push_back(&claim);
  return divided(list);
}

Pus sorted(Pus pus) {
  std::ranges::sort(pus);
  return pus;
}

/// All cores, each in one share; as equal as can be. Or, if the shares are more than that, one core for each.
bool fair(const std::vector<CoreShare>& shares, const Topology& of) {
  Pus all;
  const std::size_t cores = of.core_order(0).size();
  for (const CoreShare& share : shares) {
    all.insert(all.end(), share.pus.begin(), share.pus.end());
    const std::size_t least = std::max<std::size_t>(cores / shares.size(), 1);
    if (share.pus.size() < least || share.pus.size() > least + 1 || share.cores != share.pus.size()) return false;
  }
  all = sorted(all);
  if (shares.size() > cores) all.erase(std::ranges::unique(all).begin(), all.end());
  return all == sorted(of.core_order(0));
}

}  // namespace

TEST_CASE("who is alone has all cores, those of its node first", "[core_shares]") {
  for (const std::uint32_t node : {0u, 1u, kNone}) {
    const auto shares = divide({{.topology = machine(), .numa_node = node}});
    REQUIRE(shares[0].pus == machine().core_order(node));
    REQUIRE(shares[0].cores == 8);
  }
}

TEST_CASE("shares are disjoint, cover all cores, and have one each at least", "[core_shares]") {
  std::mt19937 rng(3);
  for (std::size_t count = 1; count <= 20; ++count) {
    for (int round = 0; round < 20; ++round) {
      std::vector<CoreClaim> claims;
      for (std::size_t i = 0; i < count; ++i)
        claims.push_back({.topology = machine(), .numa_node = static_cast<std::uint32_t>(rng() % 3)});
      CAPTURE(count, round);
      REQUIRE(fair(divide(claims), machine()));
    }
  }
}

TEST_CASE("each has what is near to it, and neighbours stay together", "[core_shares]") {
  const CoreClaim first{.topology = machine(), .numa_node = 0};
  const CoreClaim second{.topology = machine(), .numa_node = 1};
  const auto apart = divide({second, first});
  REQUIRE(apart[0].pus == Pus{8, 10, 12, 14});
  REQUIRE(apart[1].pus == Pus{0, 2, 4, 6});
  // Both want the same node: each has half of it, and half of the other.
  const auto together = divide({second, second});
  REQUIRE(together[0].pus == Pus{8, 10, 0, 2});
  REQUIRE(together[1].pus == Pus{12, 14, 4, 6});
}

TEST_CASE("named cores are whose they are, and nobody's beside", "[core_shares]") {
  const CoreClaim other{.topology = machine()};
  // By the second PUs of two cores, one of them in both.
  const CoreClaim named{.topology = machine().of_pus(Pus{3, 9}), .named = true};
  const CoreClaim also_named{.topology = machine().of_pus(Pus{8}), .named = true};
  const auto shares = divide({other, named, other, also_named});
  REQUIRE(shares[1].pus == Pus{3, 9});
  REQUIRE(shares[3].pus == Pus{8});
  Pus rest = shares[0].pus;
  rest.insert(rest.end(), shares[2].pus.begin(), shares[2].pus.end());
  REQUIRE(sorted(rest) == Pus{0, 4, 6, 10, 12, 14});
  // All are named: the others are where they would be alone.
  const CoreClaim all{.topology = machine().of_pus(machine().core_order(0)), .named = true};
  const auto crowded = divide({all, other, other});
  REQUIRE(crowded[0].pus.size() == 8);
  REQUIRE(fair({crowded[1], crowded[2]}, machine()));
}

TEST_CASE("time that a control group grants is shared like cores", "[core_shares]") {
  for (const std::uint32_t quota : {1u, 2u, 3u, 5u}) {
    const CoreClaim claim{.topology = machine().limited(quota)};
    REQUIRE(divide({claim})[0].cores == quota);
    REQUIRE(divide({claim})[0].pus.size() == 8);
    for (std::size_t count = 2; count < 8; ++count) {
      std::uint32_t sum = 0;
      for (const CoreShare& share : divide(std::vector<CoreClaim>(count, claim))) sum += share.cores;
      REQUIRE(sum == std::max(quota, static_cast<std::uint32_t>(count)));
    }
  }
  // Who has named three of five leaves two, who has named all leaves what is the least.
  const Topology five = machine().limited(5);
  const CoreClaim three{.topology = five.of_pus(Pus{0, 2, 4}), .named = true};
  REQUIRE(divide({three, {.topology = five}})[1].cores == 2);
  const CoreClaim all{.topology = five.of_pus(machine().core_order(0)), .named = true};
  REQUIRE(divide({all, {.topology = five}})[1].cores == 1);
}

TEST_CASE("a lease says when its share may be another", "[core_shares]") {
  CoreShares shares;
  const CoreShares::Lease first = shares.take({.topology = machine()});
  const std::uint64_t alone = first.generation();
  REQUIRE(first.share().pus.size() == 8);
  std::optional<CoreShares::Lease> second(shares.take({.topology = machine()}));
  REQUIRE(first.generation() != alone);
  REQUIRE(first.share().pus.size() == 4);
  const std::uint64_t together = first.generation();
  second->end();
  REQUIRE(first.generation() != together);
  REQUIRE(first.share().pus.size() == 8);
  second.reset();
  REQUIRE(first.share().pus.size() == 8);
  REQUIRE(&CoreShares::of_process() == &CoreShares::of_process());
}

TEST_CASE("shares are fair at every moment, whoever comes and goes", "[core_shares]") {
  const auto seed = GENERATE(1u, 2u);
  CAPTURE(seed);
  CoreShares shares;
  std::atomic<bool> wrong{false};
  std::atomic<std::uint32_t> running{4};
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 rng(seed * 10 + i);
      std::vector<CoreShares::Lease> leases;
      for (int step = 0; step < 300; ++step) {
        if (leases.size() < 4 && rng() % 2 == 0)
          leases.push_back(shares.take({.topology = machine(), .numa_node = static_cast<std::uint32_t>(rng() % 2)}));
        else if (!leases.empty())
          leases.erase(leases.begin() + static_cast<std::ptrdiff_t>(rng() % leases.size()));
        for (const CoreShares::Lease& lease : leases) wrong = wrong || lease.share().pus.empty();
      }
      --running;
    });
  }
  while (running != 0) {
    const auto all = shares.shares();
    wrong = wrong || (!all.empty() && !fair(all, machine()));
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE_FALSE(wrong);
  REQUIRE(shares.shares().empty());
}
