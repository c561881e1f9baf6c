#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace sluice::runtime {

/// Where a sequence is parked: each of its bytes once, in any order.
/// Thread safety: `room` and `put` of ranges that do not overlap, by any threads.
class ParkSink {
 public:
  virtual ~ParkSink() = default;
  /// Memory for bytes [at, at + count), to be filled and put: `scratch`, unless they have a place of their own.
  [[nodiscard]] virtual std::span<std::byte> room(std::uint64_t at, std::uint64_t count,
                                                  std::vector<std::byte>& scratch) = 0;
  /// @throws Error{Errc::io} if they cannot be written
  virtual void put(std::uint64_t at, std::span<const std::byte> bytes) = 0;
  /// All were put. Without it, nothing is there.  @throws Error{Errc::io}
  virtual void finish() = 0;
};

class MemorySink final : public ParkSink {
 public:
  /// Long enough for all that comes.
  explicit MemorySink(std::span<std::byte> area) : area_(area) {}
  [[nodiscard]] std::span<std::byte> room(std::uint64_t at, std::uint64_t count, std::vector<std::byte>&) override {
    return area_.subspan(at, count);
  }
  void put(std::uint64_t, std::span<const std::byte>) override {}
  void finish() override {}

 private:
  std::span<std::byte> area_;
};

/// Writes a file in the directory of the one that is wanted, which takes its name, and the place of one that had it,
/// once it is on the disk; before that it is removed again. Only its owner may read it. A symbolic link that had the
/// name is replaced, not what it leads to.
class FileSink final : public ParkSink {
 public:
  /// @throws Error{Errc::io}; Error{Errc::invalid_argument} if something is there, or where a link leads, that is no
  /// ordinary file
  explicit FileSink(const std::string& path);
  ~FileSink() override;
  FileSink(const FileSink&) = delete;
  FileSink& operator=(const FileSink&) = delete;
  [[nodiscard]] std::span<std::byte> room(std::uint64_t at, std::uint64_t count,
                                          std::vector<std::byte>& scratch) override;
  void put(std::uint64_t at, std::span<const std::byte> bytes) override;
  /// @throws Error{Errc::io}, also if the file is there, but not yet its name on the disk
  void finish() override;

 private:
  void keep_name();
  [[noreturn]] void refuse(const char* what) const;

  std::string path_;
  std::string temporary_;  ///< empty: there is none any more
  int directory_ = -1;
  int descriptor_ = -1;
};

}  // namespace sluice::runtime
