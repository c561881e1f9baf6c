// Embeds the runtime as a serving stack would: a prompt chunk by chunk, then decode steps, layer by layer.
#include <cstdio>
#include <random>
#include <vector>

#include "sluice/runtime.hpp"

int main() {
  constexpr std::uint32_t kLayers = 2, kQHeads = 8, kKvHeads = 2, kHeadDim = 64, kChunk = 512;
  sluice::RuntimeOptions options;
  options.shape = {.layers = kLayers, .q_heads = kQHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
  sluice::Runtime runtime(options);  // No device given: near memory is ordinary memory, no GPU needed.
  const sluice::SequenceId sequence = runtime.begin(sluice::parse_policy("sluice"));

  // A model computes q, k and v; here they are random.
  std::mt19937 random(7);
  const auto tensor = [&](std::uint32_t heads) {
    std::vector<float> data(kChunk * heads * kHeadDim);
    for (float& x : data) x = std::normal_distribution<float>(0.f, 2.f)(random);
    return data;
  };
  const std::vector<float> q = tensor(kQHeads), k = tensor(kKvHeads), v = tensor(kKvHeads);
  std::vector<float> out(q.size());
  const auto view = [](auto& data, std::uint32_t tokens) {
    const auto heads = static_cast<std::uint32_t>(data.size() / (kChunk * kHeadDim));
    return sluice::dense_view(data.data(), sluice::DType::f32, tokens, heads, kHeadDim);
  };
  for (int chunk = 0; chunk < 8; ++chunk) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      runtime.prefill({sequence, {layer}, view(q, kChunk), view(k, kChunk), view(v, kChunk), view(out, kChunk)});
    }
  }
  for (int step = 0; step < 32; ++step) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      runtime.step({{layer}, {&sequence, 1}, view(q, 1), view(k, 1), view(v, 1), view(out, 1)});
    }
  }
  const sluice::Stats stats = runtime.stats(sequence);
  const double share = static_cast<double>(stats.attended_tokens) / static_cast<double>(stats.dense_tokens);
  std::printf("%u tokens, attended %.1f%% of what dense attention reads\n", runtime.tokens(sequence), 100.0 * share);
}
