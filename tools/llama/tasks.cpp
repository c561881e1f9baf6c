#include "tools/llama/tasks.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <string_view>

#include "sluice/error.hpp"
#include "tools/llama/files.hpp"
#include "tools/llama/json_text.hpp"
#include "tools/llama/tokenizer.hpp"

namespace sluice::tools {
namespace {

using nlohmann::json;

constexpr std::uint32_t kSpareBytes = 8;  ///< of an answer that is a text, and may have blanks around it

/// One line of a file.
class Reader {
 public:
  Reader(const json& said, std::string where, const ModelConfig& config)
      : said_(said), where_(std::move(where)), config_(config) {
    if (!said.is_object()) refuse(" is no object");
    for (const auto& [key, value] : said.items()) {
      if (key != "task" && key != "length" && key != "prompt" && key != "answer")
        refuse(" has '" + shortened(key) + "'");
    }
  }

  [[nodiscard]] Task task() const {
    Task task{.name = "task", .prompt = tokens("prompt"), .answer = tokens("answer"), .text = text("answer")};
    if (text("prompt")) task.prompt.insert(task.prompt.begin(), ByteTokenizer::kBos);
    task.length = static_cast<std::uint32_t>(std::bit_ceil(task.prompt.size()));
    if (said_.contains("task")) {
      if (!said_["task"].is_string()) refuse(": task is no text");
      task.name = said_["task"];
    }
    if (said_.contains("length")) {
      const json& length = said_["length"];
      if (!length.is_number_unsigned() || length == 0 || length > std::numeric_limits<std::uint32_t>::max())
        refuse(": length is no whole number above 0");
      task.length = length;
    }
    return task;
  }

 private:
  [[noreturn]] void refuse(const std::string& cause) const {
    throw Error(Errc::corrupt, where_ + cause +
                                   "; a task is an object of prompt and answer, each a text or a list of token ids, "
                                   "and if you like task (a name) and length");
  }

  [[nodiscard]] bool text(const char* key) const { return said_.contains(key) && said_[key].is_string(); }

  [[nodiscard]] std::vector<int> tokens(const char* key) const {
    return text(key) ? bytes(key, said_[key].get<std::string>()) : ids(key);
  }

  [[nodiscard]] std::vector<int> bytes(const std::string& key, const std::string& text) const {
    if (!ByteTokenizer::fits(config_)) {
      throw Error(Errc::invalid_argument,
                  where_ + ": " + key +
                      " is a text, and this model's tokens are no bytes; write token ids, as `python -m sluice eval "
                      "--make-tasks FILE --token-ids` does");
    }
    if (text.find_first_not_of(" \t\r\n") == text.npos) refuse(": " + key + " is blank");
    std::vector<int> ids = ByteTokenizer::encode(text);
    ids.erase(ids.begin());
    return ids;
  }

  [[nodiscard]] std::vector<int> ids(const char* key) const {
    const json list = said_.value(key, json());
    const bool numbers = list.is_array() && std::ranges::all_of(list, &json::is_number_unsigned);
    if (!numbers || list.empty()) refuse(std::string(": ") + key + " is neither");
    std::vector<int> ids;
    for (const json& id : list) {
      if (id >= config_.vocab_size) {
        throw Error(Errc::invalid_argument, where_ + " has token " + id.dump() + ", and those of the model are below " +
                                                std::to_string(config_.vocab_size) +
                                                "; are they of another tokenizer?");
      }
      ids.push_back(id);
    }
    return ids;
  }

  const json& said_;
  std::string where_;
  const ModelConfig& config_;
};

std::string stripped(const std::string& text) {
  constexpr const char* kBlanks = " \t\r\n\f\v";
  const std::size_t begin = text.find_first_not_of(kBlanks);
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

}  // namespace

std::vector<Task> read_tasks(const std::string& path, const ModelConfig& config) {
  const std::string file = read_text_file(path);
  std::vector<Task> tasks;
  std::size_t number = 1;
  for (std::size_t at = 0; at < file.size(); ++number) {
    const std::size_t end = std::min(file.find('\n', at), file.size());
    const std::string_view line = std::string_view(file).substr(at, end - at);
    at = end + 1;
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    const std::string where = path + ", line " + std::to_string(number);
    tasks.push_back(Reader(parse_json(line, where), where, config).task());
    tasks.back().line = number;
  }
  if (tasks.empty()) {
    throw Error(Errc::corrupt, path + R"( has no tasks; write one on each line, as {"prompt": [1, 2], "answer": [3]})");
  }
  return tasks;
}

std::uint32_t answer_limit(const Task& task, std::uint32_t max_tokens) noexcept {
  if (max_tokens != 0) return max_tokens;
  return static_cast<std::uint32_t>(task.answer.size()) + (task.text ? kSpareBytes : 0);
}

bool is_right(const Task& task, std::span<const int> output) {
  if (task.text)
    return stripped(ByteTokenizer::decode(output)).starts_with(stripped(ByteTokenizer::decode(task.answer)));
  return output.size() >= task.answer.size() && std::ranges::equal(output.first(task.answer.size()), task.answer);
}

}  // namespace sluice::tools
