// Words and numbers of policies as text.

#include "scheduler/policy/text.hpp"

#include <cstdio>
#include <limits>
#include <optional>

#include "scheduler/numbers.hpp"
#include "sluice/error.hpp"

namespace sluice::scheduler {
namespace {

std::string_view trimmed(std::string_view text) noexcept {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

/// Index of the first `separator` outside parentheses, or the length.
std::size_t find_outside(std::string_view text, char separator) noexcept {
  int depth = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (depth == 0 && text[i] == separator) return i;
    if (text[i] == '(') ++depth;
    if (text[i] == ')') --depth;
  }
  return text.size();
}

/// `value` times `factor` with as few digits as tell its float from others, but at least room for six.
std::string digits(double value, double factor) {
  char text[32];
  for (int precision = 6; precision <= 12; ++precision) {
    std::snprintf(text, sizeof text, "%.*g", precision, value * factor);
    const std::optional<double> read = read_decimal(text);
    if (read && static_cast<float>(*read / factor) == static_cast<float>(value)) break;
  }
  return text;
}

}  // namespace

void Word::fail(const std::string& why) const {
  const auto at = static_cast<std::size_t>(value.data() - text.data()) + 1;
  throw Error(Errc::invalid_argument, "policy \"" + std::string(text) + "\": \"" + std::string(value) +
                                          "\" at character " + std::to_string(at) + " " + why);
}

Word Word::part(std::string_view piece) const noexcept { return {.text = text, .value = trimmed(piece)}; }

std::vector<Word> split(const Word& word, char separator) {
  std::vector<Word> words;
  std::string_view rest = word.value;
  for (;;) {
    const std::size_t end = find_outside(rest, separator);
    words.push_back(word.part(rest.substr(0, end)));
    if (end == rest.size()) return words;
    rest.remove_prefix(end + 1);
  }
}

Halves halve(const Word& word, char separator) {
  const std::size_t at = find_outside(word.value, separator);
  const bool both = at < word.value.size();
  return {.first = word.part(word.value.substr(0, at)),
          .second = word.part(both ? word.value.substr(at + 1) : word.value.substr(at)),
          .both = both};
}

std::uint32_t read_count(const Word& word) {
  const std::optional<std::uint64_t> count = read_count(word.value);
  if (!count || *count > std::numeric_limits<std::uint32_t>::max()) word.fail("is not a whole number below 2^32");
  return static_cast<std::uint32_t>(*count);
}

std::uint64_t read_seed(const Word& word) {
  const std::optional<std::uint64_t> seed = read_whole(word.value);
  if (!seed) word.fail("is not a whole number below 2^64");
  return *seed;
}

float read_number(const Word& word) {
  const std::optional<double> value = read_decimal(word.value);
  if (!value) word.fail("is not a number");
  return static_cast<float>(*value);
}

float read_share(const Word& word) {
  const std::optional<double> share = read_share(word.value);
  if (!share) word.fail("is not a share; write 2% or 0.02");
  return static_cast<float>(*share);
}

bool read_switch(const Word& word) {
  if (word.value == "on" || word.value == "true" || word.value == "1") return true;
  if (word.value == "off" || word.value == "false" || word.value == "0") return false;
  word.fail("is neither on nor off");
}

void read_larger_of(const Word& word, std::uint32_t& count, float& share) {
  if (word.value == "all") {
    share = 1.f;
    return;
  }
  constexpr std::string_view kMax = "max(";
  if (word.value.starts_with(kMax)) {
    const bool closed = word.value.back() == ')';
    const Halves halves = halve(word.part(word.value.substr(kMax.size(), word.value.size() - kMax.size() - 1)), ',');
    if (!closed || !halves.both) word.fail("is not max(COUNT, SHARE), as in max(64, 2%)");
    count = read_count(halves.first);
    share = read_share(halves.second);
  } else if (word.value.find_first_of("%.") != std::string_view::npos) {
    share = read_share(word);
  } else {
    count = read_count(word);
    share = 0.f;
  }
}

std::string number(double value) { return digits(value, 1.0); }

std::string percent(double share) { return digits(share + 0.0, 100.0) + "%"; }  // Of -0, 0%.

}  // namespace sluice::scheduler
