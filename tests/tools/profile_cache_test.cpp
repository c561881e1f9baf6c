// Transfer profiles as files: what is read back, what is measured again, and what happens where nothing can be kept.
#include "tools/cli/link/profile_cache.hpp"

#include <sys/stat.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/cli_process.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tools/cli/link/transfer_profile.hpp"

using namespace sluice;
using namespace sluice::tools;
using sluice::test::contains;
using sluice::test::failure_of;
using sluice::test::read_file;
using sluice::test::TemporaryDirectory;

namespace {

const CudaDeviceFacts kFacts{.name = "GPU of Nobody / 80GB", .pci_bus_id = "0000:0F:00.0", .driver = 13000};

TransferProfile some_profile(double us) {
  const TransferSample down{.path = TransferPath::gather,
                            .to_device = true,
                            .block_bytes = 16384,
                            .blocks = 64,
                            .host_us = 1.5,
                            .device_us = us};
  TransferSample up = down;
  up.path = TransferPath::batch;
  up.load = TransferLoad::busy;
  up.to_device = false;
  up.host_us = 0.0;
  up.device_us = 1.0 / 3.0;
  return {.samples = {down, up}, .gather_blocks = 12, .busy_gather_blocks = 32};
}

bool same(const TransferProfile& a, const TransferProfile& b) {
  const auto equal = [](const TransferSample& x, const TransferSample& y) {
    return x.path == y.path && x.load == y.load && x.to_device == y.to_device && x.block_bytes == y.block_bytes &&
           x.blocks == y.blocks && x.host_us == y.host_us && x.device_us == y.device_us;
  };
  return a.gather_blocks == b.gather_blocks && a.busy_gather_blocks == b.busy_gather_blocks &&
         std::equal(a.samples.begin(), a.samples.end(), b.samples.begin(), b.samples.end(), equal);
}

/// A cache with a machine that measures 10, 20, 30, ... us, one more each time.
struct Cache {
  std::shared_ptr<const TransferProfile> get(const std::filesystem::path& directory,
                                             const CudaDeviceFacts& facts = kFacts) {
    return cached_profile(
        directory, facts, [this] { return some_profile(10.0 * ++measured); },
        [this](const std::string& line) { said.push_back(line); });
  }
  int measured = 0;
  std::vector<std::string> said;
};

/// An environment variable for as long as this lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    value == nullptr ? ::unsetenv(name) : ::setenv(name, value, 1);
  }
  ~Variable() { old_ ? ::setenv(name_, old_->c_str(), 1) : ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> old_;
};

}  // namespace

TEST_CASE("a profile is measured once and read back bit by bit", "[profile]") {
  const TemporaryDirectory scratch;
  const std::filesystem::path directory = std::filesystem::path(scratch.file("not")) / "there" / "yet";
  Cache first;
  const auto measured = first.get(directory);
  REQUIRE(same(*measured, some_profile(10.0)));
  Cache later;
  REQUIRE(same(*later.get(directory), *measured));
  REQUIRE(first.measured == 1);
  REQUIRE(later.measured == 0);
  REQUIRE(first.said.empty());
  REQUIRE(later.said.empty());
  // The file alone: nothing temporary is left beside it.
  REQUIRE(std::distance(std::filesystem::directory_iterator(directory), {}) == 1);
  const MeasuredProfile found = load_measured_profile((directory / profile_file_name(kFacts)).string());
  REQUIRE(found.facts == kFacts);
}

TEST_CASE("a profile of another GPU, place or driver is measured again", "[profile]") {
  const TemporaryDirectory scratch;
  const std::filesystem::path directory = scratch.file("cache");
  Cache cache;
  (void)cache.get(directory);
  CudaDeviceFacts other = kFacts;
  const auto change = GENERATE(0, 1, 2);
  if (change == 0) other.driver = 13010;
  if (change == 1) other.name = "GPU of Somebody";
  if (change == 2) other.pci_bus_id = "0000:10:00.0";
  // The old file under the new name: what counts is what it says of itself.
  if (change != 0) {
    std::filesystem::copy_file(directory / profile_file_name(kFacts), directory / profile_file_name(other));
  }
  REQUIRE(same(*cache.get(directory, other), some_profile(20.0)));
  REQUIRE(same(*cache.get(directory, other), some_profile(20.0)));
  REQUIRE(cache.measured == 2);
  REQUIRE(cache.said.empty());
}

TEST_CASE("a damaged profile is measured again and replaced", "[profile]") {
  const TemporaryDirectory scratch;
  const std::filesystem::path directory = scratch.file("cache");
  const std::string file = (directory / profile_file_name(kFacts)).string();
  Cache cache;
  (void)cache.get(directory);
  const std::string whole = read_file(file);
  const std::string damage = GENERATE_COPY(values<std::string>({
      "",
      "{",
      "[]",
      whole.substr(0, whole.size() / 2),
      R"({"schema_version": 1, "kind": "transfer_profile"})",
      R"({"schema_version": 2, "kind": "transfer_profile", "device": 7})",
  }));
  CAPTURE(damage);
  std::ofstream(file, std::ios::binary) << damage;
  REQUIRE(same(*cache.get(directory), some_profile(20.0)));
  REQUIRE(cache.measured == 2);
  REQUIRE(cache.said.size() == 1);
  REQUIRE(contains(cache.said.front(), file));
  Cache later;
  REQUIRE(same(*later.get(directory), some_profile(20.0)));
  REQUIRE(later.measured == 0);
  REQUIRE(later.said.empty());
}

TEST_CASE("nothing that lies in the place of the profile ends the program", "[profile]") {
  const TemporaryDirectory scratch;
  const std::filesystem::path directory = scratch.file("cache");
  std::filesystem::create_directories(directory);
  const std::string file = (directory / profile_file_name(kFacts)).string();
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  const int kind = GENERATE(0, 1, 2, 3, 4, 5);
  CAPTURE(kind);
  const std::string head = R"({"kind": "transfer_profile", "schema_version": )";
  if (kind == 0) (void)scratch.write("cache/" + profile_file_name(kFacts), head + deep + "}");
  if (kind == 1) (void)scratch.write("cache/" + profile_file_name(kFacts), head + R"(2, "samples": )" + deep + "}");
  if (kind == 2) (void)scratch.write("cache/" + profile_file_name(kFacts), deep);
  if (kind == 3) REQUIRE(::mkfifo(file.c_str(), 0600) == 0);
  if (kind == 4) {
    std::ofstream(file) << "{";
    std::filesystem::resize_file(file, 1ull << 40);  // sparse
  }
  if (kind == 5) std::filesystem::create_symlink("/proc/self/mem", file);
  Cache cache;
  REQUIRE(same(*cache.get(directory), some_profile(10.0)));
  REQUIRE(cache.measured == 1);
  REQUIRE(cache.said.size() == 1);
  CHECK(cache.said.front().size() < 600);
}

TEST_CASE("a profile of more samples than can be chosen from in time is refused", "[profile]") {
  const TemporaryDirectory scratch;
  const std::string file = scratch.file("profile");
  TransferProfile profile = some_profile(10.0);
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    profile.samples.push_back(profile.samples.front());
    profile.samples.back().block_bytes = 4096 + i;
  }
  save_transfer_profile(profile, kFacts, file);
  const auto [code, refusal] = failure_of([&] { (void)load_transfer_profile(file); });
  REQUIRE(code == Errc::corrupt);
  REQUIRE(contains(refusal, "samples"));
}

TEST_CASE("a time that no transfer takes is refused, as no path can be chosen by it", "[profile]") {
  const TemporaryDirectory scratch;
  const std::filesystem::path directory = scratch.file("cache");
  const std::string file = (directory / profile_file_name(kFacts)).string();
  Cache cache;
  (void)cache.get(directory);
  std::string text = read_file(file);
  const std::string key = "\"device_us\": ";
  const std::size_t at = text.find(key) + key.size();
  text.replace(at, text.find_first_of(",\n", at) - at, "1e308");
  std::ofstream(file, std::ios::binary) << text;
  REQUIRE_THROWS_AS(load_transfer_profile(file), Error);
  REQUIRE(same(*cache.get(directory), some_profile(20.0)));
  REQUIRE(cache.said.size() == 1);
  REQUIRE(contains(cache.said.front(), "device_us is too long"));
}

TEST_CASE("a profile of the version that knew no busy device is refused for that, and measured again", "[profile]") {
  const TemporaryDirectory scratch;
  const std::filesystem::path directory = scratch.file("cache");
  std::filesystem::create_directories(directory);
  const std::string file = (directory / profile_file_name(kFacts)).string();
  std::ofstream(file) << R"({"schema_version": 1, "kind": "transfer_profile", "device": "GPU of Nobody / 80GB",
    "pci_bus_id": "0000:0F:00.0", "cuda_driver": 13000, "gather_blocks": 12, "samples": [{"path": "gather",
    "direction": "h2d", "block_bytes": 16384, "blocks": 64, "host_us": 1.5, "device_us": 7.0}]})";
  const auto [code, refusal] = failure_of([&] { (void)load_transfer_profile(file); });
  REQUIRE(code == Errc::corrupt);
  REQUIRE(contains(refusal, "schema_version 1 where 2 is read"));
  REQUIRE(contains(refusal, "busy device"));
  Cache cache;
  REQUIRE(same(*cache.get(directory), some_profile(10.0)));
  REQUIRE(cache.measured == 1);
  REQUIRE(cache.said.size() == 1);
  REQUIRE(contains(cache.said.front(), refusal));
  REQUIRE(same(*load_transfer_profile(file), some_profile(10.0)));
}

TEST_CASE("a profile written by hand without its GPU does not count as kept", "[profile]") {
  const TemporaryDirectory scratch;
  const std::string file = scratch.file(profile_file_name(kFacts));
  save_transfer_profile(some_profile(5.0), {}, file);
  REQUIRE(same(*load_transfer_profile(file), some_profile(5.0)));
  Cache cache;
  REQUIRE(same(*cache.get(std::filesystem::path(file).parent_path()), some_profile(10.0)));
}

TEST_CASE("a profile that cannot be kept is used, with one warning", "[profile]") {
  const TemporaryDirectory scratch;
  const bool nowhere = GENERATE(false, true);
  // A file in the place of a directory stops the superuser too.
  const std::filesystem::path directory =
      nowhere ? std::filesystem::path() : std::filesystem::path(scratch.write("file", "x")) / "sluice";
  Cache cache;
  REQUIRE(same(*cache.get(directory), some_profile(10.0)));
  REQUIRE(cache.measured == 1);
  REQUIRE(cache.said.size() == 1);
  REQUIRE(contains(cache.said.front(), "warning"));
  REQUIRE(contains(cache.said.front(), "XDG_CACHE_HOME"));
  REQUIRE(scratch.entries() == (nowhere ? 0u : 1u));
}

TEST_CASE("a directory in the place of the profile is left alone", "[profile]") {
  const TemporaryDirectory scratch;
  const std::filesystem::path directory = scratch.file("cache");
  std::filesystem::create_directories(directory / profile_file_name(kFacts));
  Cache cache;
  REQUIRE(same(*cache.get(directory), some_profile(10.0)));
  REQUIRE(cache.said.size() == 1);
  REQUIRE(std::filesystem::is_directory(directory / profile_file_name(kFacts)));
}

TEST_CASE("what cannot be measured leaves nothing behind", "[profile]") {
  const TemporaryDirectory scratch;
  const auto fails = []() -> TransferProfile { throw Error(Errc::out_of_capacity, "full"); };
  REQUIRE_THROWS_AS(cached_profile(scratch.file("cache"), kFacts, fails, [](const std::string&) {}), Error);
  REQUIRE(scratch.entries() == 0);
}

TEST_CASE("file names are plain and differ by GPU and place", "[profile]") {
  REQUIRE(profile_file_name(kFacts) == "GPU_of_Nobody___80GB_0000_0F_00.0.json");
  REQUIRE(profile_file_name({.name = "../../x\n\"$(y)\xff", .pci_bus_id = "a/b"}).find_first_of("/\n\"$(\xff") ==
          std::string::npos);
  CudaDeviceFacts other = kFacts;
  other.pci_bus_id = "0000:10:00.0";
  REQUIRE(profile_file_name(other) != profile_file_name(kFacts));
}

TEST_CASE("the cache is where the environment says", "[profile]") {
  const Variable home("HOME", "/home/somebody");
  {
    const Variable cache("XDG_CACHE_HOME", "/var/cache/somebody");
    REQUIRE(cache_directory() == "/var/cache/somebody/sluice");
  }
  {
    const Variable cache("XDG_CACHE_HOME", "relative");
    REQUIRE(cache_directory() == "/home/somebody/.cache/sluice");
  }
  const Variable cache("XDG_CACHE_HOME", nullptr);
  REQUIRE(cache_directory() == "/home/somebody/.cache/sluice");
  const Variable homeless("HOME", nullptr);
  REQUIRE(cache_directory().empty());
}
