#pragma once

#include <filesystem>

namespace sluice::test {

/// Where files of fuzz targets are: in memory where the system has such a place, as parsers that read files run often.
inline std::filesystem::path scratch_root() {
  const std::filesystem::path shared = "/dev/shm";
  std::error_code ignored;
  return std::filesystem::is_directory(shared, ignored) ? shared : std::filesystem::temp_directory_path();
}

}  // namespace sluice::test
