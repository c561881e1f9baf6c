#include "tests/support/prompt.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/support/random.hpp"

namespace sluice::test {

Prompt::Prompt(const ProblemOptions& options, DType q_dtype)
    : kv_(options), q_dtype_(q_dtype), q_(options.tokens * token_stride() * bytes_of(q_dtype)) {
  Random random(options.seed + 1'000);
  for (std::size_t i = 0; i < options.tokens * token_stride(); ++i) {
    store_element(q_.data(), q_dtype_, i, std::numeric_limits<double>::quiet_NaN());  // The gaps.
  }
  for (std::uint32_t token = 0; token < options.tokens; ++token) {
    for (std::uint32_t head = 0; head < options.group; ++head) {
      for (std::uint32_t c = 0; c < options.head_dim; ++c) set_q(token, head, c, random.normal());
    }
  }
}

double Prompt::q(std::uint32_t token, std::uint32_t head, std::uint32_t c) const noexcept {
  return load_element(q_.data(), q_dtype_, at(token, head, c));
}

void Prompt::set_q(std::uint32_t token, std::uint32_t head, std::uint32_t c, double value) noexcept {
  std::byte rounded[sizeof(float)];
  store_element(rounded, kv_.layout().near().dtype, 0, value);
  store_element(q_.data(), q_dtype_, at(token, head, c), load_element(rounded, kv_.layout().near().dtype, 0));
}

void Prompt::ask_for(std::uint32_t token, std::uint32_t head, std::uint32_t key, double strength) noexcept {
  double norm = 0.0;
  for (std::uint32_t c = 0; c < head_dim(); ++c) norm += kv_.k(key, c) * kv_.k(key, c);
  for (std::uint32_t c = 0; c < head_dim(); ++c) set_q(token, head, c, strength * kv_.k(key, c) / std::sqrt(norm));
}

double Prompt::score(std::uint32_t token, std::uint32_t head, std::uint32_t key) const noexcept {
  double sum = 0.0;
  for (std::uint32_t c = 0; c < head_dim(); ++c) sum += q(token, head, c) * kv_.k(key, c);
  return sum / std::sqrt(static_cast<double>(head_dim()));
}

PlacedPrompt::PlacedPrompt(StagesUnderTest& under_test, const Prompt& prompt)
    : q(under_test.copy_of(prompt.queries()).data()),
      row_bytes(prompt.token_stride() * bytes_of(prompt.q_dtype())),
      kv(place(under_test, prompt.kv()).kv),
      shape(prompt.kv().shape()),
      strides{.q_dtype = prompt.q_dtype(),
              .q_token_stride = prompt.token_stride(),
              .q_head_stride = prompt.head_stride(),
              .out_token_stride = std::uint64_t{prompt.group()} * prompt.head_dim(),
              .out_head_stride = prompt.head_dim()} {}

namespace reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The keys that one query attends.
std::vector<std::uint32_t> keys_of(const PrefillRange& range, std::uint32_t position, std::uint32_t head) {
  const BlockBits bits(range.first, range.count);
  const std::uint32_t row = position / kPrefillBlock - bits.top;
  std::vector<std::uint32_t> keys;
  const std::uint32_t seen = range.reach == 0 || position < range.reach ? 0 : position + 1 - range.reach;
  for (std::uint32_t key = std::max(range.key_begin, seen); key < std::min(range.key_end, position + 1); ++key) {
    if (range.blocks.empty() || bits.get(range.blocks, head, row, key / kPrefillBlock)) keys.push_back(key);
  }
  return keys;
}

}  // namespace

Attention prefill(const Prompt& prompt, const PrefillRange& range) {
  const std::uint32_t dim = prompt.head_dim();
  Attention result;
  for (std::uint32_t token = range.first; token < range.first + range.count; ++token) {
    for (std::uint32_t head = 0; head < prompt.group(); ++head) {
      const std::vector<std::uint32_t> keys = keys_of(range, token, head);
      std::vector<double> q(dim);
      for (std::uint32_t c = 0; c < dim; ++c) q[c] = prompt.q(token, head, c);
      std::vector<double> scores;
      for (const std::uint32_t key : keys) {
        double sum = 0.0;
        for (std::uint32_t c = 0; c < dim; ++c) sum += q[c] * prompt.kv().k(key, c);
        scores.push_back(score(prompt.kv().shape(), sum));
      }
      const double top = scores.empty() ? -kInfinity : *std::max_element(scores.begin(), scores.end());
      std::vector<double> out(dim);
      double mass = 0.0;
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const double weight = std::exp(scores[i] - top);
        mass += weight;
        for (std::uint32_t c = 0; c < dim; ++c) out[c] += weight * prompt.kv().v(keys[i], c);
      }
      for (std::uint32_t c = 0; c < dim; ++c) result.out.push_back(keys.empty() ? 0.0 : out[c] / mass);
      result.lse.push_back(keys.empty() ? -kInfinity : top + std::log(mass));
    }
  }
  return result;
}

}  // namespace reference
}  // namespace sluice::test
