// Tasks of eval: fixed by their seed, as long as they are asked to be, with one right answer that the text says.
#include <set>
#include <string>
#include <vector>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/tools/llama_task_texts.hpp"
#include "tools/llama/tasks.hpp"

using namespace sluice::tools;
using namespace sluice::test;
using sluice::Error;

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
    // In parts, so that what new kinds change is the last number alone.
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

TEST_CASE("output is judged by the whole answer", "[llama][tasks]") {
  const Task task{.kind = TaskKind::kv, .prompt = "", .answer = " 1234567\n"};
  CHECK(solved(task, " 1234567\n"));
  CHECK(solved(task, " 1234567\nset"));
  CHECK_FALSE(solved(task, " 1234567"));
  CHECK_FALSE(solved(task, " 12345678\n"));
  CHECK_FALSE(solved(task, "1234567\n"));
  CHECK_FALSE(solved(task, ""));
}
