#pragma once

#include <string>
#include <string_view>

#include "tools/cli/report.hpp"

namespace sluice::tools {

/// Where a result goes: a file that appears whole or not at all, or standard output for an empty path.
/// The file is written beside its place and renamed; a device or pipe is written to directly.
class OutputTarget {
 public:
  /// Makes sure that the file can be written, before any work starts; leaves nothing behind.
  /// @throws Error{Errc::io} naming the path and the system's reason.
  explicit OutputTarget(std::string path);

  /// Writes everything. @throws Error{Errc::io}; the old file, if any, is then still in place.
  void commit(std::string_view text) const;
  [[nodiscard]] bool is_stdout() const noexcept { return path_.empty(); }

 private:
  std::string path_;
  bool replace_ = true;  ///< a regular file, or none yet
};

/// The options `-o` and `--output` that every reporting subcommand has.
struct OutputOptions {
  Format format = Format::md;
  std::string path;
};

/// Writes to standard output. @throws Error{Errc::io} if it takes no more (full disk, closed pipe).
void write_stdout(std::string_view text);

}  // namespace sluice::tools
