#pragma once

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/data.hpp"
#include "tests/support/temporary_directory.hpp"

namespace sluice::test {

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The testbed with another config.json: links, in `scratch`. Returns the model's folder.
inline std::string testbed_with(const TemporaryDirectory& scratch, const std::string& config) {
  const std::string written = scratch.write("model/config.json", config);
  const std::filesystem::path model = std::filesystem::path(written).parent_path();
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(test_data()) / "testbed")) {
    if (entry.path().filename() != "config.json")
      std::filesystem::create_symlink(entry.path(), model / entry.path().filename());
  }
  return model.string();
}

/// What a process left behind.
struct Outcome {
  int code = -1;  ///< -1: it did not exit by itself
  std::string out;
  std::string err;
};

/// Where `sluice` is.
std::string cli_path();

/// `--model` with the testbed, as shell words.
inline std::string testbed_model() { return "--model '" + test_data() + "/testbed' "; }

/// `--tasks` with a file of `lines`, as shell words.
inline std::string tasks_of(const TemporaryDirectory& scratch, const std::string& lines) {
  return "--tasks '" + scratch.write("tasks.jsonl", lines) + "' ";
}

/// The testbed's tasks of 512 tokens, which it answers: niah, multikey and kv.
inline std::string short_tasks() {
  std::ifstream file(test_data() + "/testbed/tasks.jsonl");
  std::string tasks;
  for (std::string line; std::getline(file, line);) {
    if (line.find("\"length\": 512,") != line.npos) tasks += line + "\n";
  }
  return tasks;
}

/// Runs a command line of the shell.
inline Outcome shell(const std::string& command) {
  const TemporaryDirectory scratch;
  const std::string outputs = "exec >'" + scratch.file("out") + "' 2>'" + scratch.file("err") + "'\n";
  const int status = std::system((outputs + command).c_str());
  return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
          .out = read_file(scratch.file("out")),
          .err = read_file(scratch.file("err"))};
}

/// Runs `sluice` through the shell; `arguments` are shell words.
inline Outcome sluice(const std::string& arguments) { return shell("'" + cli_path() + "' " + arguments); }

/// Likewise, where CUDA shows no GPU.
inline Outcome without_gpu(const std::string& arguments) {
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  return sluice(arguments);
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// An error as the tool promises it: nothing on standard output, one line on standard error.
inline bool is_one_error(const Outcome& outcome) {
  return outcome.out.empty() && outcome.err.rfind("sluice: error: ", 0) == 0 &&
         outcome.err.find('\n') == outcome.err.size() - 1;
}

}  // namespace sluice::test
