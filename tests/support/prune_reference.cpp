#include "tests/support/prune_reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

bool counts(float value) { return !std::isnan(value) && value != -kInf; }

/// Softmax weights; 0 for what does not count.
std::vector<double> weights_of(std::span<const float> values) {
  float top = -kInf;
  for (const float value : values) top = counts(value) ? std::max(top, value) : top;
  std::vector<double> weights;
  for (const float value : values) {
    const double weight = value == top ? 1.0 : std::exp(static_cast<double>(value) - static_cast<double>(top));
    weights.push_back(counts(value) ? weight : 0.0);
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) weight /= sum > 0.0 ? sum : 1.0;
  return weights;
}

/// Code n of a unit of 3 bits, of which a, b and c are the bytes.
std::uint32_t code_of_bytes(std::byte first, std::byte second, std::byte third, std::uint32_t n) {
  const auto a = std::to_integer<std::uint32_t>(first), b = std::to_integer<std::uint32_t>(second),
             c = std::to_integer<std::uint32_t>(third);
  switch (n) {
    case 0: return a & 7u;
    case 1: return a >> 3 & 7u;
    case 2: return b & 7u;
    case 3: return b >> 3 & 7u;
    case 4: return c & 7u;
    case 5: return c >> 4 & 7u;
    case 6: return a >> 6 | (c >> 3 & 1u) << 2;
    default: return b >> 6 | (c >> 7 & 1u) << 2;
  }
}

}  // namespace

DecodedRow decode_row(const std::byte* copy, const CodeLayout& layout, std::uint32_t row) {
  DecodedRow decoded;
  const std::byte* const params = copy + layout.params_offset();
  decoded.scale = load_element(params, DType::f16, 2 * row);
  decoded.zero = load_element(params, DType::f16, 2 * row + 1);
  const std::uint32_t units = layout.head_dim / 8;
  for (std::uint32_t c = 0; c < layout.head_dim; ++c) {
    if (layout.bits == 3) {
      const std::byte* const octet = copy + std::size_t{row / 8} * 3 * layout.head_dim;
      const std::byte* const pair = octet + (std::size_t{row % 8} * units + c % units) * 2;
      decoded.codes.push_back(
          code_of_bytes(pair[0], pair[1], octet[(std::size_t{16} + row % 8) * units + c % units], c / units));
      continue;
    }
    std::uint32_t word = 0;
    std::memcpy(&word, copy + std::size_t{row} * (layout.head_dim / 2) + c % units * sizeof word, sizeof word);
    decoded.codes.push_back(word >> c / units * 4 & 15u);
  }
  return decoded;
}

std::vector<double> rotated(std::span<const double> x) {
  const std::size_t block = x.size() & (~x.size() + 1);
  std::vector<double> out(x.begin(), x.end());
  for (std::size_t apart = 1; apart < block; apart *= 2) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      if ((i & apart) != 0) continue;
      const double a = out[i], b = out[i + apart];
      out[i] = a + b, out[i + apart] = a - b;
    }
  }
  for (double& each : out) each /= std::sqrt(static_cast<double>(block));
  return out;
}

std::vector<std::uint32_t> sorted_top_p(std::span<const float> values, double p, Choice choice) {
  const std::vector<double> weights = weights_of(values);
  std::vector<std::uint32_t> order;
  double sum = 0.0;
  for (std::uint32_t i = 0; i < values.size(); ++i) {
    if (!choice.has(i)) sum += weights[i];
    if (choice.has(i) && counts(values[i])) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return values[a] > values[b]; });
  std::size_t kept = p >= 1.0 ? order.size() : 0;
  while (kept < order.size() && sum < p) sum += weights[order[kept++]];
  while (kept != 0 && kept < order.size() && values[order[kept]] == values[order[kept - 1]]) ++kept;
  order.resize(kept);
  std::sort(order.begin(), order.end());
  return order;
}

bool is_top_p(std::span<const float> values, double p, std::span<const std::uint32_t> mask, std::uint32_t count,
              double within, Choice choice) {
  const std::vector<double> weights = weights_of(values);
  float least_kept = kInf;
  float most_left = -kInf;
  std::uint32_t kept = 0;
  bool any = false;
  double anyway = 0.0;
  for (std::size_t i = 0; i < mask.size() * 32; ++i) {
    const bool keeps = (mask[i / 32] >> (i % 32) & 1u) != 0;
    if (keeps && (i >= values.size() || !choice.has(i) || !counts(values[i]))) return false;
    if (i >= values.size() || !counts(values[i])) continue;
    if (!choice.has(i)) anyway += weights[i];
    if (!choice.has(i)) continue;
    any = true;
    kept += keeps ? 1 : 0;
    if (keeps) least_kept = std::min(least_kept, values[i]);
    if (!keeps) most_left = std::max(most_left, values[i]);
  }
  if (kept != count) return false;
  if (count == 0) return !any || (p < 1.0 && anyway > 0.0 && anyway >= p - within);
  if (most_left >= least_kept) return false;
  if (p >= 1.0) return most_left == -kInf;
  double mass = anyway;
  double without_least = anyway;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!choice.has(i) || !counts(values[i]) || values[i] < least_kept) continue;
    mass += weights[i];
    if (values[i] > least_kept) without_least += weights[i];
  }
  return mass >= p - within && without_least < p + within;
}

bool is_top_p_of_most(std::span<const float> values, double p, std::uint32_t most, std::span<const std::uint32_t> mask,
                      std::uint32_t count, double within, Choice choice) {
  if (count > most) return false;
  if (is_top_p(values, p, mask, count, within, choice)) return true;
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < values.size(); ++i)
    if (choice.has(i) && counts(values[i])) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return values[a] > values[b]; });
  if (order.size() <= most) return false;
  const float left = values[order[most]];
  const std::vector<double> weights = weights_of(values);
  std::uint32_t kept = 0;
  double mass = 0.0;
  for (std::uint32_t i = 0; i < mask.size() * 32; ++i) {
    const bool keeps = (mask[i / 32] >> (i % 32) & 1u) != 0;
    const bool counted = i < values.size() && counts(values[i]);
    if (keeps != (counted && choice.has(i) && values[i] > left)) return false;
    kept += keeps ? 1 : 0;
    if (counted && (keeps || !choice.has(i))) mass += weights[i];
  }
  return kept == count && mass < p + within;
}

std::vector<float> random_logits(std::uint32_t count, Random& random) {
  const double spread = 0.5 + 4.5 * random.uniform();
  const std::uint32_t kind = random.below(6);
  const double shift = 20.0 * random.normal();
  std::vector<float> values(count);
  for (float& value : values) {
    switch (kind) {
      case 0: value = static_cast<float>(random.below(4)) - 2.f; break;
      case 1: value = -60.f; break;
      default: value = static_cast<float>(spread * random.normal() + shift);
    }
    if (kind == 2 && random.below(5) == 0) {
      const float odd[] = {std::nanf(""), -std::nanf(""), -kInf, 0.f, -0.f};
      value = odd[random.below(5)];
    }
  }
  if (kind == 1) values[random.below(count)] = 3.f;
  return values;
}

}  // namespace sluice::test
