#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/catch.hpp"
#include "tests/support/engine_named.hpp"
#include "tests/support/engine_rig.hpp"
#include "tests/support/reference.hpp"

/// What cases of scores that the caller brings share.
namespace sluice::test::scores {

inline AttentionShape shape_of(std::uint32_t group) {
  return {.layers = 2, .q_heads = 2 * group, .kv_heads = 2, .head_dim = 64};
}

/// What the caller finds of tokens.
enum class Kind {
  any,
  ties,   ///< five values
  equal,  ///< one
  few,    ///< of eight tokens one has a number, one none, and the others minus infinity
  one,    ///< one has a number
};

inline float score_of(Kind kind, std::uint32_t layer, std::uint32_t kv_head, std::uint32_t asker, std::uint32_t token) {
  const std::uint32_t bits = mix_bits(token ^ mix_bits(asker ^ mix_bits(2 * layer + kv_head + 1)));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float any = static_cast<float>(bits >> 8) * 0x1p-20f - 8.f;
  switch (kind) {
    case Kind::any: return any;
    case Kind::ties: return static_cast<float>(bits % 5) - 2.f;
    case Kind::equal: return -0.25f;
    case Kind::few: return bits % 8 == 0 ? any : bits % 8 == 1 ? std::nanf("") : -kInfinity;
    case Kind::one: return token == asker / 2 ? any : -kInfinity;
  }
  return 0.f;
}

/// Scores of a forward's rows, [layers, rows, heads, tokens], in memory that host and device see.
class Brought {
 public:
  /// @param heads  KV heads, or 1: all have the same
  Brought(Device& device, std::uint32_t layers, std::uint32_t rows, std::uint32_t heads, std::uint32_t tokens)
      : layers_(layers),
        rows_(rows),
        heads_(heads),
        tokens_(tokens),
        buffer_(device.allocate_pinned(std::uint64_t{layers} * rows * heads * tokens * sizeof(float))) {
    std::fill_n(data(0), std::uint64_t{layers} * rows * heads * tokens, std::nanf(""));
  }
  /// Row `row` is that of token `asker`; of those behind it nobody may ask.
  void set(std::uint32_t row, Kind kind, std::uint32_t asker) {
    for (std::uint32_t layer = 0; layer < layers_; ++layer) {
      for (std::uint32_t head = 0; head < heads_; ++head) {
        float* const to = data(layer) + (std::uint64_t{row} * heads_ + head) * tokens_;
        for (std::uint32_t token = 0; token < tokens_; ++token)
          to[token] = token <= asker ? score_of(kind, layer, head, asker, token) : 1e30f;
      }
    }
  }
  [[nodiscard]] std::vector<TensorView> views() const {
    std::vector<TensorView> views;
    for (std::uint32_t layer = 0; layer < layers_; ++layer)
      views.push_back(dense_view(const_cast<const float*>(data(layer)), DType::f32, rows_, heads_, tokens_));
    return views;
  }

 private:
  [[nodiscard]] float* data(std::uint32_t layer) const {
    return reinterpret_cast<float*>(buffer_->data()) + std::uint64_t{layer} * rows_ * heads_ * tokens_;
  }
  std::uint32_t layers_, rows_, heads_, tokens_;
  std::unique_ptr<Buffer> buffer_;
};

/// `scores | top_k=PICKS` or, if there is a mass, `top_p`.
struct Policy {
  std::uint32_t sinks = 4;
  std::uint32_t recent = 12;
  std::uint32_t picks = 0;
  double mass = 0.0;

  [[nodiscard]] std::string text() const {
    const std::string budget = mass != 0.0 ? "top_p=" + std::to_string(mass) : "top_k=" + std::to_string(picks);
    return "scores | " + budget + " | near=0,sinks=" + std::to_string(sinks) + ",recent=" + std::to_string(recent);
  }
};

/// Rows that attend together, see Story::Together; one by itself if `drafts` is 0.
struct Team {
  std::uint32_t first = 0;
  std::uint32_t drafts = 0;
  std::uint32_t draft = 0;  ///< whose output this is
};

namespace detail {

/// The fewest of the values, largest first and all that equal the last, that have the share with what is attended
/// anyway, which weighs `anyway`; e to the power of a value is its weight.
inline std::vector<std::uint32_t> top_p(std::span<const float> values, double anyway, double mass) {
  std::vector<std::uint32_t> order;
  double all = anyway;
  for (std::uint32_t i = 0; i < values.size(); ++i) {
    if (!(values[i] > -INFINITY)) continue;
    order.push_back(i);
    all += std::exp(double{values[i]});
  }
  std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) { return values[a] > values[b]; });
  std::size_t kept = 0;
  for (double sum = anyway; kept < order.size(); ++kept) {
    if (sum >= mass * all && (kept == 0 || values[order[kept]] != values[order[kept - 1]])) break;
    sum += std::exp(double{values[order[kept]]});
  }
  order.resize(kept);
  return order;
}

}  // namespace detail

/// What the query heads of a layer get, in float64: [q_heads, head_dim].
inline std::vector<double> attended(const Story& story, const AttentionShape& shape, std::uint32_t layer,
                                    const Team& team, const Policy& policy, Kind kind, bool shared) {
  const std::uint32_t query = team.first + team.draft;
  const std::uint32_t common = team.drafts == 0 ? team.first + 1 : team.first;
  const std::uint32_t sink_end = std::min(policy.sinks, common);
  const std::uint32_t recent = std::max(1u, policy.recent);
  const std::uint32_t begin = std::max(sink_end, std::min(common, team.first + 1 - std::min(recent, team.first + 1)));
  std::vector<double> out;
  for (std::uint32_t kv = 0; kv < shape.kv_heads; ++kv) {
    std::vector<bool> marked(query + 1, true);
    std::fill(marked.begin() + sink_end, marked.begin() + begin, false);
    for (std::uint32_t i = 0; i < std::max(1u, team.drafts); ++i) {
      const auto score = [&](std::uint32_t token) {
        return score_of(kind, layer, shared ? 0 : kv, team.first + i, token);
      };
      std::vector<float> values;
      for (std::uint32_t token = sink_end; token < begin; ++token) values.push_back(score(token));
      double anyway = 0.0;
      for (std::uint32_t token = 0; token < common; ++token) {
        const double weight = token < sink_end || token >= begin ? std::exp(double{score(token)}) : 0.0;
        if (!std::isnan(weight)) anyway += weight;
      }
      const std::vector<std::uint32_t> chosen =
          policy.mass != 0.0 ? detail::top_p(values, anyway, policy.mass) : reference::top_k(values, policy.picks);
      for (const std::uint32_t at : chosen) marked[sink_end + at] = true;
    }
    for (std::uint32_t head = kv * shape.group(); head < (kv + 1) * shape.group(); ++head) {
      const float* const q = story.q(layer, query) + std::size_t{head} * shape.head_dim;
      std::vector<double> logits(query + 1, -INFINITY);
      for (std::uint32_t token = 0; token <= query; ++token) {
        double dot = 0.0;
        const float* const key = story.k(layer, token) + std::size_t{kv} * shape.head_dim;
        for (std::uint32_t c = 0; c < shape.head_dim; ++c) dot += double{key[c]} * q[c];
        if (marked[token]) logits[token] = reference::score(shape, dot);
      }
      const double top = *std::ranges::max_element(logits);
      std::vector<double> sums(shape.head_dim, 0.0);
      double mass = 0.0;
      for (std::uint32_t token = 0; token <= query; ++token) {
        const double weight = std::exp(logits[token] - top);
        mass += weight;
        for (std::uint32_t c = 0; c < shape.head_dim; ++c)
          sums[c] += weight * story.v(layer, token)[std::size_t{kv} * shape.head_dim + c];
      }
      for (const double sum : sums) out.push_back(sum / mass);
    }
  }
  return out;
}

/// Engines whose rows choose by scores alone, so that a GPU attends where it chooses.
inline EngineOptions options_for(const EngineRig& rig, const AttentionShape& shape, std::uint32_t rows,
                                 std::uint32_t near) {
  EngineOptions options{.shape = shape,
                        .kv_dtype = rig.kv_dtype,
                        .largest = {.decode_rows = rows, .scores = true},
                        .threads = 2,
                        .pin_threads = false};
  options.host_bytes = 120 * block_bytes(options);
  options.near_bytes = near * near_block_bytes(options);
  options.import_rows = 300;
  return named(options, {"scores | top_k=2048 | near=0,sinks=4,recent=508"});
}

inline double tolerance(const EngineRig& rig) { return rig.kv_dtype == DType::f32 ? 2e-5 : 2e-3; }

inline Story story_of(const EngineRig& rig, const AttentionShape& shape, std::uint32_t tokens, std::uint64_t seed) {
  Story story(shape, tokens, seed);
  if (rig.kv_dtype != DType::f32) story.round_queries();
  return story;
}

/// A sequence of `tokens` tokens.
inline Teller begun(Engine& engine, const EngineRig& rig, const Story& story, const std::string& policy,
                    std::uint32_t tokens) {
  Teller teller{.story = &story, .id = engine.begin(parse_policy(policy))};
  import_story(engine, rig, teller, tokens);
  return teller;
}

/// New tokens of a sequence, and what the caller finds of others for them.
struct Part {
  Teller* teller;
  Kind kind = Kind::any;
  std::uint32_t count = 1;
  bool prefill = false;
};

/// A forward of these; outputs of each row, [layers, q_heads, head_dim].
inline std::vector<std::vector<float>> run(Engine& engine, const EngineRig& rig, const Bucket& bucket,
                                           const std::vector<Part>& parts, bool shared = false) {
  const AttentionShape& shape = engine.options().shape;
  ForwardTensors tensors(*rig.device, shape, bucket.rows());
  const std::uint32_t longest = engine.options().largest.max_tokens;
  Brought brought(*rig.device, shape.layers, std::max(1u, bucket.decode_rows), shared ? 1 : shape.kv_heads, longest);
  std::vector<PlanItem> items;
  std::uint32_t row = 0, decoded = 0;
  for (const Part& part : parts) {
    items.push_back({.sequence = part.teller->id, .tokens = part.count, .prefill = part.prefill});
    for (std::uint32_t i = 0; i < part.count; ++i) {
      tensors.set(row++, *part.teller->story, part.teller->at);
      if (!part.prefill) brought.set(decoded++, part.kind, part.teller->at);
      ++part.teller->at;
    }
  }
  tensors.bring(brought.views());
  (void)run_batch(engine, rig, tensors, items, bucket);
  std::vector<std::vector<float>> out;
  for (std::uint32_t i = 0; i < row; ++i) out.push_back(tensors.out(i));
  return out;
}

inline std::vector<float> decode(Engine& engine, const EngineRig& rig, Teller& teller, Kind kind = Kind::any,
                                 bool shared = false) {
  Bucket bucket = engine.options().largest;
  bucket.prefill_rows = bucket.prefills = 0;
  return run(engine, rig, bucket, {{.teller = &teller, .kind = kind}}, shared).front();
}

/// The largest difference of a row's outputs to what the reference says.
inline double off(std::span<const float> got, const Story& story, const AttentionShape& shape, const Team& team,
                  const Policy& policy, Kind kind, bool shared = false) {
  const std::size_t row = std::size_t{shape.q_heads} * shape.head_dim;
  double most = 0.0;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const std::vector<double> want = attended(story, shape, layer, team, policy, kind, shared);
    most = std::max(most, difference(got.subspan(layer * row, row), want));
  }
  return most;
}

}  // namespace sluice::test::scores
