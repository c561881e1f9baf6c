#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace sluice::test {

/// A directory of its own, removed at the end.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "sluice-cli-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = pattern;
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;

  [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }
  [[nodiscard]] std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return file(name);
  }
  [[nodiscard]] std::size_t entries() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// What a process left behind.
struct Outcome {
  int code = -1;  ///< -1: it did not exit by itself
  std::string out;
  std::string err;
};

/// Where `sluice` is.
std::string cli_path();

/// Runs `sluice` through the shell; `arguments` are shell words.
inline Outcome sluice(const std::string& arguments) {
  const ScratchDirectory scratch;
  const std::string command = std::string("'") + cli_path() + "' " + arguments + " >'" + scratch.file("out") + "' 2>'" +
                              scratch.file("err") + "'";
  const int status = std::system(command.c_str());
  return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
          .out = read_file(scratch.file("out")),
          .err = read_file(scratch.file("err"))};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// An error as the tool promises it: nothing on standard output, one line on standard error.
inline bool is_one_error(const Outcome& outcome) {
  return outcome.out.empty() && outcome.err.rfind("sluice: error: ", 0) == 0 &&
         outcome.err.find('\n') == outcome.err.size() - 1;
}

}  // namespace sluice::test
