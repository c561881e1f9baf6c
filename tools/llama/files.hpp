#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace sluice::tools {

/// A regular file, open for reading. Reads are checked: a failing disk and a file that shrinks are errors, never a
/// shorter result or a signal. Thread safety: reads from any thread.
class RegularFile {
 public:
  /// Never waits: a pipe, socket, device or directory is refused.
  /// @throws Error{Errc::not_found}, Error{Errc::io}
  explicit RegularFile(const std::filesystem::path& path);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// When it was opened. Files of /proc say 0 whatever they hold.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  /// Fills `out` from `offset` on.
  /// @throws Error{Errc::corrupt} if the file ends before, Error{Errc::io}
  void read(std::uint64_t offset, std::span<std::byte> out) const;
  /// From the beginning to the end.
  /// @throws Error{Errc::corrupt} if it is longer than `most_bytes` or shorter than it was when opened, Error{Errc::io}
  [[nodiscard]] std::string read_all(std::uint64_t most_bytes) const;

 private:
  struct Descriptor {
    int value = -1;
    ~Descriptor();
  };
  std::string name_;
  std::unique_ptr<Descriptor> descriptor_;
  std::uint64_t bytes_ = 0;
};

/// Limit for files of text: larger than any vocabulary's index or prompt, small enough to hold several times.
inline constexpr std::uint64_t kMostTextBytes = std::uint64_t{1} << 28;

/// A whole regular file as bytes.
/// @throws Error{Errc::not_found}, Error{Errc::io}; Error{Errc::corrupt} if it is longer than `most_bytes`
[[nodiscard]] std::string read_text_file(const std::filesystem::path& file, std::uint64_t most_bytes = kMostTextBytes);

/// What a user names as input: a regular file, a pipe, or standard input for "-". Waits for a pipe's writer.
/// @throws as read_text_file
[[nodiscard]] std::string read_input(const std::string& name, std::uint64_t most_bytes = kMostTextBytes);

}  // namespace sluice::tools
