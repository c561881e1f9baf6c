#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "cpu/machine/crc32c.hpp"
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

/// Writes the body of a parked sequence, as many bytes as were said, block by block.
class BlockWriter {
 public:
  BlockWriter(ParkSink& sink, std::uint64_t bytes) : sink_(sink), left_(bytes) {}

  void put(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      if (filled_ == room_) open();
      const std::uint64_t some = std::min<std::uint64_t>(bytes.size(), room_ - filled_);
      std::memcpy(block_.data() + filled_, bytes.data(), some);
      bytes = bytes.subspan(some);
      filled_ += some;
      if (filled_ == room_) close();
    }
  }

 private:
  void open() {
    room_ = std::min(left_, kParkBlock);
    left_ -= room_;
    filled_ = 0;
    block_ = sink_.next(room_ + kParkChecks);
  }
  void close() {
    const auto checks = checks_of(block_.first(room_), index_++);
    std::memcpy(block_.data() + room_, checks.data(), sizeof checks);
  }

  ParkSink& sink_;
  std::uint64_t left_;  ///< behind the block
  std::uint64_t index_ = 0;
  std::uint64_t room_ = 0;
  std::uint64_t filled_ = 0;
  std::span<std::byte> block_{};
};

/// Reads the body of a parked sequence, whose head was read, each block after it was checked.
class BlockReader {
 public:
  BlockReader(ParkSource& source, const ParkHead& head)
      : source_(source), at_(source.bytes() - parked_body_bytes(head.body_bytes())), left_(head.body_bytes()) {}

  /// @throws Error{Errc::corrupt}, or what the source throws
  void get(std::span<std::byte> out) {
    while (!out.empty()) {
      if (block_.empty()) open();
      const std::uint64_t some = std::min(out.size(), block_.size());
      std::memcpy(out.data(), block_.data(), some);
      out = out.subspan(some);
      block_ = block_.subspan(some);
    }
  }
  void skip(std::uint64_t bytes) {
    while (bytes != 0) {
      if (block_.empty()) open();
      const std::uint64_t some = std::min<std::uint64_t>(bytes, block_.size());
      block_ = block_.subspan(some);
      bytes -= some;
    }
  }

 private:
  void open() {
    const std::uint64_t bytes = std::min(left_, kParkBlock);
    const auto read = source_.read(at_, bytes + kParkChecks);
    const auto checks = checks_of(read.first(bytes), index_++);
    static_assert(sizeof checks == kParkChecks);
    if (std::memcmp(checks.data(), read.data() + bytes, sizeof checks) != 0)
      throw Error(Errc::corrupt, "the parked sequence is damaged: the checksums of its bytes " + std::to_string(at_) +
                                     " to " + std::to_string(at_ + bytes) + " are wrong; take another copy of it");
    at_ += bytes + kParkChecks;
    left_ -= bytes;
    block_ = read.first(bytes);
  }

  ParkSource& source_;
  std::uint64_t at_;
  std::uint64_t left_;
  std::uint64_t index_ = 0;
  std::span<const std::byte> block_{};
};

}  // namespace sluice::runtime
