// The queries of a SyntheticLayer.
#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "cpu/stages/stages.hpp"
#include "tools/cli/synthetic/synthetic.hpp"
#include "tools/cli/synthetic/synthetic_parts.hpp"

namespace sluice::tools {
namespace {

using namespace synthetic;

/// Standard deviation of the heavy term, weight of the log-distance, standard deviation of slashes and of noise. The
/// four kinds of head alternate over the KV heads. Their mixture was fitted: LFPS at alpha 0.2 scores about the share
/// of positions that its paper reports for a real model, falling with the length (Table 4: 6% at 4K, 2% at 64K).
struct HeadKind {
  double heavy;
  double distance;
  double slashes;
  double noise;
};
constexpr std::array<HeadKind, 4> kKinds{{{.heavy = 2.0, .distance = 1.7, .slashes = 1.0, .noise = 0.5},
                                          {.heavy = 2.5, .distance = 1.4, .slashes = 1.0, .noise = 0.5},
                                          {.heavy = 3.0, .distance = 1.7, .slashes = 1.0, .noise = 0.5},
                                          {.heavy = 4.5, .distance = 1.0, .slashes = 1.0, .noise = 0.5}}};

constexpr HeadKind kNoise{.heavy = 0.0, .distance = 0.0, .slashes = 0.0, .noise = 1.0};

constexpr double kDrift = 0.95;  ///< correlation of the noise directions from one step to the next

}  // namespace

void SyntheticLayer::write_queries() {
  const std::uint64_t rows = options_.prompt_queries + options_.steps;
  queries_.assign(rows * options_.shape.q_heads * options_.shape.head_dim, 0.f);
  for (std::uint32_t head = 0; head < options_.shape.q_heads; ++head) write_head_queries(head);
}

void SyntheticLayer::write_head_queries(std::uint32_t head) {
  const std::uint32_t dim = options_.shape.head_dim;
  const std::uint32_t group = options_.shape.group();
  const std::uint32_t rows = options_.prompt_queries + options_.steps;
  const bool structured = options_.pattern == SyntheticPattern::structured;
  const HeadKind& kind = structured ? kKinds[head / group % kKinds.size()] : kNoise;
  const double kept = structured ? kDrift : 0.0;
  const double scale = std::sqrt(static_cast<double>(dim));
  const std::uint64_t stream = stream_of(options_.seed, head, kQueries);
  std::uint64_t draws = 0;
  const auto normal = [&] { return static_cast<double>(noise(stream, draws++)); };

  // A cosine has variance 1/2; the phases make each head's slashes its own.
  const double slash = scale * kind.slashes * std::sqrt(2.0 / pairs_);
  std::vector<double> phase(pairs_);
  for (double& p : phase) p = std::numbers::pi * normal();
  std::vector<double> drift(noise_dims());
  for (double& d : drift) d = normal();
  const double drift_scale = scale * kind.noise / std::sqrt(static_cast<double>(drift.size()));
  for (std::uint32_t row = 0; row < rows; ++row) {
    float* q = &queries_[((std::size_t{head / group} * rows + row) * group + head % group) * dim];
    const double position = static_cast<double>(options_.tokens) - options_.prompt_queries + row;
    q[0] = static_cast<float>(scale * kind.heavy * std::sqrt(options_.group_correlation));
    q[kHeavySharedDims + head % group % own_dims_] =
        static_cast<float>(scale * kind.heavy * std::sqrt(1.0 - options_.group_correlation));
    float* at = q + kHeavySharedDims + own_dims_;
    *at++ = static_cast<float>(scale * kind.distance);
    for (std::uint32_t m = 0; m < pairs_; ++m) {
      *at++ = static_cast<float>(slash * std::cos(frequency_[m] * position + phase[m]));
      *at++ = static_cast<float>(slash * std::sin(frequency_[m] * position + phase[m]));
    }
    for (double& d : drift) {
      *at++ = static_cast<float>(drift_scale * d);
      d = kept * d + std::sqrt(1.0 - kept * kept) * normal();
    }
  }
}

void SyntheticLayer::aim_queries(const cpu::Workers& builders) {
  const AttentionShape& shape = options_.shape;
  const std::uint32_t rows = options_.prompt_queries + options_.steps;
  const std::size_t row_size = std::size_t{shape.group()} * shape.head_dim;
  std::vector<float> out(std::size_t{shape.q_heads} * shape.head_dim);
  std::vector<float> lse(shape.q_heads);
  std::vector<AttendTask> tasks(shape.kv_heads);
  std::vector<PageRun> others;
  for (std::uint32_t row = 0; row < rows; ++row) {
    const std::uint32_t tokens = options_.tokens - options_.prompt_queries + row + 1;
    if (tokens <= kSinks) continue;
    others.clear();
    append_runs(kSinks, tokens, options_.layout.page_tokens, others);
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
      const std::size_t q_head = std::size_t{head} * shape.group();
      tasks[head].q = &queries_[(std::size_t{head} * rows + row) * row_size];
      tasks[head].kv = view(head);
      tasks[head].runs = others;
      tasks[head].out = {.out = &out[q_head * shape.head_dim], .lse = &lse[q_head]};
    }
    cpu::attend({.workers = builders}, tasks, shape);
    for (std::uint32_t head = 0; head < shape.q_heads; ++head) {
      const double share = std::max(options_.sinks[head % options_.sinks.size()], 1e-9);  // log(0) would not add up.
      const double score = lse[head] + std::log(share / (1.0 - share) / kSinks);
      float* const q = &queries_[(std::size_t{head / shape.group()} * rows + row) * row_size];
      q[(head % shape.group() + 1) * shape.head_dim - 1] =
          static_cast<float>(score * std::sqrt(static_cast<double>(shape.head_dim)) / kSinkKey);
    }
  }
}

}  // namespace sluice::tools
