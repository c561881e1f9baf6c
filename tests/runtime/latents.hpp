#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sluice/engine.hpp"
#include "tests/runtime/own_device.hpp"
#include "tests/support/random.hpp"

/// Latent attention of one story, and engines that are told it.
namespace sluice::test {

inline constexpr std::uint32_t kLatentLayers = 2;

/// Queries and keys of one sequence, at random.
struct Latents {
  Latents(std::uint32_t q_heads, std::uint32_t dim, std::uint32_t used, std::uint32_t count = 200)
      : heads(q_heads),
        head_dim(dim),
        value_dim(used),
        tokens(count),
        q(kLatentLayers * count * q_heads * dim),
        k(kLatentLayers * count * dim) {
    Random random(heads * 1000 + head_dim);
    for (float& x : q) x = static_cast<float>(random.normal());
    for (float& x : k) x = static_cast<float>(random.normal());
  }

  std::uint32_t heads, head_dim, value_dim, tokens;
  std::vector<float> q, k;

  [[nodiscard]] const float* query(std::uint32_t layer, std::uint32_t token) const {
    return q.data() + (std::size_t{layer} * tokens + token) * heads * head_dim;
  }
  [[nodiscard]] const float* key(std::uint32_t layer, std::uint32_t token) const {
    return k.data() + (std::size_t{layer} * tokens + token) * head_dim;
  }
  [[nodiscard]] double score(std::uint32_t layer, std::uint32_t token, std::uint32_t head, std::uint32_t j) const {
    double dot = 0.0;
    for (std::uint32_t c = 0; c < head_dim; ++c)
      dot += double{query(layer, token)[head * head_dim + c]} * key(layer, j)[c];
    return dot / std::sqrt(double{static_cast<float>(head_dim)});
  }
  /// Of one query head over some tokens, in float64: [value_dim], and the log of the sum of exponentials behind it.
  [[nodiscard]] std::vector<double> attended(std::uint32_t layer, std::uint32_t token, std::uint32_t head,
                                             const std::set<std::uint32_t>& some) const {
    double top = -INFINITY, mass = 0.0;
    for (const std::uint32_t j : some) top = std::max(top, score(layer, token, head, j));
    std::vector<double> out(value_dim + 1, 0.0);
    for (const std::uint32_t j : some) {
      const double weight = std::exp(score(layer, token, head, j) - top);
      mass += weight;
      for (std::uint32_t c = 0; c < value_dim; ++c) out[c] += weight * key(layer, j)[c];
    }
    for (std::uint32_t c = 0; c < value_dim; ++c) out[c] /= mass;
    out[value_dim] = top + std::log(mass);
    return out;
  }
};

/// Drives sequences: chunks of prompts, then tokens. Gives outputs and log-sums of each layer's last row.
class LatentDriver {
 public:
  /// Where forwards run: at once, or on a stream of the engine's device.
  LatentDriver(Engine& engine, const Latents& of, Stream* stream = nullptr)
      : engine_(engine), of_(of), stream_(stream) {}

  struct Item {
    SequenceId sequence;
    std::uint32_t first = 0;  ///< token of the story
    std::uint32_t count = 1;
  };

  std::vector<float> forward(SequenceId id, std::uint32_t first, std::uint32_t count, bool prefill) {
    Bucket bucket = engine_.options().largest;
    if (prefill) bucket = {.decode_rows = 0, .prefill_rows = count, .prefills = 1, .max_tokens = bucket.max_tokens};
    if (!prefill) bucket.decode_rows = 1, bucket.prefill_rows = bucket.prefills = 0;
    return run({{id, first, count}}, bucket, prefill);
  }
  /// One token each, in one forward: what `forward` gives of each, one after the other.
  std::vector<float> decode(const std::vector<Item>& items) {
    Bucket bucket = engine_.options().largest;
    bucket.decode_rows = static_cast<std::uint32_t>(items.size());
    bucket.prefill_rows = bucket.prefills = 0;
    return run(items, bucket, false);
  }
  void prompt(SequenceId id, std::uint32_t end, std::uint32_t chunk = 48) {
    for (std::uint32_t at = 0; at < end; at += chunk) (void)forward(id, at, std::min(chunk, end - at), true);
  }
  void import(SequenceId id, std::uint32_t first, std::uint32_t count) {
    const AttentionShape& shape = engine_.options().shape;
    for (std::uint32_t layer = 0; layer < kLatentLayers; ++layer) {
      Tensors& tensors = tensors_.emplace_back(tensors_of(layer, {{id, first, count}}, 0));
      const auto kv = dense_view(std::as_const(tensors.k).data(), DType::f32, count, shape.kv_heads, shape.head_dim);
      engine_.import_prefix(id, LayerId{layer}, kv, shape.latent() ? TensorView{} : kv, stream_);
    }
    synchronize();
    tensors_.clear();
  }

 private:
  /// Of a layer, until the stream has run.
  struct Tensors {
    std::vector<float> q, k, out, lse, scores;
  };

  std::vector<float> run(const std::vector<Item>& items, const Bucket& bucket, bool prefill) {
    const AttentionShape& shape = engine_.options().shape;
    std::vector<PlanItem> plan;
    std::uint32_t rows = 0;
    for (const Item& item : items) {
      plan.push_back({.sequence = item.sequence, .tokens = item.count, .prefill = prefill});
      rows += item.count;
    }
    const Batch batch = engine_.plan(plan, bucket, stream_);
    for (std::uint32_t layer = 0; layer < kLatentLayers; ++layer) {
      Tensors& t = tensors_.emplace_back(tensors_of(layer, items, bucket.max_tokens));
      const auto kv = dense_view(std::as_const(t.k).data(), DType::f32, rows, shape.kv_heads, shape.head_dim);
      const auto decoded = static_cast<std::uint32_t>(items.size());
      engine_.attend(bucket, LayerId{layer},
                     {.q = dense_view(std::as_const(t.q).data(), DType::f32, rows, shape.q_heads, shape.head_dim),
                      .k = kv,
                      .v = shape.latent() ? TensorView{} : kv,
                      .out = dense_view(t.out.data(), DType::f32, rows, shape.q_heads, shape.out_dim()),
                      .lse = t.lse.data(),
                      .stream = stream_,
                      .scores = bucket.scores ? dense_view(std::as_const(t.scores).data(), DType::f32, decoded, 1,
                                                           bucket.max_tokens)
                                              : TensorView{}});
    }
    engine_.finish(batch);
    synchronize();
    std::vector<float> last;
    for (std::uint32_t row = 0, i = 0; i < items.size(); ++i) {
      row += items[i].count;
      for (const Tensors& t : tensors_) add_row(t, row - 1, last);
    }
    tensors_.clear();
    return last;
  }
  void add_row(const Tensors& t, std::uint32_t row, std::vector<float>& last) const {
    const AttentionShape& shape = engine_.options().shape;
    for (std::uint32_t h = 0; h < shape.q_heads; ++h) {
      const std::size_t at = std::size_t{row} * shape.q_heads + h;
      const auto out = t.out.begin() + static_cast<std::ptrdiff_t>(at * shape.out_dim());
      last.insert(last.end(), out, out + of_.value_dim);
      last.push_back(t.lse[at]);
    }
  }
  /// Scores are those of query head 0, of the first token of each item.
  [[nodiscard]] Tensors tensors_of(std::uint32_t layer, const std::vector<Item>& items, std::uint32_t tokens) const {
    const AttentionShape& shape = engine_.options().shape;
    Tensors all;
    for (const Item& item : items) {
      for (std::uint32_t t = item.first; t < item.first + item.count; ++t) {
        all.q.insert(all.q.end(), of_.query(layer, t), of_.query(layer, t) + of_.heads * of_.head_dim);
        for (std::uint32_t h = 0; h < shape.kv_heads; ++h)
          all.k.insert(all.k.end(), of_.key(layer, t), of_.key(layer, t) + of_.head_dim);
      }
      const std::size_t begin = all.scores.size();
      all.scores.resize(begin + tokens);
      for (std::uint32_t j = 0; tokens != 0 && j <= item.first; ++j)
        all.scores[begin + j] = static_cast<float>(of_.score(layer, item.first, 0, j));
    }
    const std::size_t rows = all.q.size() / (std::size_t{of_.heads} * of_.head_dim);
    all.out.assign(rows * shape.q_heads * shape.out_dim(), 1e30f);
    all.lse.resize(rows * shape.q_heads);
    return all;
  }
  void synchronize() const {
    if (stream_ != nullptr) stream_->synchronize(deadline_after(std::chrono::seconds(60)));
  }

  Engine& engine_;
  const Latents& of_;
  Stream* stream_;
  std::deque<Tensors> tensors_;
};

}  // namespace sluice::test
