// What `sluice doctor` recommends.

#include "tools/cli/text/recommended.hpp"
#include "sluice/units.hpp"
#include "tests/support/catch.hpp"

using namespace sluice;
using namespace sluice::tools;

TEST_CASE("three quarters of the available memory are recommended, in round sizes", "[cli][recommended]") {
  CHECK(recommended_host_bytes({.host_available = 24 * GiB}) == 18 * GiB);
  CHECK(recommended_host_bytes({.host_available = 23 * GiB}) == 17 * GiB);
  CHECK(recommended_host_bytes({.host_available = 1 * GiB}) == 768 * MiB);
  CHECK(recommended_host_bytes({.host_available = 0}) == 0);
}

TEST_CASE("tokens that have room are told as they are read", "[cli][recommended]") {
  const auto why = [](std::uint64_t available) {
    const std::string text =
        recommended_options({.host_available = available, .cores = 2}).rows.front().back().get<std::string>();
    return text.substr(0, text.find(" of Llama"));
  };
  CHECK(why(24 * GiB) == "three quarters of what is available: 147,000 tokens");
  CHECK(why(512 * GiB) == "three quarters of what is available: 3,145,000 tokens");
  CHECK(why(100 * MiB) == "three quarters of what is available: 600 tokens");
}

TEST_CASE("options go by whether there is a GPU", "[cli][recommended]") {
  const auto options = [](const MachineRoom& room) {
    std::vector<std::string> found;
    for (const auto& row : recommended_options(room).rows) {
      found.push_back(row.at(1).get<std::string>());
      found.push_back(row.at(2).get<std::string>());
    }
    return found;
  };
  CHECK(options({.host_available = 24 * GiB, .cores = 2}) ==
        std::vector<std::string>{"--host-size 18G", "--host-bytes 18GiB", "--near 0%", "--near-bytes 0", "--threads 2",
                                 "--option threads=2"});
  CHECK(options({.host_available = 128 * GiB, .cores = 16, .device_memory = 80 * GiB}) ==
        std::vector<std::string>{"--host-size 96G", "--host-bytes 96GiB", "--near-size 20G", "--near-bytes 20480MiB",
                                 "--threads 15", "--option threads=15"});
  CHECK(options({.host_available = 0, .cores = 2}).front() == "--host-size SIZE");
  CHECK(options({.host_available = 8 * GiB, .cores = 1, .device_memory = 8 * GiB}).at(4) == "--threads 1");
}
