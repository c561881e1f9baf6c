#include "cpu/machine/topology.hpp"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/data.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice;
using namespace sluice::cpu;
using sluice::test::TemporaryDirectory;

TEST_CASE("a synthetic machine is read as described", "[topology]") {
  const Topology machine("numa:2 core:4 pu:2");
  REQUIRE(machine.synthetic());
  REQUIRE(machine.numa_nodes() == 2);
  REQUIRE(machine.cores() == 8);
  REQUIRE(machine.summary().find("2 NUMA node(s), 8 core(s), 16 PU(s)") == 0);
}

TEST_CASE("core_order lists every core once, by its first PU, the asked node first", "[topology]") {
  const Topology machine("numa:2 core:4 pu:2");
  using Order = std::vector<std::uint32_t>;
  REQUIRE(machine.core_order(0) == Order{0, 2, 4, 6, 8, 10, 12, 14});
  REQUIRE(machine.core_order(1) == Order{8, 10, 12, 14, 0, 2, 4, 6});
  // No such node: nothing comes first, nothing is lost.
  REQUIRE(machine.core_order(7) == Order{0, 2, 4, 6, 8, 10, 12, 14});
}

TEST_CASE("a machine of one PU is a machine", "[topology]") {
  const Topology machine("pu:1");
  REQUIRE(machine.numa_nodes() == 1);
  REQUIRE(machine.cores() == 1);
  REQUIRE(machine.core_order(0) == std::vector<std::uint32_t>{0});
}

TEST_CASE("a synthetic machine refuses to bind", "[topology]") {
  const Topology machine("numa:2 core:2 pu:1");
  std::vector<std::byte> memory(4096);
  REQUIRE_FALSE(machine.bind_this_thread(0));
  REQUIRE_FALSE(machine.bind_memory(memory.data(), memory.size(), 0));
}

TEST_CASE("a wrong description is named", "[topology]") {
  try {
    const Topology machine("numa:two");
    FAIL("accepted");
  } catch (const Error& error) {
    REQUIRE(error.code() == Errc::invalid_argument);
    REQUIRE(std::string(error.what()).find("numa:two") != std::string::npos);
  }
}

TEST_CASE("the node nearest to a PCI device is that of the cores beside it", "[topology]") {
  const Topology machine = Topology::from_xml(sluice::test::test_data() + "/topology/two_nodes.xml");
  REQUIRE(machine.synthetic());
  REQUIRE(machine.numa_nodes() == 2);
  REQUIRE(machine.nearest_node("0000:1b:00.0") == 0u);
  REQUIRE(machine.nearest_node("0000:9A:00.0") == 1u);
  REQUIRE(machine.core_order(1) == std::vector<std::uint32_t>{2, 3, 0, 1});
  // As near to both, no such device, no device.
  for (const std::string bus : {"0000:c1:00.0", "0000:07:00.0", "a GPU", ""}) {
    CAPTURE(bus);
    REQUIRE_FALSE(machine.nearest_node(bus).has_value());
  }
}

TEST_CASE("where hwloc has no devices, the kernel says which cores are near", "[topology]") {
  const TemporaryDirectory root;
  const Topology machine("numa:2 core:2 pu:1");
  const auto near = [&](const std::string& local_cpus) {
    root.write("sys/bus/pci/devices/0000:1b:00.0/local_cpus", local_cpus);
    return machine.nearest_node("0000:1B:00.0", root.path());
  };
  REQUIRE(near("00000003\n") == 0u);
  REQUIRE(near("0000000c\n") == 1u);
  REQUIRE_FALSE(near("0000000f\n").has_value());  // a virtual machine
  REQUIRE_FALSE(near("00000000\n").has_value());
  REQUIRE_FALSE(machine.nearest_node("0000:1b:00.1", root.path()).has_value());
  REQUIRE_FALSE(machine.nearest_node("0000:1b:00.0").has_value());  // of a machine that is not this one
}

TEST_CASE("a file that is no topology is named", "[topology]") {
  for (const std::string file : {"/topology/none.xml", "/topology"}) {
    try {
      (void)Topology::from_xml(sluice::test::test_data() + file);
      FAIL("accepted");
    } catch (const Error& error) {
      REQUIRE(error.code() == Errc::invalid_argument);
      REQUIRE(std::string(error.what()).find(file) != std::string::npos);
    }
  }
}

TEST_CASE("a topology of some cores has those, and names what cannot be one", "[topology]") {
  const Topology machine("numa:2 core:4 pu:2");  // Core c has the PUs 2c and 2c + 1.
  const std::uint32_t pus[] = {9, 2, 15};
  const Topology some = machine.of_pus(pus);
  REQUIRE(some.cores() == 3);
  REQUIRE(some.core_order(0) == std::vector<std::uint32_t>{2, 9, 15});
  REQUIRE(some.core_order(1) == std::vector<std::uint32_t>{9, 15, 2});
  REQUIRE(machine.cores() == 8);
  for (const std::vector<std::uint32_t>& wrong :
       {std::vector<std::uint32_t>{}, std::vector<std::uint32_t>{16}, std::vector<std::uint32_t>{3, 3},
        std::vector<std::uint32_t>{4, 5}}) {
    CAPTURE(wrong);
    REQUIRE_THROWS_AS(machine.of_pus(wrong), Error);
  }
}

TEST_CASE("this machine has cores, distinct PUs, and binding outside of them is refused", "[topology]") {
  const Topology machine;
  const auto order = machine.core_order(0);
  REQUIRE(machine.cores() >= 1);
  REQUIRE(order.size() >= machine.cores());
  REQUIRE(std::set<std::uint32_t>(order.begin(), order.end()).size() == order.size());
  REQUIRE_FALSE(machine.bind_this_thread(1u << 20));
  REQUIRE_FALSE(machine.bind_memory(nullptr, 4096, 0));
}

TEST_CASE("a bound thread sees only the PU it was bound to", "[topology]") {
  const Topology machine;
  const std::uint32_t pu = machine.core_order(0).back();
  bool bound = false;
  std::vector<std::uint32_t> seen;
  std::thread([&] {
    bound = machine.bind_this_thread(pu);
    cpu_set_t set;
    if (::sched_getaffinity(0, sizeof set, &set) != 0) return;
    for (std::uint32_t i = 0; i < CPU_SETSIZE; ++i)
      if (CPU_ISSET(i, &set)) seen.push_back(i);
  }).join();
  if (bound)
    REQUIRE(seen == std::vector<std::uint32_t>{pu});
  else
    WARN("the system refuses to bind threads; nothing checked");
}

TEST_CASE("a thread is bound by another, awake or asleep, and knows where it runs", "[topology]") {
  const Topology machine;
  const auto order = machine.core_order(0);
  std::atomic<bool> goes_on{true};
  std::atomic<std::uint32_t> seen{~0u};
  std::jthread other([&] {
    while (goes_on) seen = machine.pu_of_this_thread().value_or(~0u);
  });
  bool bound = true;
  for (const std::uint32_t pu : order) {
    bound = bound && machine.bind_thread(other.native_handle(), pu);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (bound && seen != pu && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    if (bound) CHECK(seen == pu);
  }
  const bool refused = !machine.bind_thread(other.native_handle(), 1u << 20);
  goes_on = false;
  if (!bound) WARN("the system refuses to bind threads; nothing checked");
  REQUIRE(refused);
  const Topology imagined("core:4 pu:1");
  REQUIRE_FALSE(imagined.pu_of_this_thread());
  REQUIRE_FALSE(imagined.bind_thread(other.native_handle(), 0));
}

TEST_CASE("a thread gets back what it could run on before it was bound", "[topology]") {
  const Topology machine;
  std::vector<std::uint32_t> before, bound, after;
  bool all = false;
  std::thread([&] {
    before = machine.binding_of_this_thread();
    all = machine.bind_this_thread(machine.core_order(0).back());
    bound = machine.binding_of_this_thread();
    all = all && machine.bind_this_thread(std::span<const std::uint32_t>(before));
    after = machine.binding_of_this_thread();
  }).join();
  REQUIRE(after == before);
  if (all)
    REQUIRE(bound == std::vector{machine.core_order(0).back()});
  else
    WARN("the system refuses to bind threads; nothing checked");
  const Topology imagined("core:4 pu:1");
  REQUIRE(imagined.binding_of_this_thread().empty());
  REQUIRE_FALSE(imagined.bind_this_thread(std::span<const std::uint32_t>(before)));
}

TEST_CASE("copies of a topology outlive the original", "[topology]") {
  auto original = std::make_unique<Topology>("numa:2 core:3 pu:1");
  const Topology copy = *original;
  original.reset();
  REQUIRE(copy.cores() == 6);
}
