#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "tools/cli/text/report.hpp"

namespace sluice::tools {

/// Where a result goes: a file that appears whole or not at all, or standard output for an empty path and for its other
/// names, such as /dev/stdout. The file is written beside its place, behind any links, and renamed; a device or pipe is
/// written to directly.
class OutputTarget {
 public:
  /// Makes sure that the file can be written, before any work starts; leaves nothing behind.
  /// @throws Error{Errc::io} naming the path and the system's reason.
  explicit OutputTarget(std::string path);

  /// Writes everything. @throws Error{Errc::io}; the old file, if any, is then still in place.
  void commit(std::string_view text) const;
  [[nodiscard]] bool is_stdout() const noexcept { return place_ == Place::standard_output; }
  [[nodiscard]] bool is_file() const noexcept { return place_ == Place::file; }
  /// Of the file `result.csv`, the file `result-NAME.csv`.
  [[nodiscard]] OutputTarget beside(const std::string& name) const;

 private:
  enum class Place : std::uint8_t { file, device, standard_output, standard_error };
  std::string path_;
  std::string real_path_;
  Place place_ = Place::file;
};

/// An option that names a file; an empty path is standard output if the option is `used` all the same.
struct NamedPath {
  const char* option;
  const std::string& path;
  bool used = true;
};

/// @throws Error{Errc::invalid_argument} if two of them are one file, however they are spelt. /dev/null may be several.
void require_distinct(std::initializer_list<NamedPath> paths);

/// The options `-o` and `--output` that every reporting subcommand has.
struct OutputOptions {
  Format format = Format::md;
  std::string path;
};

/// Writes to standard output. @throws Error{Errc::io} if it takes no more (full disk, closed pipe).
void write_stdout(std::string_view text);
/// Likewise to standard error, for what is a result there.
void write_stderr(std::string_view text);

}  // namespace sluice::tools
