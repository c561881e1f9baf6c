#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "runtime/park/park_blocks.hpp"

namespace sluice::test {

inline constexpr std::size_t kParkPreamble = 32;

/// Makes the checksums of a parked sequence right, whatever it says, so that what it says is looked at.
inline void seal(std::span<std::byte> parked) {
  const auto put = [](std::span<std::byte> to, const auto& checks) { std::memcpy(to.data(), &checks, sizeof checks); };
  constexpr std::size_t kCheck = sizeof(std::uint32_t);
  if (parked.size() < kParkPreamble) return;
  put(parked.subspan(kParkPreamble - kCheck), cpu::crc32c(parked.first(kParkPreamble - kCheck)));
  std::uint32_t head_bytes = 0;
  std::memcpy(&head_bytes, parked.data() + 12, sizeof head_bytes);
  parked = parked.subspan(kParkPreamble);
  if (parked.size() < kCheck || head_bytes > parked.size() - kCheck) return;
  put(parked.subspan(head_bytes), cpu::crc32c(parked.first(head_bytes)));
  parked = parked.subspan(head_bytes + kCheck);
  for (std::uint64_t index = 0; parked.size() > runtime::kParkChecks; ++index) {
    const std::size_t bytes = std::min<std::size_t>(parked.size() - runtime::kParkChecks, runtime::kParkBlock);
    put(parked.subspan(bytes), runtime::checks_of(parked.first(bytes), index));
    parked = parked.subspan(bytes + runtime::kParkChecks);
  }
}

}  // namespace sluice::test
