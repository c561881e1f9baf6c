#include "tools/cli/values.hpp"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "sluice/error.hpp"

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

/// Parses a non-negative decimal number at the front of `text`; returns the characters used, 0 if none.
std::size_t read_number(std::string_view text, double& value) {
  std::size_t used = 0;
  while (used < text.size() && ((text[used] >= '0' && text[used] <= '9') || text[used] == '.')) ++used;
  const std::string digits(text.substr(0, used));
  char* end = nullptr;
  value = std::strtod(digits.c_str(), &end);
  return !digits.empty() && end == digits.c_str() + digits.size() ? used : 0;
}

/// Number with an optional K/M/G/T; what is left behind it goes to `rest`. NaN if there is no number.
double read_scaled(std::string_view text, std::string_view& rest) {
  double value = 0.0;
  std::size_t used = read_number(text, value);
  if (used == 0) return std::numeric_limits<double>::quiet_NaN();
  if (used < text.size()) {
    const char letter = static_cast<char>(text[used] & ~0x20);
    for (const Suffix& suffix : kSuffixes) {
      if (letter != suffix.letter) continue;
      value *= static_cast<double>(suffix.factor);
      ++used;
      break;
    }
  }
  rest = text.substr(used);
  return value;
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

std::uint64_t parse_size(std::string_view text, std::string_view option) {
  std::string_view rest;
  const double value = read_scaled(text, rest);
  const bool unit = rest.empty() || rest == "B" || rest == "iB" || rest == "b";
  if (std::isnan(value) || !unit || value >= 0x1p63) {
    refuse(option, text, "a size in bytes such as 512M, 4G or 1.5G (1G = 2^30 bytes)");
  }
  return static_cast<std::uint64_t>(value);
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
  std::snprintf(text.data(), text.size(), value < 1000.0 ? "%.3g" : "%.0f", value);
  return text.data() + suffix;
}

double parse_share(std::string_view text, std::string_view option) {
  double value = 0.0;
  const std::size_t used = read_number(text, value);
  const bool percent = used + 1 == text.size() && text.back() == '%';
  if (percent) value /= 100.0;
  if (used == 0 || (!percent && used != text.size()) || value > 1.0) {
    refuse(option, text, "a share such as 10% or 0.1, at most 100%");
  }
  return value;
}

std::vector<std::uint32_t> parse_counts(std::string_view text, std::string_view option) {
  std::vector<std::uint32_t> counts;
  for (const std::string& item : split_list(text)) {
    std::string_view rest;
    const double value = read_scaled(item, rest);
    if (!(value >= 1.0) || value > 0x1p31 || !rest.empty() || value != std::floor(value)) {
      refuse(option, item, "a comma list of token counts such as 2048,8K (1K = 1024)");
    }
    counts.push_back(static_cast<std::uint32_t>(value));
  }
  if (counts.empty()) refuse(option, text, "at least one token count such as 8192");
  return counts;
}

DType parse_dtype(std::string_view text, std::string_view option) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    if (text == to_string(type)) return type;
  }
  refuse(option, text, "one of f32, f16, bf16");
}

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> items;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    if (comma > 0) items.emplace_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return items;
}

std::vector<std::string> split_policies(std::string_view text) {
  std::vector<std::string> policies;
  while (!text.empty()) {
    std::string_view list = text.substr(0, text.find(';'));
    text.remove_prefix(std::min(list.size() + 1, text.size()));
    for (bool open = false; !list.empty();) {
      const std::string_view item = list.substr(0, to_comma(list));
      list.remove_prefix(std::min(item.size() + 1, list.size()));
      if (item.empty()) continue;
      if (open && is_option(item)) {
        policies.back().append(",").append(item);
      } else {
        policies.emplace_back(item);
      }
      open = true;
    }
  }
  return policies;
}

std::vector<PolicySpec> parse_policies(std::string_view text) {
  std::vector<PolicySpec> specs;
  for (const std::string& item : split_policies(text)) specs.push_back(parse_policy(item));
  if (specs.empty()) {
    throw Error(Errc::invalid_argument, "--policies: the list is empty; name at least one, e.g. full,sluice");
  }
  return specs;
}

}  // namespace sluice::tools
