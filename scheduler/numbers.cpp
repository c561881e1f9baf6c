#include "scheduler/numbers.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>

namespace sluice::scheduler {
namespace {

constexpr std::string_view kDigits = "0123456789";

/// Bits that a suffix shifts by; 0 if the letter is none.
unsigned bits_of(char letter) noexcept {
  switch (letter) {
    case 'K': case 'k': return 10;
    case 'M': case 'm': return 20;
    case 'G': case 'g': return 30;
    case 'T': case 't': return 40;
    default: return 0;
  }
}

/// A float holds it, and not as 0 or infinity unless it is 0.
bool fits_float(double value) noexcept {
  const double size = std::abs(value);
  return size == 0.0 || (size >= double{std::numeric_limits<float>::denorm_min()} &&
                         size <= double{std::numeric_limits<float>::max()});
}

}  // namespace

std::optional<std::uint64_t> read_whole(std::string_view text) noexcept {
  if (text.empty() || text.find_first_not_of(kDigits) != std::string_view::npos) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{}) return std::nullopt;
  return value;
}

std::optional<Scaled> read_scaled(std::string_view text) noexcept {
  const unsigned bits = text.empty() ? 0 : bits_of(text.back());
  if (bits != 0) text.remove_suffix(1);
  const std::size_t point = text.find('.');
  std::string_view fraction;
  if (point != std::string_view::npos) {
    fraction = text.substr(point + 1);
    if (fraction.empty()) return std::nullopt;
    while (!fraction.empty() && fraction.back() == '0') fraction.remove_suffix(1);
    text = text.substr(0, point);
  }
  const std::optional<std::uint64_t> whole = read_whole(text);
  if (!whole || *whole > std::numeric_limits<std::uint64_t>::max() >> bits) return std::nullopt;
  Scaled result{.value = *whole << bits, .exact = true, .suffix = bits != 0};
  if (fraction.empty()) return result;
  constexpr std::size_t kMostDigits = 18;  // Twice 10^18 is below 2^64.
  std::optional<std::uint64_t> left = read_whole(fraction);
  if (!left || fraction.size() > kMostDigits) return std::nullopt;
  std::uint64_t one = 1;
  for (std::size_t i = 0; i < fraction.size(); ++i) one *= 10;
  std::uint64_t part = 0;
  for (unsigned i = 0; i < bits; ++i) {  // The fraction's binary digits, exactly.
    *left *= 2;
    part = 2 * part + (*left >= one ? 1 : 0);
    if (*left >= one) *left -= one;
  }
  result.value += part;  // Below 1 << bits, whose bits are 0.
  result.exact = *left == 0;
  return result;
}

std::optional<std::uint64_t> read_count(std::string_view text) noexcept {
  const std::optional<Scaled> scaled = read_scaled(text);
  if (!scaled || !scaled->exact) return std::nullopt;
  return scaled->value;
}

std::optional<double> read_decimal(std::string_view text) noexcept {
  // Neither "inf" and "nan", nor the hexadecimal digits of other readers.
  if (text.find_first_not_of("0123456789.eE+-") != std::string_view::npos) return std::nullopt;
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !fits_float(value)) return std::nullopt;
  return value;
}

std::optional<double> read_share(std::string_view text) noexcept {
  const bool percent = !text.empty() && text.back() == '%';
  if (percent) text.remove_suffix(1);
  const std::optional<double> value = read_decimal(text);
  if (!value || std::signbit(*value)) return std::nullopt;
  const double share = percent ? *value / 100.0 : *value;
  if (!fits_float(share)) return std::nullopt;
  return share;
}

}  // namespace sluice::scheduler
