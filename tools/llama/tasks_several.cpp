// Tasks whose answers are put together from several places of the text.
#include <algorithm>
#include <set>
#include <utility>

#include "tools/llama/task_writer.hpp"

namespace sluice::tools::tasks {
namespace {

struct Pair {
  std::string key;
  std::string value;
};

std::string seven_digits(Writer& writer) {
  return writer.characters("123456789", 1) + writer.characters("0123456789", 6);
}

template <class T>
void shuffle(Writer& writer, std::vector<T>& items) {
  for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[writer.below(i)]);
}

/// `times` values of a new key.
void add_key(Writer& writer, std::size_t times, std::vector<Pair>& pairs) {
  const std::string key = writer.needle_key();
  for (std::size_t i = 0; i < times; ++i) pairs.push_back({.key = key, .value = seven_digits(writer)});
}

std::string listed(const Strings& values) {
  std::string text;
  for (const std::string& value : values) text.append(text.empty() ? " " : ", ").append(value);
  return text + "\n";
}

/// Four digits.
std::string row_number(std::size_t number) {
  std::string digits = std::to_string(number % 10'000);
  return digits.insert(0, 4 - digits.size(), '0');
}

struct Record {
  std::string city, code, owner;
  [[nodiscard]] std::string head(std::size_t row) const {
    return "row " + row_number(row) + ": city=" + city + " code=" + code;
  }
  [[nodiscard]] std::string line(std::size_t row) const { return head(row) + " owner=" + owner + "\n"; }
};

std::string other_city(Writer& writer, const std::string& than) {
  while (true) {
    if (std::string city = writer.adjective_noun(); city != than) return city;
  }
}

/// Bytes of a record at most.
constexpr std::size_t kLongestLine = 56;

/// `times` different numbers below `count`, which is at least as many.
std::set<std::size_t> places(Writer& writer, std::size_t times, std::size_t count) {
  std::set<std::size_t> found;
  while (found.size() < times) found.insert(writer.below(count));
  return found;
}

/// As many as fit; those whose numbers are in `here` are of that city, and no others.
std::vector<Record> records_of(Writer& writer, std::size_t bytes, const std::string& city,
                               const std::set<std::size_t>& here) {
  std::vector<Record> records;
  for (std::size_t used = 0;;) {
    Record next{.city = here.contains(records.size()) ? city : other_city(writer, city),
                .code = writer.characters("0123456789", 5),
                .owner = writer.owner()};
    used += next.line(0).size();
    if (used > bytes) return records;
    records.push_back(std::move(next));
  }
}

}  // namespace

Task multi(Writer& writer, std::size_t bytes, std::string_view haystack) {
  constexpr std::size_t kLeast = 4;
  const std::size_t count = needles_in(bytes, kLeast);
  const bool all_of_one = writer.below(2) == 0;
  std::vector<Pair> pairs;
  if (all_of_one) {
    add_key(writer, 2 + writer.below(3), pairs);
  } else {
    for (int i = 0; i < 3; ++i) add_key(writer, 1, pairs);
  }
  Strings asked;  // Keys.
  for (const Pair& pair : pairs) {
    if (asked.empty() || asked.back() != pair.key) asked.push_back(pair.key);
  }
  // Others have several values, too.
  while (pairs.size() < count)
    add_key(writer, std::min(count - pairs.size(), writer.below(3) == 0 ? 2 + writer.below(3) : 1), pairs);
  shuffle(writer, pairs);
  Strings pieces;
  for (const Pair& pair : pairs) pieces.push_back(needle(pair.key, pair.value));
  const std::string question = all_of_one ? "\nQ: What are all the special magic values for " + asked[0] + "?\nA:"
                                          : "\nQ: What are the special magic values for " + asked[0] + ", " + asked[1] +
                                                " and " + asked[2] + "?\nA:";
  Task task{.kind = TaskKind::multi, .prompt = bury(writer, pieces, bytes, haystack, question), .answer = {}};
  Strings values;
  for (const std::string& key : asked) {
    for (const Pair& pair : pairs) {
      if (pair.key != key) continue;
      values.push_back(pair.value);
      const Evidence place = said(task.prompt, needle(pair.key, pair.value));
      task.evidence.push_back(said(task.prompt, pair.value, place.begin));
    }
  }
  task.answer = listed(values);
  return task;
}

Task table(Writer& writer, std::size_t bytes) {
  constexpr std::size_t kLongestQuestion = 28;
  constexpr std::size_t kMostOfOneCity = 5;
  const bool all_of_city = writer.below(2) == 0;
  const std::string city = writer.adjective_noun();
  const std::size_t least = (bytes - kLongestQuestion) / kLongestLine;  // As many records there will be.
  const std::size_t asked = writer.below(least);
  std::set<std::size_t> here{asked};
  for (std::size_t more = writer.below(kMostOfOneCity); all_of_city && more > 0; --more)
    here.insert(writer.below(least));
  const std::vector<Record> records = records_of(writer, bytes - kLongestQuestion, city, here);
  Task task{.kind = TaskKind::table, .prompt = {}, .answer = {}};
  Strings codes;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::size_t at = task.prompt.size();
    task.prompt += records[i].line(i + 1);
    if (!here.contains(i)) continue;
    codes.push_back(records[i].code);
    task.evidence.push_back(all_of_city ? said(task.prompt, records[i].code, task.prompt.find(" code=", at))
                                        : said(task.prompt, records[i].head(i + 1), at));
  }
  task.prompt += all_of_city ? "all city=" + city + " ->" : "find owner=" + records[asked].owner + " ->";
  task.answer = all_of_city ? listed(codes) : " " + records[asked].head(asked + 1) + "\n";
  return task;
}

Task count(Writer& writer, std::size_t bytes) {
  constexpr std::size_t kLongestQuestion = 30;
  constexpr std::size_t kMost = 9;  // One digit.
  const std::string city = writer.adjective_noun();
  const std::size_t least = (bytes - kLongestQuestion) / kLongestLine;  // As many records there will be.
  const std::size_t times = 1 + writer.below(std::min(kMost, least));
  const std::set<std::size_t> here = places(writer, times, least);
  Task task{.kind = TaskKind::count, .prompt = {}, .answer = " " + std::to_string(times) + "\n"};
  const std::vector<Record> records = records_of(writer, bytes - kLongestQuestion, city, here);
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::size_t at = task.prompt.size();
    task.prompt += records[i].line(i + 1);
    if (here.contains(i)) task.evidence.push_back(said(task.prompt, city, at));
  }
  task.prompt += "count city=" + city + " ->";
  return task;
}

}  // namespace sluice::tools::tasks
