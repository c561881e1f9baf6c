#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "sluice/error.hpp"
#include "tools/llama/engine.hpp"
#include "tools/llama/products.hpp"
#include "tools/llama/weights.hpp"

namespace sluice::tools {
namespace {

/// Blocks of a product that one task computes. They depend on the shape only, never on the number of threads,
/// and so do the results. 256 weight rows of a few hundred columns stay in L2 while 128 tokens pass.
constexpr std::uint32_t kBlockRows = 128;
constexpr std::uint32_t kBlockOuts = 256;
/// Weights that one task of a decode step reads: few enough to stay in L2 while the batch's rows pass, and
/// for all threads to finish together; enough to be worth a task.
constexpr std::uint64_t kStepBytes = 192 * KiB;
constexpr std::uint32_t kMaxThreads = 4096;
/// Rows of an elementwise pass that one task takes.
constexpr std::uint32_t kPassRows = 16;

/// A matrix of activations: rows of `inner` floats, every `stride` floats.
template <class T>
struct Rows {
  T* data = nullptr;
  std::uint64_t stride = 0;
};

void rms_norm(const float* x, std::span<const float> gain, double eps, float* out) {
  double sum = 0;  // in double: hidden sizes of thousands, and outliers
  for (std::size_t i = 0; i < gain.size(); ++i) sum += static_cast<double>(x[i]) * x[i];
  const auto scale = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(gain.size()) + eps));
  for (std::size_t i = 0; i < gain.size(); ++i) out[i] = x[i] * scale * gain[i];
}

/// Rotates the pairs (i, i + half) of one head.
/// @param rotation  [2, half]: cosines, then sines
void rotate(float* head, const float* rotation, std::size_t half) {
  for (std::size_t i = 0; i < half; ++i) {
    const float a = head[i];
    const float b = head[i + half];
    head[i] = a * rotation[i] - b * rotation[half + i];
    head[i + half] = b * rotation[i] + a * rotation[half + i];
  }
}

int arena_size(std::uint32_t threads) {
  if (threads > kMaxThreads) {
    throw Error(Errc::invalid_argument, "threads must be at most " + std::to_string(kMaxThreads) + ", is " +
                                            std::to_string(threads) + "; 0 takes all");
  }
  return threads == 0 ? tbb::task_arena::automatic : static_cast<int>(threads);
}

/// The CPU's buffers of a forward pass.
struct HostActivations final : Activations::Memory {
  std::uint32_t rows = 0;
  std::vector<float> residual;  ///< [rows, hidden]
  std::vector<float> normed;    ///< [rows, hidden]
  std::vector<float> qkv;       ///< [rows, q_heads + 2 * kv_heads, head_dim]
  std::vector<float> rehearsed;  ///< [rows, q_heads, head_dim] what is rehearsed of the next layer's queries
  std::vector<float> attended;  ///< [rows, q_heads, head_dim]
  std::vector<float> gate_up;   ///< [rows, 2, intermediate]
  std::vector<float> rotation;  ///< [rows, 2, head_dim / 2]: cosines, then sines
  std::vector<float> logits;    ///< [rows that were chosen, vocab_size]
};

/// Buffers stay as long as they once were.
void grow(std::vector<float>& buffer, std::uint64_t count) {
  if (buffer.size() < count) buffer.resize(count);
}

HostActivations& buffers(Activations& work) {
  if (!work.memory) work.memory = std::make_unique<HostActivations>();
  return dynamic_cast<HostActivations&>(*work.memory);
}

class HostEngine final : public Engine {
 public:
  HostEngine(const ModelConfig& model_config, const WeightSource& source, const ModelOptions& options)
      : config_(model_config),
        arena_(arena_size(options.threads)),
        weights_(load_weights(source, config_)),
        frequencies_(rope_frequencies(config_)) {}

  [[nodiscard]] std::uint64_t parameters() const noexcept override { return weights_.parameters; }
  [[nodiscard]] std::uint32_t threads() const noexcept override {
    return static_cast<std::uint32_t>(arena_.max_concurrency());
  }
  [[nodiscard]] const char* isa() const noexcept override { return products_.isa; }
  void forward(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work) const override;
  void choose(Activations& work, std::uint32_t rows) const override;
  void likeliest(Activations& work, std::span<Likeliest> out) const override;
  void logits(Activations& work, std::uint32_t first, std::span<float> out) const override;

 private:
  template <class Body>
  void parallel(std::uint32_t count, const Body& body) const {
    if (count == 1) return body(0u);
    try {
      arena_.execute([&] { tbb::parallel_for(0u, count, body); });
    } catch (const std::runtime_error& e) {  // so TBB tells of a thread that it cannot start; the body throws nothing
      throw Error(Errc::out_of_capacity,
                  std::string("cannot multiply matrices: ") + e.what() +
                      "; use fewer threads, or raise the limit of processes (ulimit -u) or memory");
    }
  }

  /// body(row) for every row, in blocks.
  template <class Body>
  void each_row(std::uint32_t rows, const Body& body) const {
    parallel(static_cast<std::uint32_t>(div_up(rows, kPassRows)), [&](std::uint32_t block) {
      const std::uint32_t end = std::min(rows, (block + 1) * kPassRows);
      for (std::uint32_t row = block * kPassRows; row < end; ++row) body(row);
    });
  }

  /// y (=, +=) x w^T over all rows.
  void multiply(const Linear& w, std::uint32_t rows, Rows<const float> x, Rows<float> y, Into into) const {
    multiply(w, w.outs, rows, x, y, into);
  }
  /// By the first `outs` rows of w alone.
  void multiply(const Linear& w, std::uint32_t outs, std::uint32_t rows, Rows<const float> x, Rows<float> y,
                Into into) const {
    const std::uint64_t step_outs = std::max<std::uint64_t>(kStepBytes / (w.inner * sizeof(float)), 1);
    const std::uint32_t block_outs = rows <= kVectorRows ? static_cast<std::uint32_t>(step_outs) : kBlockOuts;
    const auto row_blocks = static_cast<std::uint32_t>(div_up(rows, kBlockRows));
    const auto out_blocks = static_cast<std::uint32_t>(div_up(outs, block_outs));
    parallel(row_blocks * out_blocks, [&](std::uint32_t task) {
      const std::uint32_t row = task / out_blocks * kBlockRows;
      const std::uint32_t out = task % out_blocks * block_outs;
      products_.multiply({.x = x.data + row * x.stride,
                          .w = w.values.data() + std::uint64_t{out} * w.inner,
                          .y = y.data + row * y.stride + out,
                          .rows = std::min(kBlockRows, rows - row),
                          .inner = w.inner,
                          .outs = std::min(block_outs, outs - out),
                          .x_stride = x.stride,
                          .y_stride = y.stride,
                          .into = into});
    });
  }

  void normalise(std::uint32_t rows, std::span<const float> gain, HostActivations& work) const {
    const std::uint64_t hidden = config_.hidden_size;
    each_row(rows, [&](std::uint32_t row) {
      rms_norm(&work.residual[row * hidden], gain, config_.rms_norm_eps, &work.normed[row * hidden]);
    });
  }

  void start(std::span<const PlacedToken> tokens, HostActivations& work) const;
  /// What the next layer's query weights make of the attention input.
  void rehearse(const Layer& next, HostActivations& work) const;
  /// @param rehearsed  as in AttentionCall
  void attention(const Layer& layer, LayerId id, const TensorView& rehearsed, const Attend& attend,
                 HostActivations& work) const;
  void mlp(const Layer& layer, HostActivations& work) const;

  [[nodiscard]] std::uint64_t qkv_width() const { return std::uint64_t{heads()} * config_.head_dim; }
  [[nodiscard]] std::uint64_t q_width() const { return std::uint64_t{config_.num_attention_heads} * config_.head_dim; }
  [[nodiscard]] std::uint32_t heads() const { return config_.num_attention_heads + 2 * config_.num_key_value_heads; }

  const ModelConfig config_;
  mutable tbb::task_arena arena_;
  const Weights weights_;
  const std::vector<double> frequencies_;
  const Products& products_ = best_products();
};

/// Sizes the buffers, looks the embeddings up and computes the rotations, which all layers share.
void HostEngine::start(std::span<const PlacedToken> tokens, HostActivations& work) const {
  const std::uint64_t rows = tokens.size();
  const std::uint64_t hidden = config_.hidden_size;
  const std::uint64_t half = config_.head_dim / 2;
  work.rows = static_cast<std::uint32_t>(rows);
  grow(work.residual, rows * hidden);
  grow(work.normed, rows * hidden);
  grow(work.qkv, rows * qkv_width());
  grow(work.attended, rows * q_width());
  grow(work.gate_up, rows * 2 * config_.intermediate_size);
  grow(work.rotation, rows * 2 * half);

  each_row(work.rows, [&](std::uint32_t row) {
    const auto embedding = weights_.embeddings.values.begin() + static_cast<std::ptrdiff_t>(tokens[row].token * hidden);
    std::copy_n(embedding, hidden, work.residual.begin() + static_cast<std::ptrdiff_t>(row * hidden));
    float* rotation = &work.rotation[row * 2 * half];
    for (std::size_t i = 0; i < half; ++i) {
      // In double: a float angle is off by 1e-3 rad at position 32,768.
      const double angle = tokens[row].position * frequencies_[i];
      rotation[i] = static_cast<float>(std::cos(angle));
      rotation[half + i] = static_cast<float>(std::sin(angle));
    }
  });
}

void HostEngine::rehearse(const Layer& next, HostActivations& work) const {
  const std::uint32_t q_heads = config_.num_attention_heads;
  const std::uint64_t dim = config_.head_dim;
  grow(work.rehearsed, work.rows * q_width());
  multiply(next.qkv, q_heads * config_.head_dim, work.rows, {work.normed.data(), config_.hidden_size},
           {work.rehearsed.data(), q_width()}, Into::overwrite);
  each_row(work.rows, [&](std::uint32_t row) {
    for (std::uint32_t head = 0; head < q_heads; ++head)
      rotate(&work.rehearsed[row * q_width() + head * dim], &work.rotation[row * dim], dim / 2);
  });
}

void HostEngine::attention(const Layer& layer, LayerId id, const TensorView& rehearsed, const Attend& attend,
                           HostActivations& work) const {
  const std::uint32_t rows = work.rows;
  const std::uint32_t q_heads = config_.num_attention_heads;
  const std::uint32_t kv_heads = config_.num_key_value_heads;
  const std::uint64_t dim = config_.head_dim;
  const std::uint64_t hidden = config_.hidden_size;
  normalise(rows, layer.attention_norm, work);
  multiply(layer.qkv, rows, {work.normed.data(), hidden}, {work.qkv.data(), qkv_width()}, Into::overwrite);
  each_row(rows, [&](std::uint32_t row) {
    for (std::uint32_t head = 0; head < q_heads + kv_heads; ++head) {
      rotate(&work.qkv[row * qkv_width() + head * dim], &work.rotation[row * dim], dim / 2);
    }
  });

  const float* const qkv = work.qkv.data();
  const auto [q, k, v] =
      qkv_views(dense_view(qkv, DType::f32, rows, q_heads + 2 * kv_heads, config_.head_dim), q_heads, kv_heads);
  attend({.layer = id,
          .q = q,
          .k = k,
          .v = v,
          .out = dense_view(work.attended.data(), DType::f32, rows, q_heads, config_.head_dim),
          .rehearsed = rehearsed});
  multiply(layer.output, rows, {work.attended.data(), q_width()}, {work.residual.data(), hidden}, Into::add);
}

void HostEngine::mlp(const Layer& layer, HostActivations& work) const {
  const std::uint32_t rows = work.rows;
  const std::uint64_t hidden = config_.hidden_size;
  const std::uint32_t inner = config_.intermediate_size;
  normalise(rows, layer.mlp_norm, work);
  multiply(layer.gate_up, rows, {work.normed.data(), hidden}, {work.gate_up.data(), 2ull * inner}, Into::overwrite);
  each_row(rows, [&](std::uint32_t row) {
    float* gate = &work.gate_up[row * 2ull * inner];
    products_.swiglu(gate, gate + inner, inner);
  });
  multiply(layer.down, rows, {work.gate_up.data(), 2ull * inner}, {work.residual.data(), hidden}, Into::add);
}

void HostEngine::forward(std::span<const PlacedToken> tokens, const Attend& attend, Activations& work) const {
  HostActivations& own = buffers(work);
  start(tokens, own);
  for (std::uint32_t i = 0; i < config_.num_hidden_layers; ++i) {
    const bool rehearsed = work.rehearse && i != 0;
    attention(weights_.layers[i], LayerId{i},
              rehearsed ? dense_view(std::as_const(own.rehearsed).data(), DType::f32, own.rows,
                                     config_.num_attention_heads, config_.head_dim)
                        : TensorView{},
              attend, own);
    // The input of this layer's attention, which `mlp` is about to overwrite.
    if (work.rehearse && i + 1 != config_.num_hidden_layers) rehearse(weights_.layers[i + 1], own);
    mlp(weights_.layers[i], own);
  }
}

void HostEngine::choose(Activations& work, std::uint32_t rows) const {
  HostActivations& own = buffers(work);
  const std::uint64_t hidden = config_.hidden_size;
  const std::uint64_t first = (own.rows - rows) * hidden;
  grow(own.logits, std::uint64_t{rows} * config_.vocab_size);
  for (std::uint32_t row = 0; row < rows; ++row) {
    const std::uint64_t at = first + row * hidden;
    rms_norm(&own.residual[at], weights_.final_norm, config_.rms_norm_eps, &own.normed[at]);
  }
  multiply(weights_.head(), rows, {&own.normed[first], hidden}, {own.logits.data(), config_.vocab_size},
           Into::overwrite);
}

void HostEngine::likeliest(Activations& work, std::span<Likeliest> out) const {
  const std::size_t vocabulary = config_.vocab_size;
  for (std::size_t row = 0; row < out.size(); ++row)
    out[row] = tools::likeliest(std::span(buffers(work).logits).subspan(row * vocabulary, vocabulary));
}

void HostEngine::logits(Activations& work, std::uint32_t first, std::span<float> out) const {
  std::ranges::copy(std::span(buffers(work).logits).subspan(std::size_t{first} * config_.vocab_size, out.size()),
                    out.begin());
}

}  // namespace

std::unique_ptr<Engine> make_host_engine(const ModelConfig& config, const WeightSource& source,
                                         const ModelOptions& options) {
  return std::make_unique<HostEngine>(config, source, options);
}

}  // namespace sluice::tools
