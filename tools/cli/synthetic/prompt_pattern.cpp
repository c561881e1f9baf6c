#include "tools/cli/synthetic/prompt_pattern.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "sluice/error.hpp"
#include "sluice/prefill.hpp"
#include "tools/llama/random_weights.hpp"

namespace sluice::tools {
namespace {

constexpr std::array<PromptStructure, 4> kStructures{PromptStructure::vertical_slash, PromptStructure::narrow_slash,
                                                     PromptStructure::query_aware, PromptStructure::uniform};

/// Dimensions with a part of their own. Rotary pairs, or topics, begin behind them.
enum Dimension : std::uint32_t { kPassage, kSink, kOutlier, kNoiseOnly, kFirstShared };

constexpr float kDirection = 8.f;  ///< of a key along kPassage or kSink
constexpr float kOutlierSize = 10.f;
constexpr float kKeyNoise = 0.25f;
constexpr float kQueryNoise = 0.5f;

/// A passage of keys lies somewhere in every 8,192, the first one near the beginning.
constexpr std::uint32_t kCell = 8192;
constexpr std::uint32_t kPassageTokens = 512;
constexpr std::uint32_t kNarrowPassageTokens = 64;
constexpr std::uint32_t kFirstPassage = 1024;
/// Bands: the highest frequency and how far they go down, log-spaced as RoPE's are; the plateau and the power-law tails
/// that follow from it, as tokens of full height; the far band's height beside the local one's.
constexpr double kHighest = std::numbers::pi / 16;
constexpr double kOctaves = 8.0;
constexpr double kBandTokens = 12.0;
constexpr float kFarHeight = 0.93f;

constexpr std::uint32_t kTopics = 16;
constexpr float kTopicScore = 7.f;

/// A row's mass on passages, bands and sinks, each over the background's.
struct Shares {
  float passages, bands, sinks;
};
constexpr std::array<Shares, 4> kShares{{{14.f, 3.f, 2.f}, {3.f, 14.f, 2.f}, {6.f, 6.f, 7.f}, {4.f, 4.f, 11.f}}};

/// Normal, with tails: what lies beyond 3.1 deviations, one element in 6,000, becomes four times as large.
float noise(std::uint64_t key, std::uint64_t index) {
  const float value = random_normal(key, index);
  return std::abs(value) > 3.1f ? 4.f * value : value;
}

/// Uniform in [0, count).
std::uint32_t draw(std::uint64_t key, std::uint64_t index, std::uint32_t count) {
  std::uint64_t z = key + (index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<std::uint32_t>((z ^ (z >> 31)) % count);
}

bool is_slash(PromptStructure structure) noexcept {
  return structure == PromptStructure::vertical_slash || structure == PromptStructure::narrow_slash;
}

}  // namespace

const char* to_string(PromptStructure structure) noexcept {
  switch (structure) {
    case PromptStructure::vertical_slash: return "vertical_slash";
    case PromptStructure::narrow_slash: return "narrow_slash";
    case PromptStructure::query_aware: return "query_aware";
    case PromptStructure::uniform: return "uniform";
  }
  return "unknown";
}

PromptStructure parse_prompt_structure(std::string_view text, const std::string& flag) {
  std::string names;
  for (const PromptStructure structure : kStructures) {
    if (text == to_string(structure)) return structure;
    names += (names.empty() ? "" : ", ") + std::string(to_string(structure));
  }
  throw Error(Errc::invalid_argument, flag + ": '" + std::string(text) + "' is no structure; have " + names);
}

PromptPattern::PromptPattern(PromptStructure structure, const AttentionShape& shape, std::uint64_t seed,
                             std::optional<std::uint64_t> query_seed)
    : structure_(structure),
      shape_(shape),
      passage_(structure == PromptStructure::narrow_slash ? kNarrowPassageTokens : kPassageTokens),
      keys_(random_key(seed, "prompt keys")),
      values_(random_key(seed, "prompt values")),
      queries_(random_key(query_seed.value_or(seed), "prompt queries")),
      places_(random_key(seed, "prompt places")),
      pairs_(is_slash(structure) ? (shape.head_dim - 2 * kFirstShared) / 2 : 0) {
  constexpr std::uint64_t kUnit = 1u << 20;
  for (std::uint32_t p = 0; p < pairs_; ++p) {
    const double jitter = static_cast<double>(draw(places_, p, kUnit)) / kUnit;
    frequency_.push_back(kHighest * std::exp2(-kOctaves * (p + jitter) / pairs_));
  }
  if (structure == PromptStructure::query_aware) {
    topics_.resize(std::uint64_t{shape.kv_heads} * kTopics * shape.head_dim);
    for (std::size_t i = 0; i < topics_.size(); ++i) topics_[i] = draw(places_, i, 2) == 0 ? -1.f : 1.f;
  }
  const std::uint64_t distances = random_key(query_seed.value_or(seed), "prompt places");
  for (std::uint32_t head = 0; head < shape.q_heads && has_bands(); ++head) {
    // One band nearby, one at a distance of any order of magnitude.
    const double local = draw(distances, kUnit + 2 * head, 16);
    const double far = std::floor(256.0 * std::exp2(draw(distances, kUnit + 2 * head + 1, 1024) / 128.0));
    for (const double frequency : frequency_) {
      const double re = std::cos(frequency * local) + kFarHeight * std::cos(frequency * far);
      const double im = std::sin(frequency * local) + kFarHeight * std::sin(frequency * far);
      bands_.push_back(static_cast<float>(re));
      bands_.push_back(static_cast<float>(-im));
    }
  }
}

void PromptPattern::rotation(std::uint32_t position, float* out) const {
  for (std::uint32_t p = 0; p < pairs_; ++p) {
    const auto angle = static_cast<float>(std::fmod(position * frequency_[p], 2.0 * std::numbers::pi));
    out[2 * p] = std::cos(angle);
    out[2 * p + 1] = std::sin(angle);
  }
}

const float* PromptPattern::topic(std::uint32_t kv_head, std::uint32_t topic) const noexcept {
  return &topics_[(std::uint64_t{kv_head} * kTopics + topic) * shape_.head_dim];
}

void PromptPattern::key(std::uint32_t kv_head, std::uint32_t position, const float* rotation, float* out) const {
  const std::uint32_t dim = shape_.head_dim;
  const std::uint64_t row = (std::uint64_t{position} * shape_.kv_heads + kv_head) * dim;
  const float size = structure_ == PromptStructure::uniform ? 1.f : kKeyNoise;
  for (std::uint32_t i = 0; i < dim; ++i) out[i] = size * noise(keys_, row + i);
  out[kOutlier] += kOutlierSize;
  if (has_bands()) {
    const std::uint64_t cell = position / kCell;
    const std::uint32_t places = cell == 0 ? kFirstPassage : kCell - passage_;
    const std::uint32_t begin = draw(places_, (cell * shape_.kv_heads + kv_head + 1) << 24, places);
    const bool wanted = position % kCell - begin < passage_;  // Wraps before the passage.
    if (position < kSinks) {
      out[kSink] += kDirection;
    } else if (wanted) {
      out[kPassage] += kDirection * (1.f + 0.07f * random_normal(places_, row));
    } else {  // Bands pass the others by: logits of both would multiply where they meet.
      for (std::uint32_t i = 0; i < 2 * pairs_; ++i) out[kFirstShared + i] += rotation[i];
    }
  } else if (structure_ == PromptStructure::query_aware) {
    const std::uint64_t block = position / kPrefillBlock;
    const std::uint32_t own = draw(keys_, block << 32 | kv_head, kTopics);
    const float weight = 1.f + 0.1f * random_normal(places_, block * shape_.kv_heads + kv_head);
    const float* direction = topic(kv_head, own);
    for (std::uint32_t i = kFirstShared; i < dim; ++i) out[i] += weight * direction[i];
  }
}

void PromptPattern::value(std::uint32_t kv_head, std::uint32_t position, float* out) const {
  const std::uint64_t row = (std::uint64_t{position} * shape_.kv_heads + kv_head) * shape_.head_dim;
  for (std::uint32_t i = 0; i < shape_.head_dim; ++i) out[i] = noise(values_, row + i);
}

void PromptPattern::query(std::uint32_t q_head, std::uint32_t position, const float* rotation, float* out) const {
  const std::uint32_t dim = shape_.head_dim;
  const std::uint64_t row = (std::uint64_t{position} * shape_.q_heads + q_head) * dim;
  const float size = structure_ == PromptStructure::uniform ? 1.f : kQueryNoise;
  for (std::uint32_t i = 0; i < dim; ++i) out[i] = size * noise(queries_, row + i);
  if (has_bands()) {
    add_patterns(q_head, position, rotation, out);
  } else if (structure_ == PromptStructure::query_aware) {
    const std::uint64_t block = position / kPrefillBlock;
    const std::uint32_t wanted = draw(queries_, block << 32 | q_head, kTopics);
    const std::uint32_t shared = dim - kFirstShared;
    const float scale = kTopicScore * std::sqrt(static_cast<float>(dim)) / static_cast<float>(shared);
    const float* direction = topic(q_head / shape_.group(), wanted);
    for (std::uint32_t i = kFirstShared; i < dim; ++i) out[i] += scale * direction[i];
  }
}

/// The logits that give the head's shares over a background of `position` keys, whose scores have the bands' variance.
void PromptPattern::add_patterns(std::uint32_t q_head, std::uint32_t position, const float* rotation,
                                 float* out) const {
  const Shares& shares = kShares[q_head % kShares.size()];
  const double keys = position + 1.0;
  // Bands of height s bring a background variance of 2 c s^2; s - c s^2 is their logit over the background's.
  const double c = (1.0 + kFarHeight * kFarHeight) / (4.0 * pairs_);
  const double over = std::max(0.0, std::log(keys * shares.bands / (1.3 * kBandTokens)));
  const double s = (1.0 - std::sqrt(std::max(0.0, 1.0 - 4.0 * c * over))) / (2.0 * c);
  const double background = c * s * s;
  const double root = std::sqrt(static_cast<double>(shape_.head_dim));
  const double passage = std::log(shares.passages * kCell / static_cast<float>(passage_)) + background;
  const double sink = std::max(0.0, std::log(shares.sinks * keys / kSinks) + background);
  out[kPassage] += static_cast<float>(passage * root / kDirection);
  out[kSink] += static_cast<float>(sink * root / kDirection);
  const auto scale = static_cast<float>(s * root / pairs_);
  const float* band = &bands_[std::uint64_t{q_head} * 2 * pairs_];
  for (std::uint32_t p = 0; p < pairs_; ++p) {
    const float re = rotation[2 * p], im = rotation[2 * p + 1];
    out[kFirstShared + 2 * p] += scale * (re * band[2 * p] - im * band[2 * p + 1]);
    out[kFirstShared + 2 * p + 1] += scale * (re * band[2 * p + 1] + im * band[2 * p]);
  }
}

}  // namespace sluice::tools
