#include "tools/cli/bench/prefill_check.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "sluice/error.hpp"
#include "tools/cli/bench/device_copies.hpp"

namespace sluice::tools {
namespace {

/// What a correct row stays below: weights and outputs are rounded to 16 bits.
constexpr double kTolerance = 1e-2;

std::set<std::uint32_t> sampled_tokens(std::uint32_t tokens) {
  std::set<std::uint32_t> sampled;
  for (const std::uint32_t token : {0u, 1u, kPrefillBlock - 1, kPrefillBlock, tokens / 3, tokens / 2 + 17,
                                    tokens - tokens / 5, (tokens - 1) / kPrefillBlock * kPrefillBlock, tokens - 1}) {
    sampled.insert(std::min(token, tokens - 1));
  }
  return sampled;
}

}  // namespace

PrefillCheck::PrefillCheck(const PrefillLayer& layer, Device& device, Stream& stream, const cpu::Workers& builders)
    : layer_(layer), builders_(builders) {
  const AttentionShape& shape = layer.options().shape;
  const PageLayout& layout = layer.options().layout;
  std::set<std::uint32_t> heads{0, shape.kv_heads - 1};
  for (const std::uint32_t head : heads) {
    kv_.push_back(downloaded<std::byte>(device, stream, layer.view(head).page(0), layer.head_bytes()));
    for (const std::uint32_t token : sampled_tokens(layer.options().tokens)) {
      const auto member = static_cast<std::uint32_t>(samples_.size() % shape.group());
      Sample sample{.token = token, .q_head = head * shape.group() + member, .kv = kv_.size() - 1, .q = {}};
      sample.q.resize(shape.head_dim);
      const std::byte* const row = layer.query(token, sample.q_head);
      widen(layout.dtype, downloaded<std::byte>(device, stream, row, layout.row_bytes()).data(), sample.q);
      samples_.push_back(std::move(sample));
    }
  }
}

/// `mask`: words of the row's key blocks; empty: all.
PrefillCheck::Row PrefillCheck::attend(const Sample& sample, const std::vector<std::uint32_t>& mask) const {
  const PageLayout& layout = layer_.options().layout;
  const std::uint32_t dim = layout.head_dim;
  const auto half = [&](std::uint32_t token, std::uint64_t offset) {
    return kv_[sample.kv].data() + token / layout.page_tokens * layout.page_bytes() +
           token % layout.page_tokens * layout.row_bytes() + offset;
  };
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  std::vector<float> row(dim);
  std::vector<double> scores(sample.token + 1, -std::numeric_limits<double>::infinity());
  double most = -std::numeric_limits<double>::infinity();
  for (std::uint32_t j = 0; j <= sample.token; ++j) {
    const std::uint32_t block = j / kPrefillBlock;
    if (!mask.empty() && (mask[block / 32] >> block % 32 & 1u) == 0) continue;
    widen(layout.dtype, half(j, 0), row);
    double dot = 0.0;
    for (std::uint32_t c = 0; c < dim; ++c) dot += static_cast<double>(sample.q[c]) * row[c];
    scores[j] = dot * scale;
    most = std::max(most, scores[j]);
  }
  Row result{.out = std::vector<double>(dim, 0.0), .lse = 0.0};
  double sum = 0.0;
  for (std::uint32_t j = 0; j <= sample.token; ++j) {
    if (std::isinf(scores[j])) continue;
    const double weight = std::exp(scores[j] - most);
    widen(layout.dtype, half(j, layout.half_bytes()), row);
    for (std::uint32_t c = 0; c < dim; ++c) result.out[c] += weight * row[c];
    sum += weight;
  }
  for (double& value : result.out) value /= sum;
  result.lse = most + std::log(sum);
  return result;
}

void PrefillCheck::require(const PrefillPass& pass, const std::string& what) const {
  const AttentionShape& shape = layer_.options().shape;
  const std::vector<float> lse = pass.lse();
  std::vector<std::uint32_t> tokens;
  for (const Sample& sample : samples_) tokens.push_back(sample.token);
  const std::vector<float> outs = pass.outputs(tokens);
  std::vector<std::vector<std::uint32_t>> masks(samples_.size());
  for (std::size_t i = 0; i < samples_.size(); ++i) masks[i] = pass.mask(tokens[i], samples_[i].q_head);
  std::vector<Row> want(samples_.size());
  builders_.parallel_for(static_cast<std::uint32_t>(samples_.size()),
                         [&](std::uint32_t i) { want[i] = attend(samples_[i], masks[i]); });
  for (std::size_t i = 0; i < samples_.size(); ++i) {
    const Sample& sample = samples_[i];
    const float* const got = &outs[(i * shape.q_heads + sample.q_head) * shape.head_dim];
    double difference = 0.0, size = 0.0;
    for (std::uint32_t c = 0; c < shape.head_dim; ++c) {
      difference += std::pow(got[c] - want[i].out[c], 2);
      size += std::pow(want[i].out[c], 2);
    }
    const double error = std::sqrt(difference / size);
    const double lse_error = std::abs(lse[std::size_t{sample.token} * shape.q_heads + sample.q_head] - want[i].lse);
    if (error <= kTolerance && lse_error <= kTolerance) continue;  // NaN fails too.
    throw Error(Errc::device, "bench prefill: " + what + " is wrong at token " + std::to_string(sample.token) +
                                  ", query head " + std::to_string(sample.q_head) + " (relative error " +
                                  std::to_string(error) + ", of the log-sum-exp " + std::to_string(lse_error) +
                                  "); nothing of it was timed");
  }
}

}  // namespace sluice::tools
