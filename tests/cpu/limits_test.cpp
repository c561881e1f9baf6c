#include "cpu/machine/limits.hpp"

#include <string>

#include "sluice/units.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_directory.hpp"

using namespace sluice;
using namespace sluice::cpu;

using FakeRoot = sluice::test::TemporaryDirectory;

TEST_CASE("without any file there is no limit", "[limits]") {
  const FakeRoot root;
  REQUIRE(available_memory_bytes(root.path()) == kNoLimit);
  REQUIRE(cpu_quota(root.path()) == kNoLimit);
}

TEST_CASE("available memory is what the tightest group and the kernel leave", "[limits]") {
  const FakeRoot root;
  root.write("proc/meminfo", "MemTotal:  9000000 kB\nMemAvailable:    4096 kB\n");
  REQUIRE(available_memory_bytes(root.path()) == 4 * MiB);

  root.write("proc/self/cgroup", "0::/outer/inner\n");
  root.write("sys/fs/cgroup/outer/inner/memory.max", "max\n");
  root.write("sys/fs/cgroup/outer/inner/memory.current", "100\n");
  REQUIRE(available_memory_bytes(root.path()) == 4 * MiB);

  root.write("sys/fs/cgroup/outer/memory.max", std::to_string(3 * MiB));
  root.write("sys/fs/cgroup/outer/memory.current", std::to_string(2 * MiB));
  REQUIRE(available_memory_bytes(root.path()) == 1 * MiB);

  // File cache that nobody uses is given back before anybody is killed.
  root.write("sys/fs/cgroup/outer/memory.stat", "anon 5\ninactive_file " + std::to_string(MiB / 2) + "\n");
  REQUIRE(available_memory_bytes(root.path()) == MiB + MiB / 2);

  // A group above its limit has nothing left, not 2^64 bytes.
  root.write("sys/fs/cgroup/outer/memory.current", std::to_string(5 * MiB));
  REQUIRE(available_memory_bytes(root.path()) == 0);
}

TEST_CASE("control groups of version 1 count as well", "[limits]") {
  const FakeRoot root;
  root.write("proc/self/cgroup", "9:cpu,cpuacct:/job\n8:memory:/job\n");
  root.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", std::to_string(8 * MiB));
  root.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", std::to_string(MiB));
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "250000\n");
  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  REQUIRE(available_memory_bytes(root.path()) == 7 * MiB);
  REQUIRE(cpu_quota(root.path()) == 3);

  root.write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n");
  REQUIRE(cpu_quota(root.path()) == kNoLimit);
}

TEST_CASE("a quota is rounded up to whole CPUs, and the container's own group is its root", "[limits]") {
  const FakeRoot root;
  root.write("proc/self/cgroup", "0::/path/on/the/host\n");
  root.write("sys/fs/cgroup/cpu.max", "50000 100000\n");
  REQUIRE(cpu_quota(root.path()) == 1);
  root.write("sys/fs/cgroup/cpu.max", "200001 100000\n");
  REQUIRE(cpu_quota(root.path()) == 3);
  root.write("sys/fs/cgroup/cpu.max", "max 100000\n");
  REQUIRE(cpu_quota(root.path()) == kNoLimit);
}
