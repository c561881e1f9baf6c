#include "cpu/machine/rank_cores.hpp"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice;
using namespace sluice::cpu;
using sluice::test::TemporaryDirectory;

namespace {

using Pus = std::vector<std::uint32_t>;
using Nodes = std::vector<std::uint32_t>;

/// The core lists of all ranks.
std::vector<Pus> parts(const Topology& machine, const Nodes& nodes) {
  std::vector<Pus> all;
  for (std::uint32_t rank = 0; rank < nodes.size(); ++rank)
    all.push_back(rank_part(machine, rank, nodes).core_order(nodes[rank]));
  return all;
}

/// All their cores, in order.
Pus together(const std::vector<Pus>& parts) {
  Pus all;
  for (const Pus& part : parts) all.insert(all.end(), part.begin(), part.end());
  std::ranges::sort(all);
  return all;
}

/// How many cores of its own node each has.
std::vector<std::size_t> near(const Topology& machine, const Nodes& nodes) {
  std::vector<std::size_t> counts;
  for (std::uint32_t rank = 0; rank < nodes.size(); ++rank) {
    const auto cores = rank_part(machine, rank, nodes).cores_near(nodes[rank]);
    counts.push_back(static_cast<std::size_t>(
        std::ranges::count_if(cores, [&](const Topology::Core& core) { return core.numa_node == nodes[rank]; })));
  }
  return counts;
}

/// A launcher's variables, until it goes.
class Launched {
 public:
  Launched(const char* rank, const char* ranks) {
    set("LOCAL_RANK", rank);
    set("LOCAL_WORLD_SIZE", ranks);
  }
  ~Launched() {
    set("LOCAL_RANK", nullptr);
    set("LOCAL_WORLD_SIZE", nullptr);
  }
  Launched(const Launched&) = delete;
  Launched& operator=(const Launched&) = delete;

 private:
  static void set(const char* name, const char* value) {
    value == nullptr ? ::unsetenv(name) : ::setenv(name, value, 1);
  }
};

/// Two nodes of eight cores; core c has the PUs 2c and 2c + 1.
const Topology& two_nodes() {
  static const Topology topology("numa:2 core:8 pu:2");
  return topology;
}

}  // namespace

TEST_CASE("ranks share a machine: every core once, neighbours together", "[rank_cores]") {
  const Topology machine("numa:2 core:5 pu:1");
  for (const std::uint32_t ranks : {1u, 2u, 3u, 10u}) {
    Pus all;
    const Nodes unknown(ranks, kNone);
    for (const Pus& part : parts(machine, unknown)) {
      REQUIRE(part.size() >= 10 / ranks);
      all.insert(all.end(), part.begin(), part.end());
    }
    REQUIRE(all == machine.core_order(0));
  }
  const Nodes many(30, kNone);
  for (std::uint32_t rank = 0; rank < 30; ++rank) REQUIRE(rank_part(machine, rank, many).cores() == 1);
  REQUIRE_THROWS_AS(rank_part(machine, 2, Nodes{kNone, kNone}), Error);
}

TEST_CASE("ranks of different nodes have the cores of their own, whatever their order", "[rank_cores]") {
  const Pus first = two_nodes().core_order(0);
  const Pus low(first.begin(), first.begin() + 8), high(first.begin() + 8, first.end());
  REQUIRE(parts(two_nodes(), {0, 1}) == std::vector<Pus>{low, high});
  REQUIRE(parts(two_nodes(), {1, 0}) == std::vector<Pus>{high, low});
  // Four GPUs whose order alternates between the nodes.
  REQUIRE(parts(two_nodes(), {0, 1, 0, 1}) ==
          std::vector<Pus>{{0, 2, 4, 6}, {16, 18, 20, 22}, {8, 10, 12, 14}, {24, 26, 28, 30}});
}

TEST_CASE("ranks of one node share its cores before they take others", "[rank_cores]") {
  REQUIRE(parts(two_nodes(), {1, 1}) ==
          std::vector<Pus>{{16, 18, 20, 22, 0, 2, 4, 6}, {24, 26, 28, 30, 8, 10, 12, 14}});
  REQUIRE(near(two_nodes(), {0, 0, 0, 0}) == std::vector<std::size_t>{2, 2, 2, 2});
  REQUIRE(near(two_nodes(), {0, 0, 0, 1}) == std::vector<std::size_t>{2, 3, 3, 4});
  for (const Nodes& nodes : {Nodes{0, 0}, Nodes{0, 0, 0, 0}, Nodes{0, 0, 0, 1}}) {
    const auto all = parts(two_nodes(), nodes);
    for (const Pus& part : all) REQUIRE(part.size() == 16 / nodes.size());
    REQUIRE(together(all) == two_nodes().core_order(0));
  }
}

TEST_CASE("every rank has a core, however many they are and wherever their devices are", "[rank_cores]") {
  const Topology small("numa:2 core:2 pu:2");
  // More ranks than cores of their node: those that get none of it take the other's.
  REQUIRE(together(parts(small, {1, 1, 1, 1})) == small.core_order(0));
  // A node without cores, or none that the process may use.
  REQUIRE(together(parts(small, {7, 7})) == small.core_order(0));
  const Topology first = small.of_pus(Pus{0, 2});
  REQUIRE(together(parts(first, {1, 0})) == Pus{0, 2});
  std::mt19937 rng(5);
  for (int round = 0; round < 200; ++round) {
    Nodes nodes(1 + rng() % 24);
    for (std::uint32_t& node : nodes) node = rng() % 3 == 0 ? kNone : static_cast<std::uint32_t>(rng() % 2);
    CAPTURE(nodes);
    auto all = parts(two_nodes(), nodes);
    for (const Pus& part : all) REQUIRE(part.size() >= std::max<std::size_t>(16 / nodes.size(), 1));
    Pus cores = together(all);
    if (nodes.size() > 16) cores.erase(std::ranges::unique(cores).begin(), cores.end());
    REQUIRE(cores == two_nodes().core_order(0));
  }
}

TEST_CASE("ranks share the time that a control group grants", "[rank_cores]") {
  const Topology limited = two_nodes().limited(6);
  for (std::uint32_t rank = 0; rank < 4; ++rank) REQUIRE(rank_part(limited, rank, Nodes{0, 0, 1, 1}).cores() == 2);
  REQUIRE(rank_part(limited, 0, Nodes{0}).cores() == 6);
}

TEST_CASE("where each rank's device is follows from those that all see", "[rank_cores]") {
  const Topology machine = Topology::from_xml(sluice::test::test_data() + "/topology/two_nodes.xml");
  const std::string left = "0000:1B:00.0", right = "0000:9A:00.0", between = "0000:C1:00.0";
  const auto nodes = [&](LocalRank local, const std::string& own, std::vector<std::string> visible) {
    return rank_nodes(machine, local, {.name = "GPU", .pci_bus_id = own, .visible_bus_ids = std::move(visible)});
  };
  REQUIRE(nodes({0, 2}, left, {left, right}) == Nodes{0, 1});
  REQUIRE(nodes({1, 2}, left, {right, left, left}) == Nodes{1, 0});
  const Nodes unknown{kNone, kNone};
  REQUIRE(nodes({1, 2}, left, {left, right}) == unknown);  // Another than its number says.
  REQUIRE(nodes({0, 2}, left, {left}) == unknown);         // Each sees its own only.
  REQUIRE(nodes({0, 2}, left, {left, between}) == unknown);
  REQUIRE(nodes({0, 2}, left, {left, ""}) == unknown);
  REQUIRE(nodes({0, 2}, "", {}) == unknown);
  // As the kernel says, of a machine that hwloc was not asked for devices.
  const TemporaryDirectory root;
  root.write("sys/bus/pci/devices/0000:1b:00.0/local_cpus", "0000ffff\n");
  root.write("sys/bus/pci/devices/0000:9a:00.0/local_cpus", "ffff0000\n");
  REQUIRE(rank_nodes(two_nodes(), {.rank = 1, .ranks = 2},
                     {.name = "GPU", .pci_bus_id = left, .visible_bus_ids = {right, left}},
                     root.path()) == Nodes{1, 0});
}

TEST_CASE("a launcher's variables say which part of the machine is this process'", "[rank_cores]") {
  const Topology machine("core:4 pu:1");
  const auto with = [&](const char* rank, const char* ranks) {
    const Launched launched(rank, ranks);
    const LocalRank local = local_rank();
    return std::pair(std::pair(local.rank, local.ranks), chosen_cores(machine, {}, {}).core_order(0));
  };
  REQUIRE(with("1", "2") == std::pair(std::pair(1u, 2u), Pus{2, 3}));
  for (const auto& [rank, ranks] : {std::pair<const char*, const char*>{nullptr, nullptr},
                                    {"1", nullptr},
                                    {"2", "2"},
                                    {"x", "2"},
                                    {"1", "2 "},
                                    {"-1", "2"},
                                    {"", ""}}) {
    REQUIRE(with(rank, ranks) == std::pair(std::pair(0u, 1u), Pus{0, 1, 2, 3}));
  }
  const std::uint32_t pus[] = {3};
  REQUIRE(chosen_cores(machine, pus, {}).core_order(0) == Pus{3});
}

TEST_CASE("a rank's cores are those beside its device", "[rank_cores]") {
  const Topology machine = Topology::from_xml(sluice::test::test_data() + "/topology/two_nodes.xml");
  const Launched launched("0", "2");
  const std::string left = "0000:1B:00.0", right = "0000:9A:00.0";
  const auto cores = [&](const std::string& own, const std::vector<std::string>& visible) {
    return chosen_cores(machine, {}, {.name = "GPU", .pci_bus_id = own, .visible_bus_ids = visible}).core_order(0);
  };
  REQUIRE(cores(left, {left, right}) == Pus{0, 1});
  REQUIRE(cores(right, {right, left}) == Pus{2, 3});
  REQUIRE(cores(right, {right}) == Pus{0, 1});  // Not known of the other rank: by the cores' order.
}
