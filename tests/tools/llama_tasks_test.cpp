#include <set>
#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tools/llama/tasks.hpp"

namespace {

using namespace sluice::tools;
using sluice::Error;

std::size_t count(std::string_view text, std::string_view what) {
  std::size_t found = 0;
  for (std::size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

/// Text between two markers after `from`; empty if there is none.
std::string between(std::string_view text, std::string_view before, std::string_view after, std::size_t from = 0) {
  const std::size_t begin = text.find(before, from);
  if (begin == std::string_view::npos) return "";
  const std::size_t end = text.find(after, begin + before.size());
  return std::string(text.substr(begin + before.size(), end - begin - before.size()));
}

std::string answer_of(const std::string& value) { return std::string(" ").append(value).append("\n"); }

/// Values of all needles whose key is `key`.
std::vector<std::string> needle_values(const std::string& prompt, const std::string& key) {
  std::vector<std::string> values;
  const std::string before = "\nOne of the special magic values for " + key + " is: ";
  for (std::size_t at = prompt.find(before); at != std::string::npos; at = prompt.find(before, at + 1)) {
    values.push_back(between(prompt, before, ".\n", at));
  }
  return values;
}

}  // namespace

TEST_CASE("a task is fixed by its arguments and changes with the seed", "[llama][tasks]") {
  for (const TaskKind kind : task_kinds()) {
    const Task once = make_task(kind, 2048, 5);
    const Task again = make_task(kind, 2048, 5);
    CAPTURE(to_string(kind));
    CHECK(once.prompt == again.prompt);
    CHECK(once.answer == again.answer);
    CHECK(once.prompt != make_task(kind, 2048, 6).prompt);
    CHECK(once.kind == kind);
    CHECK(parse_task_kind(to_string(kind)) == kind);
  }
  CHECK_THROWS_AS(parse_task_kind("nia"), Error);
}

TEST_CASE("the generator is the same on every platform", "[llama][tasks]") {
  const Task kv = make_task(TaskKind::kv, 512, 1);
  CHECK(kv.prompt.substr(0, 4) == "set ");
  std::uint64_t hash = 1469598103934665603ull;  // FNV-1a
  for (const TaskKind kind : task_kinds()) {
    // Of the kinds that were there before these.
    if (kind == TaskKind::multi) CHECK(hash == 6734762015300124477ull);
    if (kind == TaskKind::near_keys) CHECK(hash == 16067706216514778737ull);
    for (const char c : make_task(kind, 4096, 42).prompt)
      hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  }
  CHECK(hash == 10041712791956699093ull);
}

TEST_CASE("prompts have the length asked for, BOS included", "[llama][tasks]") {
  const auto length = GENERATE(512u, 513u, 1000u, 2048u, 32768u);
  for (const TaskKind kind : task_kinds()) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const std::size_t tokens = make_task(kind, length, seed).prompt.size() + 1;
      CAPTURE(to_string(kind), length, seed);
      REQUIRE(tokens <= length);
      const bool lines = kind == TaskKind::kv || kind == TaskKind::table || kind == TaskKind::count;
      REQUIRE(tokens + (lines ? 70 : 0) >= length);
    }
    CHECK_THROWS_AS(make_task(kind, 511, 0), Error);
  }
}

TEST_CASE("the asked key has exactly one needle, which holds the answer", "[llama][tasks]") {
  const auto kind = GENERATE(TaskKind::niah, TaskKind::niah_long, TaskKind::multikey);
  const auto length = GENERATE(512u, 4096u, 32768u);
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const Task task = make_task(kind, length, seed);
    const std::string& prompt = task.prompt;
    const std::size_t needles = count(prompt, "\nOne of the special magic values for ");
    std::string key;
    if (kind == TaskKind::niah_long) {
      key = between(prompt, "\nWhat is the special magic value for ", " mentioned in the text?");
      REQUIRE(prompt.ends_with(" mentioned in the text? The special magic value for " + key + " is"));
    } else {
      key = between(prompt, "\nQ: What is the special magic value for ", "?\nA:");
      REQUIRE(prompt.ends_with("?\nA:"));
    }
    CAPTURE(to_string(kind), length, seed, key);
    REQUIRE(needle_values(prompt, key).size() == 1);
    REQUIRE(task.answer == answer_of(needle_values(prompt, key).front()));
    REQUIRE(needles == (kind == TaskKind::multikey ? std::max<std::size_t>((length - 1) / 600, 2) : 1));
    // No other key begins with the asked one, or a model that stops reading early would be right too.
    REQUIRE(count(prompt, "magic values for " + key) == 1);
  }
}

TEST_CASE("kv has nothing but pairs with different keys", "[llama][tasks]") {
  const auto length = GENERATE(512u, 8192u, 131072u);
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const Task task = make_task(TaskKind::kv, length, seed);
    const std::string key = between(task.prompt, "\nget ", " ->");
    CAPTURE(length, seed, key);
    REQUIRE(task.prompt.ends_with("\nget " + key + " ->"));
    REQUIRE(task.answer == answer_of(between("\n" + task.prompt, "\nset " + key + " = ", "\n")));
    std::set<std::string> keys;
    std::size_t lines = 0;
    for (std::size_t at = 0; task.prompt.compare(at, 4, "set ") == 0; at = task.prompt.find('\n', at) + 1) {
      keys.insert(between(task.prompt, "set ", " = ", at));
      ++lines;
    }
    REQUIRE(keys.size() == lines);
    REQUIRE(lines > 10);
  }
}

TEST_CASE("track follows one assignment, copy repeats its passage", "[llama][tasks]") {
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    const Task track = make_task(TaskKind::track, 1024, seed);
    const std::string name = between(track.prompt, "\nVALUE OF VAR ", " IS");
    const std::string source = between(track.prompt, "\nVAR " + name + " = VAR ", "\n");
    CAPTURE(seed, name, source);
    REQUIRE(source != name);
    REQUIRE(track.answer == answer_of(between(track.prompt, "\nVAR " + source + " = ", "\n")));
    REQUIRE(track.prompt.ends_with(" IS"));

    const Task copy = make_task(TaskKind::copy, 1024, seed);
    const std::string cue = copy.prompt.substr(copy.prompt.find("\nREPEAT:\n") + 9);
    REQUIRE(count(copy.prompt, cue) == 2);
    REQUIRE(count(copy.prompt, cue + copy.answer) == 1);
  }
}

TEST_CASE("a haystack of one's own is read, wrapped around and kept whole between pieces", "[llama][tasks]") {
  std::string haystack;
  for (int i = 0; i < 40; ++i) haystack.append("int f").append(std::to_string(i)).append("(int x) { return x; }\n");
  const Task task = make_task(TaskKind::niah, 4096, 3, haystack);
  CHECK(task.prompt.size() + 1 == 4096);
  CHECK(count(task.prompt, "grass") == 0);
  CHECK(count(task.prompt, "int f17(int x)") >= 1);
  CHECK(make_task(TaskKind::niah, 4096, 3, "x").prompt.size() + 1 == 4096);
}

TEST_CASE("the evidence is the answer as the prompt says it", "[llama][tasks]") {
  for (const TaskKind kind : task_kinds()) {
    const Task task = make_task(kind, 3000, 5);
    CAPTURE(to_string(kind), task.answer);
    std::string said;
    for (const Evidence& place : task.evidence) {
      REQUIRE(place.begin < place.end);
      REQUIRE(place.end <= task.prompt.size());
      said += (said.empty() ? "" : ", ") + task.prompt.substr(place.begin, place.end - place.begin);
    }
    REQUIRE_FALSE(said.empty());
    if (kind == TaskKind::count) continue;  // It is said nowhere.
    REQUIRE((said + "\n" == task.answer || " " + said + "\n" == task.answer));
  }
}

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

TEST_CASE("output is judged by the whole answer", "[llama][tasks]") {
  const Task task{.kind = TaskKind::kv, .prompt = "", .answer = " 1234567\n"};
  CHECK(solved(task, " 1234567\n"));
  CHECK(solved(task, " 1234567\nset"));
  CHECK_FALSE(solved(task, " 1234567"));
  CHECK_FALSE(solved(task, " 12345678\n"));
  CHECK_FALSE(solved(task, "1234567\n"));
  CHECK_FALSE(solved(task, ""));
}
