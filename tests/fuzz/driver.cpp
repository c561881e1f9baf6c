// Runs a fuzz target without libFuzzer: mutated seeds of a corpus, the same for the same --seed on every machine.
//
//   fuzz_policy [--cases N] [--seed S] [--dict FILE] [--findings DIR] CORPUS...
//
// CORPUS is a directory of seeds, or one file: with `--cases 1` that alone is run, as to repeat a finding.

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/finding.hpp"
#include "tests/fuzz/mutate.hpp"

namespace {

namespace fs = std::filesystem;
using namespace sluice::test;

struct Options {
  std::uint64_t cases = 5000;
  std::uint64_t seed = 1;
  std::string dictionary;
  std::string findings = ".";
  std::vector<std::string> corpus;
};

std::uint64_t whole_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    throw std::runtime_error("'" + std::string(text) + "' is not a whole number");
  return value;
}

Options read_options(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    if (!name.starts_with("--")) {
      options.corpus.push_back(name);
      continue;
    }
    if (++i == arguments.size()) throw std::runtime_error(name + " needs a value");
    if (name == "--cases") {
      options.cases = whole_number(arguments[i]);
    } else if (name == "--seed") {
      options.seed = whole_number(arguments[i]);
    } else if (name == "--dict") {
      options.dictionary = arguments[i];
    } else if (name == "--findings") {
      options.findings = arguments[i];
    } else {
      throw std::runtime_error("there is no option " + name + "; there are --cases, --seed, --dict, --findings");
    }
  }
  return options;
}

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<std::string> read_corpus(const std::vector<std::string>& paths) {
  std::vector<fs::path> files;
  for (const std::string& path : paths) {
    if (fs::is_directory(path)) {
      for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path());
    } else {
      files.emplace_back(path);
    }
  }
  std::sort(files.begin(), files.end());  // directories list in any order
  std::vector<std::string> corpus;
  for (const fs::path& file : files) corpus.push_back(read_file(file));
  if (corpus.empty()) throw std::runtime_error("the corpus is empty; name a directory of seeds");
  return corpus;
}

/// A word in quotes, with \\, \" and \xAB, as in libFuzzer's dictionaries.
std::string unquoted(std::string_view line) {
  std::string word;
  for (std::size_t i = 1; i + 1 < line.size(); ++i) {
    if (line[i] != '\\') {
      word += line[i];
    } else if (line[i + 1] == 'x' && i + 4 < line.size()) {
      word += static_cast<char>(std::stoi(std::string(line.substr(i + 2, 2)), nullptr, 16));
      i += 3;
    } else {
      word += line[++i];
    }
  }
  return word;
}

std::vector<std::string> read_dictionary(const std::string& path) {
  std::vector<std::string> words;
  if (path.empty()) return words;
  std::ifstream in(path);
  if (!in) throw std::runtime_error("cannot read " + path);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with('"')) words.push_back(unquoted(line));
  }
  return words;
}

void fuzz(const Options& options, const Mutator& mutator, const std::string& target) {
  FindingWriter writer;
  const std::string name = target + "-" + std::to_string(options.seed) + "-";
  for (std::uint64_t number = 0; number < options.cases; ++number) {
    const std::string input = mutator.make(number);
    const std::string file = (fs::path(options.findings) / ("finding-" + name + std::to_string(number))).string();
    writer.run(input, file);
  }
  std::printf("%s: %llu cases of seed %llu, no finding\n", target.c_str(),
              static_cast<unsigned long long>(options.cases), static_cast<unsigned long long>(options.seed));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  std::optional<Mutator> mutator;
  try {
    options = read_options({argv + 1, argv + argc});
    mutator.emplace(read_corpus(options.corpus), read_dictionary(options.dictionary), options.seed);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fuzz: %s\n", error.what());
    return 2;
  }
  // Outside of try: what a target lets escape has to end the process where it was thrown.
  fuzz(options, *mutator, fs::path(argv[0]).filename().string());
}
