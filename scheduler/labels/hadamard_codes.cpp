#include "scheduler/labels/hadamard_codes.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "scheduler/labels/key_blocks.hpp"

namespace sluice::scheduler {
namespace {

constexpr std::uint32_t kPerByte = 4;

std::uint32_t bucket(float value, float deviation) noexcept {
  return (value > -deviation ? 1u : 0u) + (value > 0.f ? 1u : 0u) + (value > deviation ? 1u : 0u);
}

/// Sums for a standard deviation.
struct Spread {
  double sum = 0.0, squares = 0.0, count = 0.0;
  void add(std::span<const float> values) noexcept {
    for (const float value : values) {
      const auto x = static_cast<double>(value);
      sum += x;
      squares += x * x;
    }
    count += static_cast<double>(values.size());
  }
  [[nodiscard]] float deviation() const noexcept {
    if (count == 0.0) return 0.f;
    const double mean = sum / count;
    return static_cast<float>(std::sqrt(std::max(squares / count - mean * mean, 0.0)));
  }
};

/// Distances of one query's buckets from all that a byte of a code may say.
using Distances = std::array<std::uint8_t, 256>;

void fill(std::span<const std::uint32_t> buckets, Distances& distances) noexcept {
  for (std::uint32_t byte = 0; byte < distances.size(); ++byte) {
    std::uint32_t sum = 0;
    for (std::uint32_t i = 0; i < buckets.size(); ++i) {
      const std::uint32_t of_key = (byte >> (2 * i)) & 3;
      sum += std::max(of_key, buckets[i]) - std::min(of_key, buckets[i]);
    }
    distances[byte] = static_cast<std::uint8_t>(sum);
  }
}

}  // namespace

void hadamard_transform(std::span<float> row) noexcept {
  const std::size_t block = row.size() & (~row.size() + 1);  // Its lowest bit.
  for (std::size_t half = 1; half < block; half *= 2) {
    for (std::size_t i = 0; i < row.size(); i += 2 * half) {
      for (std::size_t j = i; j < i + half; ++j) {
        const float a = row[j], b = row[j + half];
        row[j] = a + b;
        row[j + half] = a - b;
      }
    }
  }
  const float scale = 1.f / std::sqrt(static_cast<float>(block));
  for (float& x : row) x *= scale;
}

HadamardCodes::HadamardCodes(const AttentionShape& shape)
    : group_(shape.group()), head_dim_(shape.head_dim), bytes_((shape.head_dim + kPerByte - 1) / kPerByte) {}

void HadamardCodes::begin(const PromptContext& prompt) {
  if (prompt.tokens == 0) return;
  begun_ = true;
  Spread spread;
  for_each_key(*prompt.kv, head_dim_, 0, prompt.tokens, [&](float* key) {
    if (!is_finite(key, head_dim_)) return;
    hadamard_transform({key, head_dim_});
    spread.add({key, head_dim_});
  });
  deviation_ = spread.deviation();
  follow(prompt.tokens, *prompt.kv);
}

void HadamardCodes::follow(std::uint32_t tokens, KvReader& kv) {
  if (!begun_ || tokens == 0) return;
  truncate(tokens - 1);
  make_room(codes_, tokens, bytes_);
  for_each_key(kv, head_dim_, coded(), tokens, [&](float* key) {
    hadamard_transform({key, head_dim_});
    for (std::uint32_t at = 0; at < head_dim_; at += kPerByte) {
      std::uint32_t byte = 0;
      for (std::uint32_t i = 0; i < std::min(kPerByte, head_dim_ - at); ++i)
        byte |= bucket(key[at + i], deviation_) << (2 * i);
      codes_.push_back(static_cast<std::uint8_t>(byte));
    }
  });
}

void HadamardCodes::truncate(std::uint32_t tokens) noexcept { cut(codes_, tokens, bytes_); }

void HadamardCodes::estimate(const float* q, std::span<const std::uint32_t> tokens, KvReader& kv, float* out) const {
  if (tokens.empty()) return;
  if (!begun_) return kv.score(q, tokens, out);
  thread_local std::vector<Distances> distances;  // [group, bytes]
  thread_local std::vector<float> query;
  thread_local std::vector<std::uint32_t> buckets;
  distances.resize(std::size_t{group_} * bytes_);
  buckets.resize(head_dim_);
  for (std::uint32_t h = 0; h < group_; ++h) {
    query.assign(q + std::size_t{h} * head_dim_, q + std::size_t{h + 1} * head_dim_);
    hadamard_transform(query);
    Spread spread;
    spread.add(query);
    const float deviation = spread.deviation();
    for (std::uint32_t c = 0; c < head_dim_; ++c) buckets[c] = bucket(query[c], deviation);
    for (std::uint32_t b = 0; b < bytes_; ++b) {
      const std::uint32_t at = b * kPerByte;
      fill(std::span(buckets).subspan(at, std::min(kPerByte, head_dim_ - at)), distances[std::size_t{h} * bytes_ + b]);
    }
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::uint8_t* const code = codes_.data() + std::size_t{tokens[i]} * bytes_;
    for (std::uint32_t h = 0; h < group_; ++h) {
      const Distances* const of_head = distances.data() + std::size_t{h} * bytes_;
      std::uint32_t sum = 0;
      for (std::uint32_t b = 0; b < bytes_; ++b) sum += of_head[b][code[b]];
      out[i * group_ + h] = -static_cast<float>(sum);
    }
  }
}

std::uint64_t HadamardCodes::most_heap_bytes(const AttentionShape& shape, std::uint32_t tokens) noexcept {
  return room_of(tokens) * ((shape.head_dim + kPerByte - 1) / kPerByte);
}

}  // namespace sluice::scheduler
