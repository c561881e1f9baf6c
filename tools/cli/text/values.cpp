#include "tools/cli/text/values.hpp"

#include <array>
#include <cstdio>
#include <limits>
#include <optional>

#include "scheduler/numbers.hpp"
#include "sluice/error.hpp"
#include "sluice/units.hpp"

namespace sluice::tools {
namespace {

struct Suffix {
  char letter;
  std::uint64_t factor;
};
constexpr std::array<Suffix, 4> kSuffixes{{{'K', KiB}, {'M', MiB}, {'G', GiB}, {'T', 1024 * GiB}}};

[[noreturn]] void refuse(std::string_view option, std::string_view text, const std::string& expected) {
  throw Error(Errc::invalid_argument,
              std::string(option) + ": cannot read '" + std::string(text) + "'; expected " + expected);
}

/// key=value, and not the beginning of a policy whose stages have values.
bool is_option(std::string_view item) {
  const std::string_view key = item.substr(0, std::min(item.find('='), item.size()));
  return key.size() < item.size() && key.find_first_of(":|+(") == std::string_view::npos;
}

/// Length of the part of `text` before the first comma outside parentheses.
std::size_t to_comma(std::string_view text) {
  int depth = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ',' && depth == 0) return i;
    depth += text[i] == '(' ? 1 : text[i] == ')' ? -1 : 0;
  }
  return text.size();
}

}  // namespace

std::uint64_t parse_size(std::string_view text, std::string_view option, std::uint64_t least) {
  std::string_view number = text;
  const auto ends_with = [&](char letter) { return !number.empty() && (number.back() | 0x20) == letter; };
  if (ends_with('b')) {
    number.remove_suffix(1);
    if (ends_with('i')) number.remove_suffix(1);
  }
  const bool binary = text.size() - number.size() == 2;
  const std::optional<scheduler::Scaled> size = scheduler::read_scaled(number);
  // A part of a byte is a slip of the pen; what is left of 1.1G after rounding is not.
  const bool whole = size && (size->exact || (size->suffix && size->value != 0));
  const bool unit = size && (size->suffix || !binary);
  if (!whole || !unit || size->value >= std::uint64_t{1} << 63) {
    refuse(option, text, "a size in bytes such as 512M, 4G or 1.5G (1G = 2^30 bytes)");
  }
  if (size->value < least) refuse(option, text, "at least " + std::to_string(least) + "; leave it out for the default");
  return size->value;
}

std::string format_size(std::uint64_t bytes) {
  double value = static_cast<double>(bytes);
  std::string suffix;
  for (const Suffix& candidate : kSuffixes) {
    if (bytes < candidate.factor) break;
    value = static_cast<double>(bytes) / static_cast<double>(candidate.factor);
    suffix = candidate.letter;
  }
  std::array<char, 32> text{};
  // From 999.5 on three digits would be written as 1e+03.
  std::snprintf(text.data(), text.size(), value < 999.5 ? "%.3g" : "%.0f", value);
  return text.data() + suffix;
}

double parse_share(std::string_view text, std::string_view option) {
  const std::optional<double> share = scheduler::read_share(text);
  if (!share || *share > 1.0) refuse(option, text, "a share such as 10% or 0.1, at most 100%");
  return *share;
}

std::uint64_t parse_count(std::string_view text, std::string_view option, CountRange range) {
  const std::optional<std::uint64_t> count = scheduler::read_count(text);
  if (!count || *count < range.least || *count > range.most) {
    refuse(option, text,
           "a whole number in [" + std::to_string(range.least) + ", " + std::to_string(range.most) +
               "], K allowed (1K = 1024)");
  }
  return *count;
}

double parse_number(std::string_view text, std::string_view option, NumberRange range) {
  const std::optional<double> number = scheduler::read_decimal(text);
  if (!number || !(*number >= range.least && *number <= range.most)) {
    refuse(option, text, "a number in [" + shortest(range.least) + ", " + shortest(range.most) + "]");
  }
  return *number;
}

std::string shortest(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

std::uint64_t parse_seed(std::string_view text, std::string_view option) {
  const std::optional<std::uint64_t> seed = scheduler::read_whole(text);
  if (!seed) refuse(option, text, "a whole number below 2^64");
  return *seed;
}

std::vector<double> parse_shares(std::string_view text, std::string_view option) {
  std::vector<double> shares;
  for (const std::string& item : split_list(text, option)) shares.push_back(parse_share(item, option));
  return shares;
}

std::vector<std::uint32_t> parse_counts(std::string_view text, std::string_view option) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 31;
  std::vector<std::uint32_t> counts;
  for (const std::string& item : split_list(text, option)) {
    const std::optional<std::uint64_t> count = scheduler::read_count(item);
    if (!count || *count == 0 || *count > kMost) {
      refuse(option, item, "a comma list of token counts such as 2048,8K (1K = 1024)");
    }
    counts.push_back(static_cast<std::uint32_t>(*count));
  }
  if (counts.empty()) refuse(option, text, "at least one token count such as 8192");
  return counts;
}

std::vector<std::uint32_t> parse_ranges(std::string_view text, std::string_view option) {
  constexpr std::uint32_t kMost = 65'535;
  std::vector<std::uint32_t> numbers;
  for (const std::string& item : split_list(text, option)) {
    const std::size_t dash = item.find('-');
    const auto first = scheduler::read_count(item.substr(0, dash));
    const auto last = dash == std::string::npos ? first : scheduler::read_count(item.substr(dash + 1));
    if (!first || !last || *first > *last || *last > kMost)
      refuse(option, item, "a comma list of numbers and ranges such as 0-7,16");
    for (auto i = static_cast<std::uint32_t>(*first); i <= *last; ++i) numbers.push_back(i);
  }
  if (numbers.empty()) refuse(option, text, "at least one number or range such as 0-7");
  return numbers;
}

DType parse_dtype(std::string_view text, std::string_view option) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    if (text == to_string(type)) return type;
  }
  refuse(option, text, "one of f32, f16, bf16");
}

DType parse_kv_dtype(std::string_view text, std::string_view option) {
  if (text == to_string(DType::fp8_e4m3)) return DType::fp8_e4m3;
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    if (text == to_string(type)) return type;
  }
  refuse(option, text, "one of f32, f16, bf16, fp8_e4m3");
}

std::vector<std::string> split_list(std::string_view text, std::string_view option) {
  std::vector<std::string> items;
  for (std::string_view rest = text;;) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    if (comma == 0) refuse(option, text, "at least one item, and one between any two commas");
    items.emplace_back(rest.substr(0, comma));
    if (comma + 1 >= rest.size()) return items;  // Behind the last one a comma says nothing.
    rest.remove_prefix(comma + 1);
  }
}

std::vector<std::string> split_policies(std::string_view text) {
  std::vector<std::string> policies;
  for (std::string_view rest = text; !rest.empty();) {
    std::string_view list = rest.substr(0, rest.find(';'));
    rest.remove_prefix(std::min(list.size() + 1, rest.size()));
    for (bool open = false;; open = true) {
      const std::string_view item = list.substr(0, to_comma(list));
      if (item.empty()) refuse("--policies", text, "a policy beside each of its commas, and before each semicolon");
      if (open && is_option(item)) {
        policies.back().append(",").append(item);
      } else {
        policies.emplace_back(item);
      }
      if (item.size() + 1 >= list.size()) break;
      list.remove_prefix(item.size() + 1);
    }
  }
  return policies;
}

}  // namespace sluice::tools
