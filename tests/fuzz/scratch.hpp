#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace sluice::test {

/// A directory of the process, in memory where the system has such a place: parsers that read files are run often.
class Scratch {
 public:
  Scratch() {
    const std::filesystem::path shared = "/dev/shm";
    std::error_code ignored;
    const auto root = std::filesystem::is_directory(shared, ignored) ? shared : std::filesystem::temp_directory_path();
    std::string pattern = (root / "sluice-fuzz-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make " + pattern);
    path_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] std::filesystem::path write(const std::string& name, std::string_view bytes) const {
    std::ofstream out(path_ / name, std::ios::binary | std::ios::trunc);
    if (!out.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush())
      throw std::runtime_error("cannot write " + (path_ / name).string());
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace sluice::test
