#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::test {

/// How often `what` is in a text, also where it overlaps itself.
inline std::size_t count(std::string_view text, std::string_view what) {
  std::size_t found = 0;
  for (std::size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

/// Text between two markers after `from`; empty if there is none.
inline std::string between(std::string_view text, std::string_view before, std::string_view after, std::size_t from = 0) {
  const std::size_t begin = text.find(before, from);
  if (begin == std::string_view::npos) return "";
  const std::size_t end = text.find(after, begin + before.size());
  return std::string(text.substr(begin + before.size(), end - begin - before.size()));
}

/// What is expected of a model that says `value`.
inline std::string answer_of(const std::string& value) { return std::string(" ").append(value).append("\n"); }

/// Values of all needles whose key is `key`.
inline std::vector<std::string> needle_values(const std::string& prompt, const std::string& key) {
  std::vector<std::string> values;
  const std::string before = "\nOne of the special magic values for " + key + " is: ";
  for (std::size_t at = prompt.find(before); at != std::string::npos; at = prompt.find(before, at + 1)) {
    values.push_back(between(prompt, before, ".\n", at));
  }
  return values;
}

}  // namespace sluice::test
