#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace sluice::tools {

/// 128 bits that stand for all of some bytes: CRC-32C of the quarters of each piece of 1 MiB, each of them chained from
/// piece to piece. Any change of up to 32 bits in a row shows for certain. Against accidents, not against forgers.
class Digest {
 public:
  static constexpr std::uint64_t kPieceBytes = std::uint64_t{1} << 20;

  /// All pieces are of kPieceBytes, but for the last.
  void add(std::span<const std::byte> piece) noexcept;
  [[nodiscard]] std::string hex() const;

 private:
  std::array<std::uint32_t, 4> quarters_{};
  std::uint64_t bytes_ = 0;
};
[[nodiscard]] std::string digest_of(std::string_view text);

/// What is known of files that were read before: one small file for each, named by device and inode, which holds for
/// the size and the times of modification and of change (st_ctime, which no program sets) that it names. Thread safety:
/// any threads and processes.
class DigestCache {
 public:
  /// @param directory  is made when something is kept; empty: nothing is
  explicit DigestCache(std::filesystem::path directory) : directory_(std::move(directory)) {}

  /// Of all bytes of a file; reads it unless they are known. What cannot be kept is read again next time. A file that
  /// was changed within the last two seconds is not kept: its next change may have the same times.
  /// @param read  called after each piece with the number of its bytes; may be empty
  /// @throws Error as RegularFile; Error{Errc::corrupt} if the file changed while it was read
  [[nodiscard]] std::string of(const std::filesystem::path& file,
                               const std::function<void(std::uint64_t)>& read = {}) const;

 private:
  std::filesystem::path directory_;
};

}  // namespace sluice::tools
