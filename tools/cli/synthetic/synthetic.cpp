#include "tools/cli/synthetic/synthetic.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "cpu/stages/rows.hpp"
#include "sluice/error.hpp"
#include "sluice/step/e4m3.hpp"
#include "sluice/units.hpp"
#include "tools/cli/synthetic/synthetic_parts.hpp"

namespace sluice::tools {
namespace {

using namespace synthetic;

constexpr double kLongestPeriod = 8192;  ///< tokens; of the slashes
constexpr std::uint32_t kDistanceDims = 1;
constexpr float kSinkValue = 0.1f;
constexpr double kMostOnSinks = 0.999;

/// Unit variance, neighbours correlate by 1/2.
float heavy(std::uint64_t stream, std::uint64_t token) noexcept {
  return (noise(stream, token) + noise(stream, token + 1)) * std::numbers::sqrt2_v<float> / 2.f;
}

/// To what E4M3 with the row's scale stands for; see e4m3.hpp.
void round_row(std::span<float> row) {
  constexpr int kBits = 3, kLeastExponent = -6;  // Of the mantissa; of codes that are not subnormal.
  float most = 0.f;
  for (const float x : row) most = std::max(most, std::abs(x));
  if (most == 0.f) return;
  const float scale = std::exp2(std::ceil(std::log2(most / E4m3::kLargest)));
  for (float& x : row) {
    const float code = x / scale;
    const int exponent = std::max(kLeastExponent, code == 0.f ? kLeastExponent : std::ilogb(code));
    const float quantum = std::ldexp(1.f, exponent - kBits);
    x = std::nearbyint(code / quantum) * quantum * scale;
  }
}

/// All rows of a page, [page_tokens, head_dim] each.
void write_rows(const PageLayout& layout, const float* k, const float* v, std::byte* page) {
  const cpu::Kernels& kernels = cpu::fastest_kernels();
  for (std::uint32_t r = 0; r < layout.page_tokens; ++r) {
    auto* const scales = const_cast<float*>(cpu::scales_in(layout, page, r));
    std::byte* const row = page + r * layout.row_bytes();
    cpu::write_row(kernels, layout, k + std::size_t{r} * layout.head_dim, row, scales);
    cpu::write_row(kernels, layout, v + std::size_t{r} * layout.head_dim, row + layout.half_bytes(),
                   scales == nullptr ? nullptr : scales + 1);
  }
}

}  // namespace

void append_runs(std::uint32_t begin, std::uint32_t end, std::uint32_t page_tokens, std::vector<PageRun>& runs) {
  while (begin < end) {
    const std::uint32_t page = begin / page_tokens;
    const std::uint32_t stop = std::min(end, (page + 1) * page_tokens);
    runs.push_back({.page = page,
                    .begin = static_cast<std::uint16_t>(begin - page * page_tokens),
                    .end = static_cast<std::uint16_t>(stop - page * page_tokens)});
    begin = stop;
  }
}

void check_sinks(const SyntheticOptions& options) {
  for (const double share : options.sinks) {
    if (share >= 0.0 && share <= kMostOnSinks) continue;  // NaN is refused too.
    throw Error(Errc::invalid_argument, "--sinks: " + std::to_string(share) + " is no share in [0, 0.999]");
  }
  constexpr std::uint32_t kLeast = 16 * SyntheticLayer::kSinks;
  if (options.sinks.empty() || options.tokens >= kLeast) return;
  throw Error(Errc::invalid_argument, "--sinks: a context of " + std::to_string(options.tokens) +
                                          " tokens is too short for them; give at least " + std::to_string(kLeast));
}

SyntheticLayer::SyntheticLayer(const SyntheticOptions& options, const cpu::Topology& topology,
                               const std::shared_ptr<const cpu::Workers>& builders)
    : options_(options),
      own_dims_(std::min(options.shape.group(), options.shape.head_dim / 8)),
      pairs_(options.shape.head_dim / 8),
      device_(builders),
      pages_(static_cast<std::uint32_t>(div_up(options.tokens + options.steps, options.layout.page_tokens))) {
  check_sinks(options);
  for (std::uint32_t m = 0; m < pairs_; ++m) {
    frequency_.push_back(std::numbers::pi * std::pow(kLongestPeriod / 2.0, -(m + 0.5) / pairs_));  // Log-spaced.
  }
  const std::uint64_t frames = std::uint64_t{pages_} * options_.shape.kv_heads;
  pool_ = std::make_unique<cpu::HostPool>(
      cpu::HostPoolOptions{.layout = options_.layout, .bytes = frames * options_.layout.page_bytes()}, topology,
      *builders, device_);
  const std::vector<PageRef> refs = pool_->allocate(static_cast<std::uint32_t>(frames));
  frames_.resize(frames);
  for (std::size_t i = 0; i < refs.size(); ++i) {
    frames_[(i % options_.shape.kv_heads) * pages_ + i / options_.shape.kv_heads] = refs[i].frame;
  }
  write_pages(*builders);
  write_queries();
  if (!options_.sinks.empty()) aim_queries(*builders);
}

std::uint32_t SyntheticLayer::noise_dims() const noexcept {
  const std::uint32_t sink_dims = options_.sinks.empty() ? 0 : 1;
  return options_.shape.head_dim - kHeavySharedDims - own_dims_ - kDistanceDims - 2 * pairs_ - sink_dims;
}

KvView SyntheticLayer::view(std::uint32_t kv_head) const noexcept {
  return {.base = pool_->base(), .frames = frames_.data() + std::uint64_t{kv_head} * pages_, .layout = options_.layout};
}

const float* SyntheticLayer::query(std::uint32_t kv_head, std::uint32_t step) const noexcept {
  const std::uint64_t rows = options_.prompt_queries + options_.steps;
  const std::uint64_t row = kv_head * rows + options_.prompt_queries + step;
  return queries_.data() + row * options_.shape.group() * options_.shape.head_dim;
}

std::span<const float> SyntheticLayer::prompt_queries(std::uint32_t kv_head) const noexcept {
  const std::uint64_t row_size = std::uint64_t{options_.shape.group()} * options_.shape.head_dim;
  const std::uint64_t rows = options_.prompt_queries + options_.steps;
  return {queries_.data() + kv_head * rows * row_size, options_.prompt_queries * row_size};
}

void SyntheticLayer::write_pages(const cpu::Workers& builders) {
  builders.parallel_for(pages_, [&](std::uint32_t page) { write_page(page); });
}

void SyntheticLayer::write_page(std::uint32_t page) {
  const std::uint32_t rows = options_.layout.page_tokens;
  const std::uint32_t dim = options_.shape.head_dim;
  std::vector<float> rotation(std::size_t{rows} * pairs_ * 2);
  for (std::uint32_t r = 0; r < rows; ++r) {
    for (std::uint32_t m = 0; m < pairs_; ++m) {
      const double angle = frequency_[m] * static_cast<double>(std::uint64_t{page} * rows + r);
      rotation[(r * pairs_ + m) * 2] = static_cast<float>(std::cos(angle));
      rotation[(r * pairs_ + m) * 2 + 1] = static_cast<float>(std::sin(angle));
    }
  }
  std::vector<float> k(std::size_t{rows} * dim);
  std::vector<float> v(std::size_t{rows} * dim);
  for (std::uint32_t head = 0; head < options_.shape.kv_heads; ++head) {
    const std::uint64_t values = stream_of(options_.seed, head, kValues);
    for (std::uint32_t r = 0; r < rows; ++r) {
      const std::uint64_t token = std::uint64_t{page} * rows + r;
      key(head, static_cast<std::uint32_t>(token), &rotation[r * pairs_ * 2], &k[r * dim]);
      const float size = !options_.sinks.empty() && token < kSinks ? kSinkValue : 1.f;
      for (std::uint32_t c = 0; c < dim; ++c) v[r * dim + c] = size * noise(values, token * dim + c);
    }
    for (std::uint32_t r = 0; options_.rounded && r < rows; ++r) {
      round_row({&k[r * dim], dim});
      round_row({&v[r * dim], dim});
    }
    write_rows(options_.layout, k.data(), v.data(), view(head).page(page));
  }
}

/// Key: [heavy terms: shared, then own | -log(distance to the last step) | rotary pairs | noise | sinks, if any].
void SyntheticLayer::key(std::uint32_t kv_head, std::uint32_t token, const float* rotation, float* out) const {
  float* at = out;
  if (!options_.sinks.empty()) {
    const bool sink = token < kSinks;
    out[options_.shape.head_dim - 1] = sink ? kSinkKey : 0.f;
    if (sink) {
      std::fill_n(out, options_.shape.head_dim - 1, 0.f);
      return;
    }
  }
  for (std::uint32_t i = 0; i < kHeavySharedDims + own_dims_; ++i) {
    *at++ = heavy(stream_of(options_.seed, kv_head, kHeavy + i), token);
  }
  const std::uint32_t end = std::max(options_.tokens + options_.steps, token + 1);
  *at++ = -std::log(static_cast<float>(end - token));
  at = std::copy_n(rotation, pairs_ * 2, at);
  const std::uint64_t stream = stream_of(options_.seed, kv_head, kKeyNoise);
  for (std::uint64_t i = 0; i < noise_dims(); ++i) {
    *at++ = noise(stream, std::uint64_t{token} * options_.shape.head_dim + i);
  }
}

}  // namespace sluice::tools
