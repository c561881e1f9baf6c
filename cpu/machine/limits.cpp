#include "cpu/machine/limits.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "sluice/units.hpp"

namespace sluice::cpu {
namespace {

/// "max", empty and garbage are not numbers.
std::optional<std::uint64_t> number(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data()) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream in(path);
  std::string word;
  in >> word;
  return number(word);
}

/// The number behind `key` in a file of "key value ..." lines (meminfo, memory.stat).
std::optional<std::uint64_t> read_field(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string name;
    std::string value;
    words >> name >> value;
    if (name == key) return number(value);
  }
  return std::nullopt;
}

/// Whether the comma-separated `names` contain `name`. The v2 hierarchy has the one empty name.
bool lists(const std::string& names, const std::string& name) {
  std::istringstream words(names);
  std::string word;
  do {
    word.clear();
    std::getline(words, word, ',');
    if (word == name) return true;
  } while (words.good());
  return false;
}

/// Directories of this process's group and of all groups above it, for one v1 controller or, with an
/// empty name, for v2. Inside a container the path in /proc may be that of the host and not exist here;
/// then only the root, which is the container's own group, answers.
std::vector<std::string> group_directories(const std::string& root, const std::string& controller) {
  std::string path;
  std::ifstream in(root + "/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    if (lists(names, controller)) path = line.substr(second + 1);
  }
  const std::string mount = root + "/sys/fs/cgroup" + (controller.empty() ? "" : "/" + controller);
  std::vector<std::string> directories{mount};
  for (std::size_t slash = 0; slash < path.size() && path != "/";) {
    slash = std::min(path.find('/', slash + 1), path.size());
    directories.push_back(mount + path.substr(0, slash));
  }
  return directories;
}

std::uint64_t left(std::optional<std::uint64_t> limit, std::optional<std::uint64_t> used,
                   std::optional<std::uint64_t> cache) {
  if (!limit) return kNoLimit;
  const std::uint64_t held = used.value_or(0) - std::min(used.value_or(0), cache.value_or(0));
  return *limit - std::min(*limit, held);
}

}  // namespace

std::uint64_t available_memory_bytes(const std::string& root) {
  std::uint64_t available = kNoLimit;
  if (const auto kib = read_field(root + "/proc/meminfo", "MemAvailable:")) available = *kib * KiB;
  for (const std::string& group : group_directories(root, ""))
    available = std::min(available, left(read_number(group + "/memory.max"), read_number(group + "/memory.current"),
                                         read_field(group + "/memory.stat", "inactive_file")));
  for (const std::string& group : group_directories(root, "memory"))
    available = std::min(
        available, left(read_number(group + "/memory.limit_in_bytes"), read_number(group + "/memory.usage_in_bytes"),
                        read_field(group + "/memory.stat", "total_inactive_file")));
  return available;
}

std::uint64_t cpu_quota(const std::string& root) {
  std::uint64_t cpus = kNoLimit;
  const auto limit = [&cpus](std::optional<std::uint64_t> quota_us, std::optional<std::uint64_t> period_us) {
    // v1 writes -1 for "none", which is not a number here.
    if (quota_us && period_us && *quota_us > 0 && *period_us > 0) cpus = std::min(cpus, div_up(*quota_us, *period_us));
  };
  for (const std::string& group : group_directories(root, "")) {
    std::ifstream in(group + "/cpu.max");
    std::string quota_us;
    std::string period_us;
    in >> quota_us >> period_us;
    limit(number(quota_us), number(period_us));
  }
  for (const std::string& group : group_directories(root, "cpu"))
    limit(read_number(group + "/cpu.cfs_quota_us"), read_number(group + "/cpu.cfs_period_us"));
  return cpus;
}

}  // namespace sluice::cpu
