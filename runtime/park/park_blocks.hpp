#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "cpu/machine/crc32c.hpp"
#include "runtime/park/park_body.hpp"
#include "runtime/park/park_head.hpp"
#include "runtime/park/park_sink.hpp"
#include "runtime/park/park_source.hpp"
#include "sluice/error.hpp"

namespace sluice::runtime {

/// The checksums of block `index`.
[[nodiscard]] inline std::array<std::uint32_t, 4> checks_of(std::span<const std::byte> block, std::uint64_t index) {
  auto checks = cpu::crc32c_of_quarters(block);
  checks[0] ^= static_cast<std::uint32_t>(index);
  return checks;
}

/// Blocks of a body of so many bytes, checksums apart.
[[nodiscard]] constexpr std::uint64_t park_blocks(std::uint64_t body_bytes) noexcept {
  return div_up(body_bytes, kParkBlock);
}
[[nodiscard]] inline std::uint64_t block_bytes(const ParkBody& body, std::uint64_t index) noexcept {
  return std::min(body.bytes() - index * kParkBlock, kParkBlock);
}

/// Writes block `index` of a body that begins at byte `from` of the sink.  @throws what the sink does
inline void write_block(const ParkBody& body, std::uint64_t index, ParkSink& sink, std::uint64_t from,
                        std::vector<std::byte>& scratch) {
  const std::uint64_t bytes = block_bytes(body, index);
  const std::uint64_t at = from + index * (kParkBlock + kParkChecks);
  const auto block = sink.room(at, bytes + kParkChecks, scratch);
  body.gather(index * kParkBlock, block.first(bytes));
  const auto checks = checks_of(block.first(bytes), index);
  static_assert(sizeof checks == kParkChecks);
  std::memcpy(block.data() + bytes, checks.data(), sizeof checks);
  sink.put(at, block);
}

/// Reads and checks it, before anything of it is there.  @throws Error{Errc::corrupt}, or what the source throws
inline void read_block(const ParkBody& body, std::uint64_t index, ParkSource& source, std::uint64_t from,
                       std::vector<std::byte>& scratch) {
  const std::uint64_t bytes = block_bytes(body, index);
  const std::uint64_t at = from + index * (kParkBlock + kParkChecks);
  const auto read = source.read(at, bytes + kParkChecks, scratch);
  const auto checks = checks_of(read.first(bytes), index);
  if (std::memcmp(checks.data(), read.data() + bytes, sizeof checks) != 0)
    throw Error(Errc::corrupt, "the parked sequence is damaged: the checksums of its bytes " + std::to_string(at) +
                                   " to " + std::to_string(at + bytes) + " are wrong; take another copy of it");
  body.scatter(index * kParkBlock, read.first(bytes));
}

}  // namespace sluice::runtime
