#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace sluice::runtime {

/// Where a parked sequence is read from. Thread safety: `read`, by any threads.
class ParkSource {
 public:
  virtual ~ParkSource() = default;
  /// Of all of it.
  [[nodiscard]] virtual std::uint64_t bytes() const noexcept = 0;
  /// Bytes [at, at + count), which are there; in `scratch`, unless they lie in memory anyway.
  /// @throws Error{Errc::io}; Error{Errc::corrupt} if it has become shorter
  [[nodiscard]] virtual std::span<const std::byte> read(std::uint64_t at, std::uint64_t count,
                                                        std::vector<std::byte>& scratch) = 0;
};

class MemorySource final : public ParkSource {
 public:
  explicit MemorySource(std::span<const std::byte> area) : area_(area) {}
  [[nodiscard]] std::uint64_t bytes() const noexcept override { return area_.size(); }
  [[nodiscard]] std::span<const std::byte> read(std::uint64_t at, std::uint64_t count,
                                                std::vector<std::byte>&) override {
    return area_.subspan(at, count);
  }

 private:
  std::span<const std::byte> area_;
};

class FileSource final : public ParkSource {
 public:
  /// @throws Error{Errc::not_found}, Error{Errc::io}; Error{Errc::invalid_argument} if it is no ordinary file
  explicit FileSource(const std::string& path);
  ~FileSource() override;
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;
  [[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }
  [[nodiscard]] std::span<const std::byte> read(std::uint64_t at, std::uint64_t count,
                                                std::vector<std::byte>& scratch) override;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t bytes_ = 0;
};

}  // namespace sluice::runtime
