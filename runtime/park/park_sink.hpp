#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace sluice::runtime {

/// Where a sequence is parked, from its first byte to its last.
class ParkSink {
 public:
  virtual ~ParkSink() = default;
  /// Memory for the next `count` bytes, to be filled before the next call.
  /// @throws Error{Errc::io} if those before could not be written
  [[nodiscard]] virtual std::span<std::byte> next(std::uint64_t count) = 0;
  /// All are there. Without it, nothing is.  @throws Error{Errc::io}
  virtual void finish() = 0;
};

class MemorySink final : public ParkSink {
 public:
  /// Long enough for all that comes.
  explicit MemorySink(std::span<std::byte> area) : left_(area) {}
  [[nodiscard]] std::span<std::byte> next(std::uint64_t count) override {
    const auto taken = left_.first(count);
    left_ = left_.subspan(count);
    return taken;
  }
  void finish() override {}

 private:
  std::span<std::byte> left_;
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
  [[nodiscard]] std::span<std::byte> next(std::uint64_t count) override;
  /// @throws Error{Errc::io}, also if the file is there, but not yet its name on the disk
  void finish() override;

 private:
  void flush();
  void keep_name();
  [[noreturn]] void refuse(const char* what) const;

  std::string path_;
  std::string temporary_;  ///< empty: there is none any more
  int directory_ = -1;
  int descriptor_ = -1;
  std::uint64_t written_ = 0;
  std::uint64_t filled_ = 0;  ///< of the buffer
  std::vector<std::byte> buffer_;
};

}  // namespace sluice::runtime
