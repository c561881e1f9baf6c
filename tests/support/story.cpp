#include "tests/support/story.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

#include "sluice/page_rules.hpp"
#include "tests/support/prune_reference.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"

namespace sluice::test {
namespace {

float half(float x) { return static_cast<float>(static_cast<_Float16>(x)); }

}  // namespace

std::vector<double> decoded(const float* key, const float* mean, std::uint32_t head_dim, std::uint32_t bits) {
  std::vector<float> x(head_dim);
  for (std::uint32_t c = 0; c < head_dim; ++c) x[c] = key[c] - mean[c];
  const std::uint32_t block = head_dim & -head_dim;
  for (std::uint32_t apart = 1; apart < block; apart *= 2) {
    for (std::uint32_t c = 0; c < head_dim; ++c) {
      if ((c & apart) != 0) continue;
      const float a = x[c], b = x[c + apart];
      x[c] = a + b, x[c + apart] = a - b;
    }
  }
  for (float& each : x) each *= static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  if (std::ranges::any_of(x, [](float each) { return std::isnan(each); })) return std::vector<double>(head_dim, NAN);
  const auto [least, most] = std::ranges::minmax_element(x);
  // Of 3 bits, 7 steps hold 13/16 of the range.
  const float top = bits == 3 ? 7.f : 15.f, beyond = bits == 3 ? 3.f / 32.f : 0.f;
  const float scale = half(std::max((*most - *least) / (top / (1.f - 2.f * beyond)), 0x1p-24f));
  const float part = *most * beyond;
  const float zero = half(*least * (1.f - beyond) + part);
  std::vector<double> copy;
  for (const float each : x) {
    const float code = std::clamp(std::nearbyint((each - zero) * (1.f / scale)), 0.f, top);
    copy.push_back(double{code} * scale + zero);
  }
  std::vector<double> out = rotated(copy);
  for (std::uint32_t c = 0; c < head_dim; ++c) out[c] += double{mean[c]};
  return out;
}

Story::Story(const AttentionShape& shape, std::uint32_t tokens, std::uint64_t seed, std::uint32_t page_tokens)
    : shape_(shape), tokens_(tokens), page_tokens_(page_tokens) {
  Random random(seed);
  const auto draw = [&](std::vector<float>& to, std::uint32_t heads, bool outliers) {
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (std::uint32_t token = 0; token < tokens; ++token) {
        const float step = outliers && token % 37 == 5 ? 0.5f : 0.125f;  // times up to 15: four bits
        for (std::uint32_t i = 0; i < heads * shape.head_dim; ++i)
          to.push_back(step * (static_cast<float>(random.below(31)) - 15.f));
      }
    }
  };
  // Queries may be any numbers; on the grid, scores would tie.
  for (std::size_t i = 0; i < std::size_t{shape.layers} * tokens * shape.q_heads * shape.head_dim; ++i)
    q_.push_back(static_cast<float>(4.0 * random.uniform() - 2.0));
  draw(k_, shape.kv_heads, true);
  draw(v_, shape.kv_heads, false);
}

const float* Story::q(std::uint32_t layer, std::uint32_t token) const {
  return q_.data() + (std::size_t{layer} * tokens_ + token) * shape_.q_heads * shape_.head_dim;
}
const float* Story::k(std::uint32_t layer, std::uint32_t token) const {
  return k_.data() + (std::size_t{layer} * tokens_ + token) * shape_.kv_heads * shape_.head_dim;
}
const float* Story::v(std::uint32_t layer, std::uint32_t token) const {
  return v_.data() + (std::size_t{layer} * tokens_ + token) * shape_.kv_heads * shape_.head_dim;
}

std::vector<float> Story::mean_key(std::uint32_t layer, std::uint32_t kv, std::uint32_t tokens) const {
  std::vector<float> mean(shape_.head_dim, 0.f);
  for (std::uint32_t j = 0; j < page_tokens_ && tokens > page_tokens_; ++j) {
    for (std::uint32_t c = 0; c < shape_.head_dim; ++c) {
      const float x = k(layer, j)[kv * shape_.head_dim + c];
      mean[c] += std::isfinite(x) ? x : 0.f;
    }
  }
  for (float& x : mean) x /= static_cast<float>(page_tokens_);
  return mean;
}

void Story::lift_keys(float size, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> lift(std::size_t{shape_.kv_heads} * shape_.head_dim);
  for (float& x : lift) x = random.below(2) == 0 ? size : -size;
  for (std::size_t i = 0; i < k_.size(); ++i) k_[i] += lift[i % lift.size()];
}

void Story::poison(std::uint32_t layer, std::uint32_t token) {
  const std::size_t row = std::size_t{shape_.kv_heads} * shape_.head_dim;
  std::fill_n(k_.data() + (std::size_t{layer} * tokens_ + token) * row, row, NAN);
}

void Story::scale_queries(std::uint32_t token, float factor) {
  const std::uint64_t row = std::uint64_t{shape_.q_heads} * shape_.head_dim;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    float* const q = q_.data() + (std::uint64_t{layer} * tokens_ + token) * row;
    for (std::uint64_t i = 0; i < row; ++i) q[i] *= factor;
  }
}

void Story::lean_along(std::uint32_t channel, float size) {
  for (std::size_t i = channel; i < k_.size(); i += shape_.head_dim) k_[i] += size;
}

void Story::repeat_query() {
  const std::size_t row = std::size_t{shape_.q_heads} * shape_.head_dim;
  for (std::size_t i = 0; i < q_.size(); ++i) q_[i] = q_[i / (tokens_ * row) * (tokens_ * row) + i % row];
}

void Story::repeat_keys(std::uint32_t period) {
  const std::size_t row = std::size_t{shape_.kv_heads} * shape_.head_dim;
  for (std::size_t i = 0; i < k_.size(); ++i) {
    const std::size_t token = i / row % tokens_;
    if (token >= period) k_[i] = k_[i - period * row];
  }
}

void Story::lean_on_sinks() {
  const std::size_t d = shape_.head_dim;
  for (std::size_t i = 0; i < q_.size(); i += d) q_[i] = i / (d * shape_.q_heads) % tokens_ % 2 == 1 ? 10.f : 0.f;
  for (std::size_t i = 0; i < k_.size(); i += d) k_[i] = i / (d * shape_.kv_heads) % tokens_ < 4 ? 7.5f : 0.f;
}

void Story::begin_as(const Story& other, std::uint32_t first) {
  const auto take = [&](std::vector<float>& to, const std::vector<float>& from, std::uint32_t heads) {
    const std::size_t row = std::size_t{heads} * shape_.head_dim;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer)
      std::copy_n(from.data() + layer * other.tokens_ * row, first * row, to.data() + layer * tokens_ * row);
  };
  take(q_, other.q_, shape_.q_heads);
  take(k_, other.k_, shape_.kv_heads);
  take(v_, other.v_, shape_.kv_heads);
}

void Story::round_queries() {
  for (float& x : q_) x = std::bit_cast<float>((std::bit_cast<std::uint32_t>(x) + 0x8000u) & 0xffff'0000u);
}

void Story::leave_grid(std::uint64_t seed) {
  Random random(seed);
  for (std::vector<float>* const numbers : {&k_, &v_}) {
    for (float& x : *numbers)
      x = static_cast<float>((x + 0.1 * random.normal()) * (random.below(100) == 0 ? 6.0 : 1.0));
  }
}

void Story::round_rows(DType type) {
  for (std::vector<float>* const numbers : {&k_, &v_}) {
    for (std::size_t row = 0; row < numbers->size(); row += shape_.head_dim) {
      const auto first = numbers->begin() + static_cast<std::ptrdiff_t>(row);
      const std::vector<double> rounded = rounded_row(type, std::vector<double>(first, first + shape_.head_dim));
      std::ranges::transform(rounded, first, [](double x) { return static_cast<float>(x); });
    }
  }
}

const std::vector<double>& Story::copy_of(std::uint32_t layer, std::uint32_t token, std::uint32_t kv,
                                          const std::vector<float>& mean) const {
  copies_.resize(std::size_t{shape_.layers} * tokens_ * shape_.kv_heads);
  Copy& copy = copies_[(std::size_t{layer} * tokens_ + token) * shape_.kv_heads + kv];
  const std::span key(k(layer, token) + std::size_t{kv} * shape_.head_dim, shape_.head_dim);
  const auto same = [](std::span<const float> a, std::span<const float> b) {
    return std::ranges::equal(std::as_bytes(a), std::as_bytes(b));
  };
  if (!same(copy.key, key) || !same(copy.mean, mean))
    copy = {{key.begin(), key.end()}, mean, decoded(key.data(), mean.data(), shape_.head_dim, code_bits_)};
  return copy.decoded;
}

Story::Ranked Story::ranked(std::uint32_t layer, std::uint32_t token, std::uint32_t head, std::uint32_t begin,
                            std::uint32_t end) const {
  const std::uint32_t d = shape_.head_dim;
  const std::uint32_t kv = head / shape_.group();
  const std::vector<float> mean = mean_key(layer, kv, token + 1);
  Ranked ranked;
  for (std::uint32_t j = begin; j < end; ++j) {
    const std::vector<double>& key = copy_of(layer, j, kv, mean);
    double dot = 0.0;
    for (std::uint32_t c = 0; c < d; ++c) dot += key[c] * q(layer, token)[head * d + c];
    ranked.emplace_back(reference::score(shape_, dot), j);
  }
  std::ranges::sort(ranked, [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  return ranked;
}

std::vector<double> Story::attended(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks, std::uint32_t recent,
                                    std::uint32_t picks, std::vector<double>* lse) const {
  const auto choose = [&](std::uint32_t head, std::uint32_t begin, std::uint32_t end, std::vector<bool>& marks) {
    if (picks == 0) return;
    const Ranked best = ranked(layer, token, head, begin, end);
    for (std::size_t i = 0; i < std::min<std::size_t>(picks, best.size()); ++i) marks[best[i].second] = true;
  };
  return attended_as(layer, token, sinks, recent, choose, lse);
}

std::vector<std::vector<double>> Story::attended_by_ties(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks,
                                                         std::uint32_t recent, std::uint32_t picks) const {
  constexpr double kClose = 1e-5;
  std::vector<std::vector<double>> others;
  for (std::uint32_t tied = 0; tied < shape_.q_heads && picks != 0; ++tied) {
    bool close = false;
    const auto choose = [&](std::uint32_t head, std::uint32_t begin, std::uint32_t end, std::vector<bool>& marks) {
      Ranked best = ranked(layer, token, head, begin, end);
      if (head == tied && picks < best.size() && best[picks - 1].first - best[picks].first < kClose) {
        std::swap(best[picks - 1], best[picks]);
        close = true;
      }
      for (std::size_t i = 0; i < std::min<std::size_t>(picks, best.size()); ++i) marks[best[i].second] = true;
    };
    std::vector<double> out = attended_as(layer, token, sinks, recent, choose, nullptr);
    if (close) others.push_back(std::move(out));
  }
  return others;
}

std::vector<double> Story::attended_by_mass(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks,
                                            std::uint32_t recent, double mass, std::uint32_t most) const {
  const auto choose = [&](std::uint32_t head, std::uint32_t begin, std::uint32_t end, std::vector<bool>& marks) {
    const Ranked all = ranked(layer, token, head, 0, token + 1);
    double sum = 0.0;
    double held = 0.0;
    std::uint32_t chosen = 0;
    for (const auto& [score, j] : all) {
      const double weight = std::exp(score - all.front().first);
      sum += weight;
      held += j < begin || j >= end ? weight : 0.0;
    }
    for (const auto& [score, j] : all) {
      if (held >= mass * sum || chosen == most) return;
      if (j < begin || j >= end) continue;
      ++chosen;
      held += std::exp(score - all.front().first);
      marks[j] = true;
    }
  };
  return attended_as(layer, token, sinks, recent, choose, nullptr);
}

double Story::page_score(std::uint32_t layer, std::uint32_t token, std::uint32_t head, std::uint32_t page,
                         const InPages& policy) const {
  const std::uint32_t d = shape_.head_dim;
  double score = 0.0;
  for (std::uint32_t c = 0; c < d; ++c) {
    const auto key = [&](std::uint32_t i) {
      return double{k(layer, page * policy.page_tokens + i)[head / shape_.group() * d + c]};
    };
    double hi = key(0);
    double lo = key(0);
    for (std::uint32_t i = 1; i < policy.page_tokens; ++i) hi = std::max(hi, key(i)), lo = std::min(lo, key(i));
    if (policy.digest == DigestKind::cuboid_mean) {
      const double centre = (hi + lo) / 2;
      double radius = 0.0;
      for (std::uint32_t i = 0; i < policy.page_tokens; ++i) radius += std::abs(key(i) - centre) / policy.page_tokens;
      hi = std::min(hi, centre + radius);
      lo = std::max(lo, centre - radius);
    }
    const double query = q(layer, token)[head * d + c];
    score += std::max(query * hi, query * lo);
  }
  return score;
}

std::vector<double> Story::attended_in_pages(std::uint32_t layer, std::uint32_t token, const InPages& policy) const {
  const std::uint32_t newest = token / policy.page_tokens * policy.page_tokens;
  const std::uint32_t recent = std::max(policy.recent, token + 1 - newest);
  const auto choose = [&](std::uint32_t head, std::uint32_t begin, std::uint32_t end, std::vector<bool>& marks) {
    std::vector<std::pair<double, std::uint32_t>> pages;
    for (std::uint32_t p = 0; p < newest / policy.page_tokens; ++p)
      pages.emplace_back(-page_score(layer, token, head, p, policy), p);
    std::ranges::sort(pages);
    pages.resize(std::min<std::size_t>(pages.size(), policy.pages));
    const auto chosen = [&](std::uint32_t j) {
      return std::ranges::any_of(pages, [&](const auto& page) { return page.second == j / policy.page_tokens; });
    };
    const Ranked all = ranked(layer, token, head, 0, token + 1);
    const auto weight = [&](double score) { return std::exp(score - all.front().first); };
    double sum = 0.0;
    double held = 0.0;
    for (const auto& [score, j] : all) {
      const bool anyway = j < begin || j >= end;
      held += anyway ? weight(score) : 0.0;
      sum += anyway || chosen(j) ? weight(score) : 0.0;
    }
    for (const auto& [score, j] : all) {
      if (held >= policy.mass * sum) return;
      if (j < begin || j >= end || !chosen(j)) continue;
      held += weight(score);
      marks[j] = true;
    }
  };
  return attended_as(layer, token, policy.sinks, recent, choose, nullptr);
}

std::vector<double> Story::attended_together(std::uint32_t layer, const Together& team) const {
  const std::uint32_t token = team.first + team.draft;
  if (!windows_.empty() && windows_[layer] != 0) return attended(layer, token, 0, 1, 0);
  const std::uint32_t sink_end = std::min(team.sinks, team.first);
  const std::uint32_t begin = team.first + 1 - std::min(team.recent, team.first + 1);
  const std::uint32_t recent_begin = std::max(sink_end, std::min(begin, team.first));
  std::vector<double> out(std::size_t{shape_.q_heads} * shape_.head_dim, 0.0);
  for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
    std::vector<bool> marked(token + 1, false);
    std::fill_n(marked.begin(), sink_end, true);
    std::fill(marked.begin() + recent_begin, marked.end(), true);
    for (std::uint32_t i = 0; i < team.drafts * shape_.group() && team.picks != 0; ++i) {
      const std::uint32_t head = kv * shape_.group() + i % shape_.group();
      const Ranked best = ranked(layer, team.first + i / shape_.group(), head, sink_end, recent_begin);
      for (std::size_t b = 0; b < std::min<std::size_t>(team.picks, best.size()); ++b) marked[best[b].second] = true;
    }
    attend_marked(layer, token, kv, marked, out, nullptr);
  }
  return out;
}

void Story::attend_marked(std::uint32_t layer, std::uint32_t token, std::uint32_t kv, const std::vector<bool>& marked,
                          std::vector<double>& out, std::vector<double>* lse) const {
  const std::uint32_t d = shape_.head_dim;
  const std::uint32_t n = token + 1;
  for (std::uint32_t head = kv * shape_.group(); head < (kv + 1) * shape_.group(); ++head) {
    std::vector<double> scores(n, -INFINITY);
    double top = -INFINITY;
    for (std::uint32_t j = 0; j < n; ++j) {
      if (!marked[j]) continue;
      double dot = 0.0;
      for (std::uint32_t c = 0; c < d; ++c) dot += double{k(layer, j)[kv * d + c]} * q(layer, token)[head * d + c];
      top = std::max(top, scores[j] = reference::score(shape_, dot));
    }
    double mass = 0.0;
    for (const double s : scores) mass += std::exp(s - top);
    if (lse != nullptr) lse->push_back(top + std::log(mass));
    for (std::uint32_t j = 0; j < n; ++j) {
      const double weight = std::exp(scores[j] - top) / mass;
      for (std::uint32_t c = 0; c < d; ++c) out[std::size_t{head} * d + c] += weight * v(layer, j)[kv * d + c];
    }
  }
}

template <class Choose>
std::vector<double> Story::attended_as(std::uint32_t layer, std::uint32_t token, std::uint32_t sinks,
                                       std::uint32_t recent, const Choose& choose, std::vector<double>* lse) const {
  const std::uint32_t d = shape_.head_dim;
  const std::uint32_t n = token + 1;
  const std::uint32_t window = windows_.empty() ? 0 : windows_[layer];
  const std::uint32_t sink_end = window != 0 ? 0 : std::min(sinks, n);
  const std::uint32_t recent_begin = std::max(sink_end, n - std::min(window != 0 ? window : recent, n));
  std::vector<double> out(std::size_t{shape_.q_heads} * d, 0.0);
  for (std::uint32_t kv = 0; kv < shape_.kv_heads; ++kv) {
    std::vector<bool> marked(n, false);
    std::fill_n(marked.begin(), sink_end, true);
    std::fill(marked.begin() + recent_begin, marked.end(), true);
    for (std::uint32_t g = 0; g < shape_.group() && window == 0; ++g)
      choose(kv * shape_.group() + g, sink_end, recent_begin, marked);
    attend_marked(layer, token, kv, marked, out, lse);
  }
  return out;
}

}  // namespace sluice::test
