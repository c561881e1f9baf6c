#include "tests/support/reference.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "sluice/page_rules.hpp"
#include "sluice/step/e4m3.hpp"

namespace sluice::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// A 16-bit float: sign, exponent bits, mantissa bits.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  [[nodiscard]] int bias() const noexcept { return (1 << (exponent_bits - 1)) - 1; }
};

/// An e4m3 code that is not NaN.
double decode_e4m3(std::uint32_t code) noexcept {
  const int exponent = static_cast<int>(code >> 3 & 15u);
  const int mantissa = static_cast<int>(code & 7u) + (exponent == 0 ? 0 : 8);
  return ((code & 0x80u) != 0 ? -1.0 : 1.0) * std::ldexp(mantissa, std::max(exponent, 1) - 10);
}

/// The nearest of all codes, the even one of two.
std::uint8_t encode_e4m3(double value) noexcept {
  std::uint32_t best = 0;
  for (std::uint32_t code = 1; code < E4m3::kNaN; ++code) {
    const double error = std::abs(decode_e4m3(code) - std::abs(value));
    const double least = std::abs(decode_e4m3(best) - std::abs(value));
    if (error < least || (error == least && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(best | (std::signbit(value) ? 0x80u : 0u));
}

/// The least power of two, of those that there are, that brings all into reach.
double scale_e4m3(std::span<const double> values) noexcept {
  double scale = E4m3::kLeastScale;
  for (const double value : values) {
    if (!std::isfinite(value)) return std::nan("");
    while (std::abs(value) > scale * E4m3::kLargest && scale < double{E4m3::kMostScale}) scale *= 2.0;
  }
  return scale;
}

Format format_of(DType type) noexcept { return type == DType::f16 ? Format{5, 10} : Format{8, 7}; }

double decode(std::uint16_t bits, Format format) noexcept {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
  const double sign = (bits >> 15) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << format.exponent_bits) - 1) return mantissa != 0 ? std::nan("") : sign * kInfinity;
  const int hidden = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  return sign * std::ldexp(mantissa + hidden, std::max(exponent, 1) - format.bias() - format.mantissa_bits);
}

std::uint16_t encode(double value, Format format) noexcept {
  const int top = (1 << format.exponent_bits) - 1;
  const int sign = std::signbit(value) ? 1 << 15 : 0;
  const int infinity = top << format.mantissa_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | infinity | 1 << (format.mantissa_bits - 1));
  int exponent = 0;
  (void)std::frexp(value, &exponent);
  exponent = value == 0.0 ? 1 - format.bias() : std::max(exponent - 1, 1 - format.bias());
  // In units of the last place the mantissa is an integer; rounding up may carry into the exponent, as it should.
  const double units = std::nearbyint(std::ldexp(std::abs(value), format.mantissa_bits - exponent));
  if (!(units < 0x1.0p30)) return static_cast<std::uint16_t>(sign | infinity);
  const int bits = static_cast<int>(units) + ((exponent + format.bias() - 1) << format.mantissa_bits);
  return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
}

}  // namespace

double load_element(const std::byte* data, DType type, std::size_t index) noexcept {
  if (type == DType::f32) {
    float value = 0.f;
    std::memcpy(&value, data + index * sizeof value, sizeof value);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, data + index * sizeof bits, sizeof bits);
  return decode(bits, format_of(type));
}

void store_element(std::byte* data, DType type, std::size_t index, double value) noexcept {
  if (type == DType::f32) {
    const auto narrow = static_cast<float>(value);
    std::memcpy(data + index * sizeof narrow, &narrow, sizeof narrow);
    return;
  }
  const std::uint16_t bits = encode(value, format_of(type));
  std::memcpy(data + index * sizeof bits, &bits, sizeof bits);
}

void store_row(std::byte* row, float* scale, DType type, std::span<const double> values) noexcept {
  if (type != DType::fp8_e4m3) {
    for (std::size_t i = 0; i < values.size(); ++i) store_element(row, type, i, values[i]);
    return;
  }
  const double exact = scale_e4m3(values);
  *scale = static_cast<float>(exact);
  for (std::size_t i = 0; i < values.size(); ++i)
    row[i] = static_cast<std::byte>(std::isnan(exact) ? E4m3::kNaN : encode_e4m3(values[i] / exact));
}

std::vector<double> load_row(const std::byte* row, const float* scale, DType type, std::size_t size) {
  std::vector<double> values(size);
  for (std::size_t i = 0; i < size; ++i)
    values[i] = type == DType::fp8_e4m3 ? decode_e4m3(std::to_integer<std::uint32_t>(row[i])) * *scale
                                        : load_element(row, type, i);
  return values;
}

std::vector<double> rounded_row(DType type, std::span<const double> values) {
  std::vector<std::byte> row(values.size() * sizeof(float));
  float scale = 0.f;
  store_row(row.data(), &scale, type, values);
  return load_row(row.data(), &scale, type, values.size());
}

std::vector<Attended> attended(std::span<const std::uint32_t> tokens) {
  std::vector<Attended> all;
  for (const std::uint32_t token : tokens) all.push_back({.token = token});
  return all;
}

std::vector<Attended> attended(std::uint32_t begin, std::uint32_t end) {
  std::vector<Attended> all;
  for (std::uint32_t token = begin; token < end; ++token) all.push_back({.token = token});
  return all;
}

namespace reference {

double score(const AttentionShape& shape, double product) {
  const double scaled =
      shape.scale != 0.f ? product * shape.scale : product / std::sqrt(static_cast<double>(shape.head_dim));
  return shape.softcap == 0.f ? scaled : shape.softcap * std::tanh(scaled / shape.softcap);
}

double score(const Problem& problem, std::uint32_t head, std::uint32_t token) {
  double sum = 0.0;
  for (std::uint32_t c = 0; c < problem.options().head_dim; ++c) sum += problem.q(head, c) * problem.k(token, c);
  return score(problem.shape(), sum);
}

Attention attend(const Problem& problem, std::span<const Attended> tokens) {
  using Eigen::Index;
  const auto count = static_cast<Index>(tokens.size());
  const auto token = [&](Index i) { return tokens[static_cast<std::size_t>(i)]; };
  const Eigen::MatrixXd values = Eigen::MatrixXd::NullaryExpr(problem.options().head_dim, count, [&](Index c, Index i) {
    return problem.v(token(i).token, static_cast<std::uint32_t>(c));
  });
  Attention result;
  for (std::uint32_t head = 0; head < problem.options().group; ++head) {
    const Eigen::ArrayXd scores = Eigen::ArrayXd::NullaryExpr(count, [&](Index i) {
      return (token(i).members >> head & 1u) != 0 ? score(problem, head, token(i).token) : -kInfinity;
    });
    const double top = count == 0 ? -kInfinity : scores.maxCoeff();
    const bool empty = top == -kInfinity;
    const Eigen::ArrayXd weights =
        empty ? Eigen::ArrayXd(Eigen::ArrayXd::Zero(count)) : Eigen::ArrayXd((scores - top).exp());
    const Eigen::VectorXd out = values * weights.matrix() / (empty ? 1.0 : weights.sum());
    result.out.insert(result.out.end(), out.begin(), out.end());
    result.lse.push_back(empty ? -kInfinity : top + std::log(weights.sum()));
  }
  return result;
}

std::vector<double> digest(const Problem& problem, std::uint32_t begin, std::uint32_t end, DigestKind kind) {
  const std::uint32_t head_dim = problem.options().head_dim;
  std::vector<double> result(std::size_t{2} * head_dim);
  for (std::uint32_t c = 0; c < head_dim; ++c) {
    double hi = -kInfinity;
    double lo = kInfinity;
    for (std::uint32_t token = begin; token < end; ++token) {
      hi = std::max(hi, problem.k(token, c));
      lo = std::min(lo, problem.k(token, c));
    }
    if (kind == DigestKind::cuboid_mean) {
      const double centre = (hi + lo) / 2.0;
      double radius = 0.0;
      for (std::uint32_t token = begin; token < end; ++token) radius += std::abs(problem.k(token, c) - centre);
      radius /= end - begin;
      hi = centre + radius;
      lo = centre - radius;
    }
    result[c] = hi;
    result[head_dim + c] = lo;
  }
  return result;
}

std::vector<std::uint32_t> top_k(std::span<const float> values, std::uint32_t k) {
  std::vector<std::uint32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (std::isnan(values[a]) || std::isnan(values[b])) return !std::isnan(values[a]) && std::isnan(values[b]);
    return values[a] > values[b];
  });
  order.resize(std::min<std::size_t>(k, order.size()));
  std::sort(order.begin(), order.end());
  return order;
}

void add_mass(Progress& progress, double mass) {
  if (std::isnan(mass)) return;
  const double top = std::max(progress.mass, mass);
  if (std::isinf(top)) {
    progress.mass = top;
  } else {
    progress.mass = top + std::log(std::exp(progress.mass - top) + std::exp(mass - top));
  }
}

void add_pages(Progress& progress, ProgressRule rule, std::span<const double> masses, std::size_t full) {
  for (const double mass : masses) add_mass(progress, mass);
  std::vector<double> known;
  for (const double mass : masses.first(full)) {
    if (!std::isnan(mass)) known.push_back(mass);
  }
  if (known.empty()) return;
  std::sort(known.begin(), known.end());
  if (rule == ProgressRule::median) {
    progress.unseen = known[known.size() / 2];
  } else if (rule == ProgressRule::mean) {
    Progress sum;
    for (const double mass : known) add_mass(sum, mass);
    progress.unseen = sum.mass - std::log(static_cast<double>(known.size()));
  } else {
    progress.unseen = std::min(progress.unseen, known.front());
  }
}

double progress_share(const Progress& progress, std::uint32_t left, double bound) {
  if (left == 0) return 1.0;
  const double rest = std::max(progress.unseen + std::log(static_cast<double>(left)), bound);
  if (progress.mass == -kInfinity || std::isnan(bound)) return 0.0;
  if (rest == kInfinity) return 0.0;
  return 1.0 / (1.0 + std::exp(rest - progress.mass));
}

}  // namespace reference

double max_abs_diff(std::span<const float> a, std::span<const double> b) {
  if (a.size() != b.size()) return kInfinity;
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (static_cast<double>(a[i]) == b[i]) continue;
    const double diff = std::abs(a[i] - b[i]);
    worst = std::isfinite(diff) ? std::max(worst, diff) : kInfinity;
  }
  return worst;
}

double max_abs_diff(std::span<const float> a, std::span<const float> b) {
  return max_abs_diff(a, std::vector<double>(b.begin(), b.end()));
}

double tolerance(const Problem& problem) {
  double largest = 1.0;
  for (std::uint32_t token = 0; token < problem.options().tokens; ++token) {
    for (std::uint32_t head = 0; head < problem.options().group; ++head) {
      largest = std::max(largest, std::abs(reference::score(problem, head, token)));
    }
  }
  return 5e-6 * largest;
}

}  // namespace sluice::test
