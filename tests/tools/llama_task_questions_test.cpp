// Tasks of eval whose answers have several parts, are counted, or are easily taken for others.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/tools/llama_task_texts.hpp"
#include "tools/llama/tasks.hpp"

using namespace sluice::tools;
using namespace sluice::test;

TEST_CASE("multi asks for all values of a key in the text's order, or for those of three keys", "[llama][tasks]") {
  std::set<std::size_t> counts;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const std::uint32_t length = seed % 2 == 0 ? 512 : 4096;
    const Task task = make_task(TaskKind::multi, length, seed);
    CAPTURE(length, seed, task.answer);
    std::string want;
    std::string key = between(task.prompt, "\nQ: What are all the special magic values for ", "?\nA:");
    if (!key.empty()) {
      const std::vector<std::string> values = needle_values(task.prompt, key);
      REQUIRE(values.size() >= 2);
      REQUIRE(values.size() <= 4);
      counts.insert(values.size());
      for (const std::string& value : values) want += (want.empty() ? " " : ", ") + value;
    } else {
      const std::string first = between(task.prompt, "\nQ: What are the special magic values for ", ", ");
      const std::string second = between(task.prompt, "magic values for " + first + ", ", " and ");
      const std::string third = between(task.prompt, ", " + second + " and ", "?\nA:");
      for (const std::string& each : {first, second, third}) {
        const std::vector<std::string> values = needle_values(task.prompt, each);
        REQUIRE(values.size() == 1);
        want += (want.empty() ? " " : ", ") + values[0];
      }
      counts.insert(1);
    }
    REQUIRE(task.answer == want + "\n");
    REQUIRE(count(task.prompt, "\nOne of the special") == std::max<std::size_t>((length - 1) / 600, 4));
  }
  REQUIRE(counts == std::set<std::size_t>{1, 2, 3, 4});
}

TEST_CASE("table asks for the row of an owner, or for all codes of a city in the text's order", "[llama][tasks]") {
  std::set<std::size_t> counts;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const std::uint32_t length = seed % 2 == 0 ? 512 : 4096;
    const Task task = make_task(TaskKind::table, length, seed);
    CAPTURE(length, seed, task.prompt, task.answer);
    REQUIRE(task.prompt.starts_with("row 0001: city="));
    const std::string city = between(task.prompt, "all city=", " ->");
    if (city.empty()) {
      const std::string owner = between(task.prompt, "find owner=", " ->");
      REQUIRE(count(task.prompt, " owner=" + owner + "\n") == 1);
      const std::size_t line = task.prompt.rfind("row ", task.prompt.find(" owner=" + owner + "\n"));
      REQUIRE(task.answer == " row " + between(task.prompt, "row ", " owner=", line) + "\n");
      continue;
    }
    std::string want;
    const std::string mark = ": city=" + city + " code=";
    for (std::size_t at = task.prompt.find(mark); at != std::string::npos; at = task.prompt.find(mark, at + 1))
      want += (want.empty() ? " " : ", ") + between(task.prompt, mark, " ", at);
    REQUIRE(task.answer == want + "\n");
    counts.insert(count(task.prompt, mark));
  }
  REQUIRE(*counts.begin() >= 1);
  REQUIRE(*counts.rbegin() <= 5);
  REQUIRE(counts.size() >= 3);
}

TEST_CASE("near_keys has no key that differs from the asked one in more than a word or a digit", "[llama][tasks]") {
  const auto length = GENERATE(512u, 4096u, 32768u);
  std::set<std::size_t> parts;  // In which others differ.
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Task task = make_task(TaskKind::near_keys, length, seed);
    const std::string& prompt = task.prompt;
    const std::string key = between(prompt, "\nQ: What is the special magic value for ", "?\nA:");
    CAPTURE(length, seed, key);
    REQUIRE(prompt.ends_with(key + "?\nA:"));
    REQUIRE(task.answer == answer_of(needle_values(prompt, key).front()));
    const auto split = [](const std::string& text) {
      const std::size_t noun = text.find('-') + 1;
      return std::vector<std::string>{text.substr(0, noun), text.substr(noun, text.size() - 2 - noun),
                                      text.substr(text.size() - 2, 1), text.substr(text.size() - 1)};
    };
    const std::vector<std::string> asked = split(key);
    std::set<std::string> keys;
    const std::string before = "\nOne of the special magic values for ";
    for (std::size_t at = prompt.find(before); at != std::string::npos; at = prompt.find(before, at + 1)) {
      const std::string other = between(prompt, before, " is: ", at);
      REQUIRE(keys.insert(other).second);
      const std::vector<std::string> read = split(other);
      std::size_t differ = 0;
      for (std::size_t part = 0; part < read.size(); ++part) {
        if (read[part] == asked[part]) continue;
        ++differ;
        parts.insert(part);
      }
      REQUIRE(differ == (other == key ? 0 : 1));
    }
    REQUIRE(keys.size() == std::max<std::size_t>((length - 1) / 600, 4));
  }
  REQUIRE(parts.size() == 4);
  // Once no more differ in one part, others differ in two.
  REQUIRE(count(make_task(TaskKind::near_keys, 131072, 1).prompt, "\nOne of the special") == 218);
}

TEST_CASE("turns answers all questions but the last, and asks none twice", "[llama][tasks]") {
  const auto length = GENERATE(512u, 1024u, 8192u);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Task task = make_task(TaskKind::turns, length, seed);
    const std::string asks = "\nQ: What is the special magic value for ";
    std::set<std::string> keys;
    CAPTURE(length, seed);
    for (std::size_t at = task.prompt.find(asks); at != std::string::npos; at = task.prompt.find(asks, at + 1)) {
      const std::string key = between(task.prompt, asks, "?\nA:", at);
      REQUIRE(needle_values(task.prompt, key).size() == 1);
      const std::string answer = answer_of(needle_values(task.prompt, key).front());
      const bool last = task.prompt.find(asks, at + 1) == std::string::npos;
      if (last) {
        REQUIRE(task.answer == answer);
        REQUIRE(task.prompt.ends_with(key + "?\nA:"));
      } else {
        REQUIRE(task.prompt.compare(task.prompt.find("?\nA:", at) + 4, answer.size() + 1, answer + "\n") == 0);
      }
      REQUIRE(keys.insert(key).second);
    }
    REQUIRE(keys.size() == (length < 1024 ? 2 : 4));
  }
}

TEST_CASE("count counts the records of a city, up to nine", "[llama][tasks]") {
  std::set<std::size_t> counts;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const Task task = make_task(TaskKind::count, seed % 2 == 0 ? 512 : 4096, seed);
    const std::string city = between(task.prompt, "\ncount city=", " ->");
    CAPTURE(seed, city);
    REQUIRE(task.prompt.ends_with("count city=" + city + " ->"));
    const std::size_t found = count(task.prompt, ": city=" + city + " code=");
    REQUIRE(task.answer == answer_of(std::to_string(found)));
    REQUIRE(task.evidence.size() == found);
    for (const Evidence& place : task.evidence)
      REQUIRE(task.prompt.substr(place.begin, place.end - place.begin) == city);
    counts.insert(found);
  }
  REQUIRE(*counts.begin() == 1);
  REQUIRE(*counts.rbegin() == 9);
}

TEST_CASE("long_copy repeats a passage that grows with the text", "[llama][tasks]") {
  for (const auto& [length, pairs] : {std::pair(512u, 16u), {1200u, 29u}, {1921u, 48u}, {32768u, 48u}}) {
    const Task task = make_task(TaskKind::long_copy, length, 3);
    const std::string cue = task.prompt.substr(task.prompt.find("\nREPEAT:\n") + 9);
    CAPTURE(length, cue, task.answer);
    REQUIRE(count(task.prompt, cue) == 2);
    REQUIRE(count(task.prompt, cue + task.answer) == 1);
    REQUIRE(count(cue + task.answer, "-") == pairs);
  }
}
