// Tasks in which much looks like the answer's place, or much is between the fact and the question.
#include <array>
#include <set>

#include "tools/llama/task_writer.hpp"

namespace sluice::tools::tasks {
namespace {

/// A needle's key: adjective, noun and two digits.
using KeyParts = std::array<std::string, 4>;

std::string key_of(const KeyParts& parts) { return parts[0] + "-" + parts[1] + "-" + parts[2] + parts[3]; }

std::string part_of_key(Writer& writer, std::size_t part) {
  switch (part) {
    case 0: return std::string(kAdjectives[writer.below(kAdjectives.size())]);
    case 1: return std::string(kNouns[writer.below(kNouns.size())]);
    case 2: return writer.characters("123456789", 1);
    default: return writer.characters("0123456789", 1);
  }
}

/// Another key, which differs in one part; in two, once those are few.
std::string near_key(Writer& writer, const KeyParts& asked, std::set<std::string>& used) {
  constexpr int kPatience = 256;  // Draws; 95 keys differ in one part.
  for (int attempt = 0;; ++attempt) {
    KeyParts parts = asked;
    for (int changes = attempt < kPatience ? 1 : 2; changes > 0; --changes) {
      const std::size_t part = writer.below(parts.size());
      parts[part] = part_of_key(writer, part);
    }
    if (std::string key = key_of(parts); used.insert(key).second) return key;
  }
}

}  // namespace

Task near_keys(Writer& writer, std::size_t bytes, std::string_view haystack) {
  const std::size_t count = needles_in(bytes, 4);
  KeyParts asked;
  for (std::size_t part = 0; part < asked.size(); ++part) asked[part] = part_of_key(writer, part);
  std::set<std::string> used{key_of(asked)};
  const std::size_t place = writer.below(count);
  Strings pieces;
  std::string answer;
  for (std::size_t i = 0; i < count; ++i) {
    const std::string key = i == place ? key_of(asked) : near_key(writer, asked, used);
    const std::string value = writer.value();
    pieces.push_back(needle(key, value));
    if (i == place) answer = value;
  }
  return {.kind = TaskKind::near_keys,
          .prompt = bury(writer, pieces, bytes, haystack, needle_question(key_of(asked))),
          .answer = " " + answer + "\n"};
}

Task turns(Writer& writer, std::size_t bytes, std::string_view haystack) {
  const std::size_t questions = bytes < 1023 ? 2 : 4;  // What has room beside the needles.
  const std::size_t count = needles_in(bytes, questions);
  Strings keys;
  Strings answers;
  Strings pieces;
  for (std::size_t i = 0; i < count; ++i) {
    keys.push_back(writer.needle_key());
    const std::string value = writer.value();
    answers.push_back(" " + value + "\n");
    pieces.push_back(needle(keys.back(), value));
  }
  std::set<std::size_t> asked;
  std::string talk;
  std::string answer;
  while (asked.size() < questions) {
    const std::size_t next = writer.below(count);
    if (!asked.insert(next).second) continue;
    talk += answer + needle_question(keys[next]);
    answer = answers[next];
  }
  return {.kind = TaskKind::turns, .prompt = bury(writer, pieces, bytes, haystack, talk), .answer = answer};
}

Task copy(TaskKind kind, Writer& writer, std::size_t pairs, std::size_t bytes, std::string_view haystack) {
  constexpr std::size_t kCuePairs = 4;  // That the question gives away.
  std::string cue;
  std::string rest;
  for (std::size_t i = 0; i < pairs; ++i) {
    std::string& part = i < kCuePairs ? cue : rest;
    if (i > 0) part += " ";
    part += writer.adjective_noun();
  }
  rest += "\n";
  return {
      .kind = kind, .prompt = bury(writer, {"\n" + cue + rest}, bytes, haystack, "\nREPEAT:\n" + cue), .answer = rest};
}

}  // namespace sluice::tools::tasks
