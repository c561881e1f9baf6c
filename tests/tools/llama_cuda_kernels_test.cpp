#include <cmath>
#include <random>

#include "tests/support/catch.hpp"
#include "tests/tools/llama_cuda_support.hpp"
#include "tools/llama/cuda/cublas_lt.hpp"
#include "tools/llama/cuda/kernels.hpp"
#include "tools/llama/random_weights.hpp"

namespace {

using namespace sluice;
using namespace sluice::tools;
using cuda::Bf16;
using sluice::test::DeviceArray;
using sluice::test::from_bf16;
using sluice::test::gpu_queue;
using sluice::test::to_bf16;

/// Normal numbers with an outlier in fifty, as activations have.
std::vector<float> numbers(std::size_t count, std::uint32_t seed, float deviation = 1.f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.f, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random) * (random() % 50 == 0 ? 20.f : 1.f);
  return values;
}

/// The same, representable in bf16.
std::vector<float> bf16_numbers(std::size_t count, std::uint32_t seed, float deviation = 1.f) {
  return from_bf16(to_bf16(numbers(count, seed, deviation)));
}

/// Whether a bf16 is the rounding of `exact`, give or take the float32 arithmetic before it.
bool rounds(float bf16, double exact, double scale) {
  return std::abs(bf16 - exact) <= std::abs(exact) * 0x1p-8 + scale * 1e-5;
}

struct ProductCase {
  std::uint32_t rows;
  std::uint32_t inner;
  std::uint32_t outs;
};

struct Product {
  explicit Product(const ProductCase& c)
      : shape(c),
        x(bf16_numbers(std::size_t{c.rows} * c.inner, 1)),
        w(bf16_numbers(std::size_t{c.outs} * c.inner, 2, 0.1f)),
        y(numbers(std::size_t{c.rows} * c.outs, 3)) {}

  /// Largest error of `got`, as a multiple of float32's epsilon times the sum of absolute terms.
  [[nodiscard]] double error(std::span<const float> got, bool add) const {
    double worst = 0;
    for (std::uint32_t row = 0; row < shape.rows; ++row) {
      for (std::uint32_t out = 0; out < shape.outs; ++out) {
        const std::size_t at = std::size_t{row} * shape.outs + out;
        double sum = add ? y[at] : 0.0;
        double absolute = std::abs(sum);
        for (std::uint32_t c = 0; c < shape.inner; ++c) {
          const double term = double{x[std::size_t{row} * shape.inner + c]} * w[std::size_t{out} * shape.inner + c];
          sum += term;
          absolute += std::abs(term);
        }
        const double difference = std::abs(got[at] - sum) / (absolute * 0x1p-24);
        worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
      }
    }
    return worst;
  }

  ProductCase shape;
  std::vector<float> x;
  std::vector<float> w;
  std::vector<float> y;
};

}  // namespace

TEST_CASE("matvec equals the float64 product", "[llama][gpu]") {
  const auto rows = GENERATE(1u, 2u, 3u, 4u);
  const auto inner = GENERATE(8u, 264u, 384u, 1024u, 4096u, 14336u);
  const auto outs = GENERATE(1u, 13u, 320u);
  const bool add = GENERATE(false, true);
  CAPTURE(rows, inner, outs, add);
  const Product product({rows, inner, outs});
  const DeviceArray<Bf16> x(to_bf16(product.x));
  const DeviceArray<Bf16> w(to_bf16(product.w));
  const DeviceArray<float> y{std::span<const float>(product.y)};
  cuda::matvec({.x = x.data(), .w = w.data(), .y = y.data(), .rows = rows, .inner = inner, .outs = outs, .add = add},
               gpu_queue());
  CHECK(product.error(y.read(), add) < 8);
}

TEST_CASE("a row of matvec does not depend on its company", "[llama][gpu]") {
  const Product product({4, 4096, 100});
  const DeviceArray<Bf16> x(to_bf16(product.x));
  const DeviceArray<Bf16> w(to_bf16(product.w));
  const DeviceArray<float> together(4 * 100);
  cuda::matvec({.x = x.data(), .w = w.data(), .y = together.data(), .rows = 4, .inner = 4096, .outs = 100},
               gpu_queue());
  const std::vector<float> all = together.read();
  for (std::uint32_t row = 0; row < 4; ++row) {
    const DeviceArray<float> alone(100);
    cuda::matvec({.x = x.data() + row * 4096, .w = w.data(), .y = alone.data(), .rows = 1, .inner = 4096, .outs = 100},
                 gpu_queue());
    CHECK(alone.read() == std::vector<float>(all.begin() + row * 100, all.begin() + (row + 1) * 100));
  }
}

TEST_CASE("cuBLASLt's product equals the float64 product", "[llama][gpu]") {
  const cuda::CublasLt cublas;
  const auto shape = GENERATE(ProductCase{5, 384, 768}, ProductCase{17, 512, 384}, ProductCase{100, 1024, 384},
                              ProductCase{512, 384, 320}, ProductCase{33, 4096, 96}, ProductCase{8, 192, 13});
  const bool add = GENERATE(false, true);
  CAPTURE(shape.rows, shape.inner, shape.outs, add);
  const Product product(shape);
  const DeviceArray<Bf16> x(to_bf16(product.x));
  const DeviceArray<Bf16> w(to_bf16(product.w));
  const DeviceArray<float> y{std::span<const float>(product.y)};
  const auto workspace = test::gpu()->allocate(cuda::CublasLt::kWorkspaceBytes);
  cublas.multiply({.x = x.data(),
                   .w = w.data(),
                   .y = y.data(),
                   .rows = shape.rows,
                   .inner = shape.inner,
                   .outs = shape.outs,
                   .add = add},
                  {workspace->data(), workspace->bytes()}, gpu_queue());
  CHECK(product.error(y.read(), add) < 256);  // tensor cores truncate inside a block of products
}

TEST_CASE("rms_norm equals the float64 formula", "[llama][gpu]") {
  const auto rows = GENERATE(1u, 3u);
  const auto hidden = GENERATE(8u, 192u, 384u, 4096u, 8200u);
  const auto x = numbers(std::size_t{rows} * hidden, 4);
  const auto gain = numbers(hidden, 5);
  const DeviceArray<float> near_x{std::span<const float>(x)};
  const DeviceArray<float> near_gain{std::span<const float>(gain)};
  const DeviceArray<Bf16> out(x.size());
  cuda::rms_norm(
      {.x = near_x.data(), .gain = near_gain.data(), .out = out.data(), .rows = rows, .hidden = hidden, .eps = 1e-5f},
      gpu_queue());
  const auto got = from_bf16(out.read());
  std::size_t wrong = 0;
  for (std::uint32_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (std::uint32_t i = 0; i < hidden; ++i) sum += std::pow(double{x[row * hidden + i]}, 2);
    for (std::uint32_t i = 0; i < hidden; ++i) {
      const double exact = x[row * hidden + i] / std::sqrt(sum / hidden + 1e-5) * gain[i];
      if (!rounds(got[row * hidden + i], exact, std::abs(exact))) ++wrong;
    }
  }
  CAPTURE(rows, hidden);
  CHECK(wrong == 0);
}

TEST_CASE("start looks up embeddings and computes rotations to float32's precision at every position", "[llama][gpu]") {
  constexpr std::uint32_t kHidden = 72, kHalf = 64, kVocabulary = 50;
  const std::vector<PlacedToken> tokens = {{0, 0}, {49, 1}, {7, 32'767}, {7, 131'071}, {12, 1'000'003}};
  const auto rows = static_cast<std::uint32_t>(tokens.size());
  const auto table = bf16_numbers(kVocabulary * kHidden, 6);
  std::vector<double> frequencies(kHalf);
  for (std::uint32_t i = 0; i < kHalf; ++i) frequencies[i] = std::pow(500'000.0, -static_cast<double>(i) / kHalf);

  const auto pinned = test::gpu()->allocate_pinned(rows * sizeof(PlacedToken));
  std::memcpy(pinned->data(), tokens.data(), rows * sizeof(PlacedToken));
  const DeviceArray<Bf16> embeddings(to_bf16(table));
  const DeviceArray<double> near_frequencies{std::span<const double>(frequencies)};
  const DeviceArray<float> residual(std::size_t{rows} * kHidden);
  const DeviceArray<float> rotation(std::size_t{rows} * 2 * kHalf);
  cuda::start({.tokens = reinterpret_cast<const PlacedToken*>(pinned->data()),
               .embeddings = embeddings.data(),
               .frequencies = near_frequencies.data(),
               .residual = residual.data(),
               .rotation = rotation.data(),
               .rows = rows,
               .hidden = kHidden,
               .half = kHalf},
              gpu_queue());
  const auto got = residual.read();
  const auto turns = rotation.read();
  std::size_t wrong = 0;
  for (std::uint32_t row = 0; row < rows; ++row) {
    for (std::uint32_t i = 0; i < kHidden; ++i) {
      if (got[row * kHidden + i] != table[static_cast<std::uint32_t>(tokens[row].token) * kHidden + i]) ++wrong;
    }
    for (std::uint32_t i = 0; i < kHalf; ++i) {
      const double angle = tokens[row].position * frequencies[i];
      if (std::abs(turns[(row * 2) * kHalf + i] - std::cos(angle)) > 1e-7) ++wrong;
      if (std::abs(turns[(row * 2 + 1) * kHalf + i] - std::sin(angle)) > 1e-7) ++wrong;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("rotate turns the pairs of q and k and leaves v alone", "[llama][gpu]") {
  constexpr std::uint32_t kRows = 3, kHeads = 8, kRotated = 6;
  const auto half = GENERATE(8u, 32u, 64u);
  const auto x = numbers(std::size_t{kRows} * kHeads * 2 * half, 7);
  std::vector<float> rotation(std::size_t{kRows} * 2 * half);
  for (std::uint32_t row = 0; row < kRows; ++row) {
    for (std::uint32_t i = 0; i < half; ++i) {
      const double angle = 0.37 * row + 0.11 * i;
      rotation[row * 2 * half + i] = static_cast<float>(std::cos(angle));
      rotation[row * 2 * half + half + i] = static_cast<float>(std::sin(angle));
    }
  }
  const DeviceArray<float> near_x{std::span<const float>(x)};
  const DeviceArray<float> near_rotation{std::span<const float>(rotation)};
  const DeviceArray<Bf16> out(x.size());
  cuda::rotate({.x = near_x.data(),
                .rotation = near_rotation.data(),
                .out = out.data(),
                .rows = kRows,
                .heads = kHeads,
                .rotated = kRotated,
                .half = half},
               gpu_queue());
  const auto got = from_bf16(out.read());
  std::size_t wrong = 0;
  for (std::uint32_t row = 0; row < kRows; ++row) {
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      for (std::uint32_t i = 0; i < half; ++i) {
        const std::size_t at = (std::size_t{row} * kHeads + head) * 2 * half + i;
        const double cosine = head < kRotated ? rotation[row * 2 * half + i] : 1.0;
        const double sine = head < kRotated ? rotation[row * 2 * half + half + i] : 0.0;
        const double a = x[at];
        const double b = x[at + half];
        const double scale = std::abs(a) + std::abs(b);
        if (!rounds(got[at], a * cosine - b * sine, scale) || !rounds(got[at + half], b * cosine + a * sine, scale))
          ++wrong;
      }
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("swiglu equals the float64 formula, and saturates", "[llama][gpu]") {
  const auto rows = GENERATE(1u, 5u);
  const auto width = GENERATE(8u, 1024u, 1032u);
  auto gate_up = numbers(std::size_t{rows} * 2 * width, 8);
  gate_up[0] = -200.f;  // exp(200) overflows
  gate_up[1] = 200.f;
  const DeviceArray<float> near_x{std::span<const float>(gate_up)};
  const DeviceArray<Bf16> out(std::size_t{rows} * width);
  cuda::swiglu({.gate_up = near_x.data(), .out = out.data(), .rows = rows, .width = width}, gpu_queue());
  const auto got = from_bf16(out.read());
  std::size_t wrong = 0;
  for (std::uint32_t row = 0; row < rows; ++row) {
    for (std::uint32_t i = 0; i < width; ++i) {
      const double gate = gate_up[row * 2 * width + i];
      const double up = gate_up[row * 2 * width + width + i];
      if (!rounds(got[row * width + i], gate / (1 + std::exp(-gate)) * up, std::abs(up))) ++wrong;
    }
  }
  CAPTURE(rows, width);
  CHECK(wrong == 0);
}

TEST_CASE("weights drawn on the GPU are those of the CPU, bit by bit", "[llama][gpu]") {
  constexpr std::size_t kCount = 4096 * 256 * 2 + 77;  // more than the grid has threads
  const std::uint64_t key = random_key(7, "model.layers.3.mlp.down_proj.weight");
  const DeviceArray<Bf16> out(kCount);
  cuda::draw({.out = out.data(), .count = kCount, .key = key, .deviation = 0.02f}, gpu_queue());
  const auto got = out.read();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (got[i] != tools::to_bf16(random_normal(key, i) * 0.02f)) ++wrong;
  }
  CHECK(wrong == 0);
}
