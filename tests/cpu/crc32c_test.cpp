#include "cpu/machine/crc32c.hpp"

#include <cstring>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/random.hpp"

using namespace sluice;
using namespace sluice::test;

namespace {

std::uint32_t of(const std::string& text) { return cpu::crc32c(std::as_bytes(std::span(text))); }

std::vector<std::byte> drawn(std::size_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.below(256));
  return bytes;
}

}  // namespace

TEST_CASE("checksums are those of RFC 3720", "[crc32c]") {
  REQUIRE(of("") == 0);
  REQUIRE(of("123456789") == 0xe306'9283u);
  REQUIRE(of(std::string(32, '\0')) == 0x8a91'36aau);
  REQUIRE(of(std::string(32, '\xff')) == 0x62a8'ab43u);
  std::string rising;
  for (char c = 0; c < 32; ++c) rising.push_back(c);
  REQUIRE(of(rising) == 0x46dd'794eu);
  REQUIRE(of({rising.rbegin(), rising.rend()}) == 0x113f'db5cu);
}

TEST_CASE("checksums are the same with the processor's instruction and without, of quarters and of each alone",
          "[crc32c]") {
  for (const std::size_t count : {0u, 1u, 7u, 8u, 9u, 31u, 32u, 33u, 63u, 64u, 100u, 1023u, 4096u, 70'001u}) {
    CAPTURE(count);
    const std::vector<std::byte> bytes = drawn(count + 3, count + 1);
    for (const std::size_t first : {0u, 3u}) {
      const auto some = std::span(bytes).subspan(first, count);
      REQUIRE(cpu::crc32c(some) == cpu::crc32c_by_table(some));
      const auto quarters = cpu::crc32c_of_quarters(some);
      REQUIRE(cpu::quarter_begin(count, 4) == count);
      for (std::uint32_t i = 0; i < 4; ++i) {
        const std::uint64_t begin = cpu::quarter_begin(count, i);
        REQUIRE(begin <= cpu::quarter_begin(count, i + 1));
        const auto quarter = some.subspan(begin, cpu::quarter_begin(count, i + 1) - begin);
        REQUIRE(quarters[i] == cpu::crc32c_by_table(quarter));
      }
    }
  }
}
