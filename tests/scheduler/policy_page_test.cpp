// docs/policies.md says what the parser does: grammar, options with their defaults, presets, who chooses; and the code
// that it shows is code that is compiled.

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "scheduler/plan/forward_rows.hpp"
#include "tests/scheduler/complaints.hpp"

using namespace sluice;

namespace {

std::string read(const std::string& path) {
  std::ifstream file(std::string(SLUICE_ROOT "/") + path);
  CAPTURE(path);
  REQUIRE(file);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string page() { return read("docs/policies.md"); }

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

/// Cells of the rows of tables from one heading to another, without blanks and backticks around them.
std::vector<std::vector<std::string>> rows_between(const std::string& from, const std::string& to) {
  const std::string text = page();
  const std::size_t begin = text.find("\n" + from + "\n"), end = text.find("\n" + to + "\n");
  REQUIRE(begin < end);
  REQUIRE(end != std::string::npos);
  std::vector<std::vector<std::string>> rows;
  for (const std::string& line : lines_of(text.substr(begin, end - begin))) {
    if (line.rfind("| `", 0) != 0) continue;
    std::vector<std::string> cells;
    std::string cell;
    const std::string bare = replaced(line.substr(1), "\\|", "\x01");
    for (const char c : bare) {
      if (c != '|') {
        cell += c;
        continue;
      }
      const std::size_t first = cell.find_first_not_of(" `"), last = cell.find_last_not_of(" `");
      cells.push_back(first == std::string::npos ? "" : replaced(cell.substr(first, last - first + 1), "\x01", "|"));
      cell.clear();
    }
    rows.push_back(cells);
  }
  return rows;
}

PolicySpec parsed(const std::string& text) {
  CAPTURE(text);
  PolicySpec spec;
  REQUIRE_NOTHROW(spec = parse_policy(text));
  spec.name.clear();
  return spec;
}

/// A policy in which this option stands.
std::string policy_with(const std::string& option, bool is_source) {
  if (is_source) return option + (option == "all" || option == "none" ? "" : " | top_k=max(64, 2%)");
  // Stages of one policy, which do not go without each other.
  if (option.rfind("skewed", 0) == 0) return "exact | within=4 | " + option;
  if (option.rfind("within", 0) == 0) return "exact | skewed=20% | " + option;
  if (option.rfind("sample=", 0) == 0) return "exact | int4 | " + option;
  if (option == "rehearsed") return "exact | skewed=20% | within=4 | dense=1 | rehearsed";
  const char* source = option.rfind("fitted", 0) == 0        ? "clusters"
                       : option.rfind("progressive", 0) == 0 ? "pages"
                       : option.rfind("sampled", 0) == 0     ? "lsh"
                                                             : "exact";
  return source + (option.empty() ? "" : " | " + option);
}

/// What a complaint says that there is: words between "there are " and the end.
std::vector<std::string> words_after(const std::string& policy) {
  const std::string message = scheduler::test::complaint(policy);
  const std::size_t at = message.find("there are ");
  CAPTURE(policy, message);
  REQUIRE(at != std::string::npos);
  std::vector<std::string> words(1);
  for (const char c : message.substr(at + 10)) {
    if (c == ' ' || c == ',') {
      if (!words.back().empty()) words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  return words;
}

}  // namespace

TEST_CASE("the page's grammar is that of the header", "[policy_page]") {
  const std::string header = read("include/sluice/policy.hpp");
  const std::string first = "///   policy  = ", last = "///   options = ";
  const std::size_t begin = header.find(first), end = header.find('\n', header.find(last));
  REQUIRE(begin < end);
  REQUIRE(holds(page(), "```text\n" + replaced(header.substr(begin, end - begin), "///   ", "") + "\n```"));
}

TEST_CASE("the page's options have the defaults that it says", "[policy_page]") {
  const auto sources = rows_between("### Sources", "### Stages");
  const auto stages = rows_between("### Stages", "### Behind a preset's name");
  REQUIRE(sources.size() > 30);
  REQUIRE(stages.size() > 10);
  for (const auto* table : {&sources, &stages}) {
    const bool is_source = table == &sources;
    for (const auto& row : *table) {
      std::string option = row.at(0);
      const bool given = holds(option, "TOKENS");  // No default: that it parses is all.
      for (const auto& [word, value] : {std::pair{"TOKENS", "512"}, {"CHANNELS", "16"}, {"SHARE", "0.9"},
                                        {"LOGITS", "4"}, {"sample=COUNT", "sample=128"}})
        option = replaced(option, word, value);
      CAPTURE(option);
      const std::size_t list = is_source ? option.find(':') : holds(option, "(") ? std::string::npos : option.find(',');
      const bool has_default = is_source || list != std::string::npos || (holds(option, "=") && option == row.at(0));
      // What it is without the option, or without the stage.
      const std::string base = list != std::string::npos ? option.substr(0, list) : is_source ? option : "";
      const PolicySpec with = parsed(policy_with(option, is_source));
      if (has_default && !given) REQUIRE(with == parsed(policy_with(base, is_source)));
    }
  }
}

TEST_CASE("options behind a preset's name are there", "[policy_page]") {
  const auto rows = rows_between("### Behind a preset's name", "## What a choice costs");
  REQUIRE(rows.size() >= 6);
  for (const auto& row : rows) (void)parsed(replaced(replaced(row.at(0), "COUNT", "512"), "SHARE", "0.9"));
  for (const std::string& key : words_after("lfps:no_such_key=1")) {
    CAPTURE(key);
    const std::string text = page();
    REQUIRE((holds(text, ":" + key + "=") || holds(text, "," + key + "=")));
  }
}

TEST_CASE("no source, stage or option is missing on the page", "[policy_page]") {
  const auto named = [](const std::string& from, const std::string& to, const std::string& start) {
    const auto rows = rows_between(from, to);
    CAPTURE(start);
    REQUIRE(std::any_of(rows.begin(), rows.end(), [&](const auto& row) { return row.at(0).rfind(start, 0) == 0; }));
  };
  for (const std::string& stage : words_after("exact | no_such_stage"))
    named("### Stages", "### Behind a preset's name", stage);
  for (const std::string& source : words_after("exact+no_such_source")) {
    if (source == "joined") break;  // by +
    named("### Sources", "### Stages", source);
  }
  for (const std::string source : {"history", "pages", "clusters", "lsh", "snapshot", "labels"}) {
    for (const std::string& key : words_after(source + ":no_such_key=1"))
      named("### Sources", "### Stages", source + ":" + key + "=");
  }
  for (const std::string& key : words_after("exact | verified=0.9,no_such_key=1"))
    named("### Stages", "### Behind a preset's name", "verified=SHARE," + key + "=");
  for (const std::string& key : words_after("exact | int4 | sample=9,no_such_key=1"))
    named("### Stages", "### Behind a preset's name", "sample=COUNT," + key + "=");
  for (const std::string stage : {"progressive=SHARE", "bypass=SHARE", "near=0%", "dense=0"}) {
    const std::string policy = "pages | " + replaced(stage, "SHARE", "0.9") + ",no_such_key=1";
    for (const std::string& key : words_after(policy))
      named("### Stages", "### Behind a preset's name", stage + "," + key + "=");
  }
}

TEST_CASE("the page's presets are those that there are, and it says who chooses", "[policy_page]") {
  const auto rows = rows_between("## Presets", "## Write your own");
  REQUIRE(rows.size() == policy_presets().size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const PolicyPreset& preset = policy_presets()[i];
    const scheduler::Chooser chooser = scheduler::chooser(preset.spec);
    REQUIRE(chooser != scheduler::Chooser::neither);
    REQUIRE(rows[i] == std::vector<std::string>{preset.spec.name, to_string(preset.spec),
                                                chooser == scheduler::Chooser::device ? "device" : "CPU",
                                                preset.summary});
  }
}

TEST_CASE("who chooses is what the page says", "[policy_page]") {
  using scheduler::Chooser;
  for (const char* text : {"all", "none", "exact | int4", "exact | int4 | top_p=0.9", "exact | int4 | sample=9", "pages | int4",
                           "pages | int4 | top_p=0.9", "pages | top_k=all"})
    REQUIRE(scheduler::chooser(parse_policy(text)) == Chooser::device);
  for (const char* text : {"exact", "pages", "history | int4", "exact+pages | int4", "pages | top_k=all | bypass=0.9",
                           "labels", "labels | int4 | top_p=0.9", "exact | hadamard", "exact | int4 | verified=0.1",
                           "snapshot", "history | bypass=0.9"})
    REQUIRE(scheduler::chooser(parse_policy(text)) == Chooser::cpu);
  for (const char* text : {"exact | int4 | bypass=0.9", "pages | int4 | bypass=0.9"})
    REQUIRE(scheduler::chooser(parse_policy(text)) == Chooser::neither);
}

TEST_CASE("the page's programs are those that are compiled", "[policy_page]") {
  const std::string sources = read("scheduler/policy/quest.cpp") + read("tests/scheduler/example_policy_test.cpp");
  const std::string text = page(), fence = "```cpp\n";
  int programs = 0;
  for (std::size_t at = 0; (at = text.find(fence, at)) != std::string::npos; ++programs) {
    at += fence.size();
    const std::string program = text.substr(at, text.find("```", at) - at);
    CAPTURE(program);
    REQUIRE(holds(sources, program));
  }
  REQUIRE(programs == 2);
}
