#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace sluice::test {

/// What the command line asks for, see main.cpp.
struct SoakOptions {
  std::optional<int> gpu;  ///< its number; none: the host device
  std::uint64_t seconds = 10;
  std::uint64_t rounds = 1'000'000;  ///< at most
  std::uint64_t turns = 60;          ///< of a machine in a round
  std::uint64_t steps = 0;           ///< tokens to be decoded, at least; 0: as many as come
  std::uint64_t seed = std::random_device()();
  std::uint64_t round = 0;
  std::uint64_t stop_ms = 0;  ///< longest stop; 0: none
  std::uint64_t every_ms = 2000;
  bool flat = false;
  bool keep_going = false;
  std::string only;
  std::vector<std::string> without;

  /// Those of all kinds of machines are driven.
  [[nodiscard]] bool all_kinds() const noexcept { return only.empty() && without.empty(); }
};

/// @throws std::runtime_error that says what is wrong
[[nodiscard]] SoakOptions read_options(const std::vector<std::string>& arguments);

}  // namespace sluice::test
