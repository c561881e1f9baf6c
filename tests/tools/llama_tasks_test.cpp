// Files of tasks.
#include "tools/llama/tasks.hpp"

#include <string>

#include "sluice/error.hpp"
#include "tests/support/catch.hpp"
#include "tests/support/temporary_directory.hpp"
#include "tests/tools/llama_failure.hpp"
#include "tools/llama/presets.hpp"

using namespace sluice;
using namespace sluice::tools;
using sluice::test::TemporaryDirectory;

namespace {

std::vector<Task> tasks_of(const std::string& text, const ModelConfig& config = llama_tiny()) {
  const TemporaryDirectory scratch;
  return read_tasks(scratch.write("tasks", text), config);
}

}  // namespace

TEST_CASE("tasks are texts of bytes or token ids, with names and lengths or without", "[llama][tasks]") {
  const std::vector<Task> tasks = tasks_of(R"({"task": "niah", "length": 2048, "prompt": "ab", "answer": " c\n"})"
                                           "\n \r\n"
                                           R"({"prompt": [256, 7, 319], "answer": [8, 9]})");
  REQUIRE(tasks.size() == 2);
  CHECK(tasks[0].line == 1);
  CHECK(tasks[0].name == "niah");
  CHECK(tasks[0].length == 2048);
  CHECK(tasks[0].prompt == std::vector<int>{256, 'a', 'b'});
  CHECK(tasks[0].answer == std::vector<int>{' ', 'c', '\n'});
  CHECK(tasks[0].text);
  CHECK(tasks[1].line == 3);
  CHECK(tasks[1].name == "task");
  CHECK(tasks[1].length == 4);  // The next power of two.
  CHECK(tasks[1].prompt == std::vector<int>{256, 7, 319});
  CHECK_FALSE(tasks[1].text);
  CHECK(answer_limit(tasks[0], 0) == 3 + 8);
  CHECK(answer_limit(tasks[1], 0) == 2);
  CHECK(answer_limit(tasks[1], 5) == 5);
}

TEST_CASE("an answer is right if it begins with the right one", "[llama][tasks]") {
  const Task ids{.answer = {8, 9}};
  CHECK(is_right(ids, std::vector<int>{8, 9}));
  CHECK(is_right(ids, std::vector<int>{8, 9, 1}));
  CHECK_FALSE(is_right(ids, std::vector<int>{8}));
  CHECK_FALSE(is_right(ids, std::vector<int>{8, 1, 9}));
  CHECK_FALSE(is_right(ids, std::vector<int>{}));
  const Task text{.answer = {' ', 'o', 'k', '\n'}, .text = true};
  CHECK(is_right(text, std::vector<int>{'o', 'k'}));  // Without the blanks around it.
  CHECK(is_right(text, std::vector<int>{'\n', 'o', 'k', '!', 257}));
  CHECK_FALSE(is_right(text, std::vector<int>{' ', ' '}));
  CHECK_FALSE(is_right(text, std::vector<int>{'o', ' ', 'k'}));
}

TEST_CASE("what is no task is refused with its line", "[llama][tasks]") {
  struct Case {
    const char* line;
    const char* named;
  };
  const auto wrong = GENERATE(values<Case>({
      {"{", "malformed JSON"},
      {"[1]", "is no object"},
      {R"({"prompt": "a", "answer": "b", "sed": 1})", "'sed'"},
      {R"({"prompt": "a"})", "answer is neither"},
      {R"({"prompt": [], "answer": [1]})", "prompt is neither"},
      {R"({"prompt": [1, -1], "answer": [1]})", "prompt is neither"},
      {R"({"prompt": [1.5], "answer": [1]})", "prompt is neither"},
      {R"({"prompt": "a", "answer": " \n"})", "answer is blank"},
      {R"({"prompt": "a", "answer": "b", "task": 3})", "task is no text"},
      {R"({"prompt": "a", "answer": "b", "length": 0})", "length is no whole number"},
      {R"({"prompt": "a", "answer": "b", "length": "2K"})", "length is no whole number"},
      {R"({"prompt": "a", "answer": "b", "length": 4294967296})", "length is no whole number"},
  }));
  CAPTURE(wrong.line);
  const auto failure = test::failure_of([&] { (void)tasks_of(std::string("\n") + wrong.line); });
  CHECK(failure.code == Errc::corrupt);
  CHECK(test::mentions(failure.message, {"line 2", wrong.named}));
  const auto nothing = test::failure_of([] { (void)tasks_of(" \n\n"); });
  CHECK(nothing.code == Errc::corrupt);
  CHECK(test::mentions(nothing.message, {"has no tasks"}));
}

TEST_CASE("tasks of another vocabulary are refused", "[llama][tasks]") {
  const auto failure = test::failure_of([] { (void)tasks_of(R"({"prompt": [320], "answer": [1]})"); });
  CHECK(failure.code == Errc::invalid_argument);
  CHECK(test::mentions(failure.message, {"line 1", "token 320", "below 320"}));
  ModelConfig words = llama_tiny();
  words.vocab_size = 1000;
  CHECK(tasks_of(R"({"prompt": [999], "answer": [1]})", words).size() == 1);
  const auto text = test::failure_of([&] { (void)tasks_of(R"({"prompt": "a", "answer": [1]})", words); });
  CHECK(text.code == Errc::invalid_argument);
  CHECK(test::mentions(text.message, {"line 1", "prompt is a text", "--token-ids"}));
}
